"""Damage of a checkpoint by a disk is noticed: it is named, and the newest undamaged one is used instead."""

from __future__ import annotations

import json
import pathlib
import random
import shutil

import jax
import jax.numpy as jnp
import pytest
from checkpoint_states import bits, record_of, state_of
from damage import damage, flip_bit, truncate
from sharded_job import run, run_well

from meshtune.digests import DamagedError
from meshtune.errors import UserError
from meshtune.train.checkpoint.checkpoints import Checkpoints, Record
from meshtune.train.checkpoint.resume import Resumed, find_resume


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory) -> pathlib.Path:
    """Checkpoints of updates 1 and 2."""
    directory = tmp_path_factory.mktemp("undamaged") / "checkpoints"
    with Checkpoints(directory, keep=3) as checkpoints:
        for step in (1, 2):
            checkpoints.save(state_of(step), record_of(step))
    return directory


@pytest.fixture
def directory(two_checkpoints, tmp_path) -> pathlib.Path:
    """A copy of them, to be damaged."""
    return pathlib.Path(shutil.copytree(two_checkpoints, tmp_path / "checkpoints"))


def resume(directory: pathlib.Path) -> Resumed:
    """Resumes, and compares the restored state with the saved one, bit for bit."""
    with Checkpoints(directory, keep=3) as checkpoints:
        resumed = find_resume(checkpoints, record_of(0))
        assert resumed is not None
        state = checkpoints.restore(resumed.step, jax.tree.map(jnp.zeros_like, state_of(1)))
        assert bits(state) == bits(state_of(resumed.step))
        checkpoints.save(state_of(3), record_of(3))  # the run goes on in the same directory
        checkpoints.wait()
        assert checkpoints.latest() == 3
    return resumed


def largest(directory: pathlib.Path) -> pathlib.Path:
    return max((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def test_a_flipped_bit_is_named_with_its_file_and_the_checkpoint_before_is_used(directory):
    file = largest(directory / "2")
    flip_bit(file, random.Random(0))
    resumed = resume(directory)
    assert resumed.step == 1
    name = file.relative_to(directory / "2").as_posix()
    aside = directory.parent / "checkpoints-damaged/2"
    assert resumed.notes == [
        f"the checkpoint of update 2 is not used: {name} is damaged: its contents are not those that were written; "
        f"it is now in {aside}"
    ]
    assert aside.is_dir()


def test_a_checkpoint_cut_in_half_says_how_much_is_missing(directory):
    file = largest(directory / "2")
    truncate(file, random.Random(0))
    with (
        Checkpoints(directory, keep=3) as checkpoints,
        pytest.raises(DamagedError, match=r"bytes long, and [\d,]+ were"),
    ):
        checkpoints.restore(2, state_of(2))


def test_undamaged_checkpoints_resume_without_a_note(directory):
    assert resume(directory) == Resumed(2, None, 0, None, [])


def test_where_no_checkpoint_is_whole_the_error_names_them_all(directory):
    (directory / "1/state/manifest.ocdbt").unlink()
    record = directory / "2/record/metadata"
    record.write_text(record.read_text().replace('"seed": 3', '"seed": 4'))
    with Checkpoints(directory, keep=3) as checkpoints, pytest.raises(UserError) as caught:
        find_resume(checkpoints, record_of(0))
    assert caught.value.what == (
        "no checkpoint of this run is whole: update 2: record/metadata is damaged: it is not what was written; "
        "update 1: state/manifest.ocdbt is damaged: it is missing"
    )
    assert caught.value.fix is not None
    assert "overwrite=true" in caught.value.fix
    assert {path.name for path in directory.iterdir()} == {"1", "2"}, "nothing is moved where nothing can be used"


def test_a_checkpoint_of_a_version_without_digests_is_used_and_said_to_be_unchecked(directory):
    shutil.rmtree(directory / "1")
    record = directory / "2/record/metadata"
    record.write_text(json.dumps(json.loads(record.read_text())["record"]))
    (directory / "2/state/digests.json").unlink()
    resumed = resume(directory)
    assert resumed.step == 2
    assert resumed.notes == ["the checkpoint of update 2 is of a version that wrote no digests: it was read unchecked"]


def test_records_come_back_from_json():
    record = record_of(3)
    assert Record.from_json(json.loads(json.dumps(record.to_json()))) == record


@pytest.mark.parametrize("seed", range(12))
def test_no_damage_to_the_newest_checkpoint_goes_unnoticed(directory, seed):
    """Where a file is not needed (a marker of Orbax's), the state is that of the newest one all the same."""
    done = damage(directory / "2", seed)
    resumed = resume(directory)
    assert resumed.step == 2 or resumed.notes, done


@pytest.mark.parametrize("part", ["state", "record", "."])
def test_a_part_of_another_checkpoint_is_noticed(directory, part):
    """Each part has its own digests, which are right: what it is of is compared too."""
    shutil.rmtree(directory / "2" / part)
    shutil.copytree(directory / "1" / part, directory / "2" / part)
    with (
        Checkpoints(directory, keep=3) as checkpoints,
        pytest.raises(DamagedError, match=r"(state|record/metadata) is damaged: it is of update 1"),
    ):
        checkpoints.restore(2, jax.tree.map(jnp.zeros_like, state_of(1)))


@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", "commit_success.txt", "state/commit_success.txt"])
@pytest.mark.parametrize("content", [b"", b"\xff\x00[[[", b"Ch"])
def test_a_damaged_marker_of_orbax_is_named_and_the_checkpoint_used(directory, name, content):
    (directory / "2" / name).write_bytes(content)
    resumed = resume(directory)
    assert resumed.step == 2
    assert [note.partition(" of the checkpoint")[0] for note in resumed.notes] == [name]


def test_damage_to_the_shard_of_any_process_is_found_by_all(tmp_path):
    """Two processes, only one of which compares the damaged file: both end with the error, and neither waits."""
    run_well("sharded_checkpoint_cases.py", str(tmp_path), "save", "fsdp=2", "full", "1", processes=2)
    state = tmp_path / "1/state"
    listed = set(json.loads((state / "digests.json").read_text())["files"])
    on_disk = {path.relative_to(state).as_posix() for path in state.rglob("*") if path.is_file()}
    assert on_disk - listed == {"digests.json", "commit_success.txt"}
    assert {name.split("/")[0] for name in listed} >= {"ocdbt.process_0", "ocdbt.process_1"}
    flip_bit(largest(state / "ocdbt.process_1"), random.Random(0))
    ended = run("sharded_checkpoint_cases.py", str(tmp_path), "restore", "fsdp=2", "full", "1", processes=2)
    for code, lines, errors in ended:
        assert code != 0
        assert not lines
        assert "state/ocdbt.process_1/d/" in errors
        assert "its contents are not those that were written" in errors
