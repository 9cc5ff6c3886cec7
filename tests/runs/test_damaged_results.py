"""Damage to what a run or an export leaves is an error that names the file, whatever reads it."""

from __future__ import annotations

import io
import json
import pathlib
import shutil

import pytest
from damage import damage
from rich.console import Console
from safetensors.numpy import load_file

from meshtune.config.load import load_recipe
from meshtune.digests import DamagedError, check_directory
from meshtune.errors import UserError
from meshtune.generate.api import load
from meshtune.runs.export import export
from meshtune.runs.output import read_run, write_run
from meshtune.runs.sources import find
from meshtune.train.run import train


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory, stories260k) -> pathlib.Path:
    """A run of two updates that wrote its own base, for a new token."""
    folder = tmp_path_factory.mktemp("run")
    data = folder / "lesson.jsonl"
    data.write_text("".join(json.dumps({"text": f"<call>{name} had a red hat."}) + "\n" for name in ("Tom", "Lily")))
    fields = {
        "model": {"path": str(stories260k), "new_tokens": ["<call>"]},
        "data": {"train": str(data), "max_length": 32},
        "output": str(folder / "out"),
        "train": {"steps": 2, "batch_size": 2},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHTUNE_CACHE", str(folder / "cache"))
        return train(load_recipe(fields), console=Console(file=io.StringIO())).output


@pytest.fixture
def run(finished_run, tmp_path) -> pathlib.Path:
    """A copy of it, to be damaged."""
    return pathlib.Path(shutil.copytree(finished_run, tmp_path / "out"))


def test_result_base_and_record_have_digests(run):
    for name in ("adapter", "base"):
        assert check_directory(run / name, fix="")
        listed = set(json.loads((run / name / "digests.json").read_text())["files"])
        assert listed | {"digests.json"} == {path.name for path in (run / name).iterdir()}
    assert read_run(run)["result"] == "adapter"
    assert find(run).adapter == run / "adapter"


@pytest.mark.parametrize("seed", range(12))
def test_no_damage_to_a_result_or_its_base_goes_unnoticed(run, seed):
    done = damage(run / ("adapter" if seed % 2 else "base"), seed)
    with pytest.raises(UserError) as caught:
        load(str(run))
    assert pathlib.Path(done.split()[0] if done.startswith("/") else done.split()[-1]).name in str(caught.value)
    assert caught.value.fix


def test_damage_to_an_adapter_given_by_its_own_path_is_found_too(run):
    (run / "adapter/tokenizer.json").write_text("{}")
    for use in (lambda: load(str(run / "adapter")), lambda: export(run / "adapter", run / "copy", merge=True)):
        with pytest.raises(DamagedError, match=r"tokenizer\.json is damaged: it is 2 bytes long"):
            use()


def test_a_file_changed_on_purpose_is_taken_when_the_digests_are_deleted(run, finished_run):
    config = run / "adapter/tokenizer_config.json"
    config.write_text(config.read_text() + "\n")
    (run / "adapter/digests.json").unlink()
    with pytest.raises(DamagedError, match=r"digests\.json is damaged: it is missing"):
        find(run)
    assert find(run / "adapter").adapter == run / "adapter"


def test_a_flipped_digit_in_run_json_is_found_and_the_next_write_replaces_it(run):
    text = (run / "run.json").read_text()
    (run / "run.json").write_text(text.replace('"step": 2', '"step": 3'))
    with pytest.raises(DamagedError, match=r"run\.json is damaged"):
        find(run)
    write_run(run, {"status": "running"})
    assert read_run(run) == {"status": "running"}


def test_what_export_writes_has_digests(run, tmp_path):
    for merge in (False, True):
        done = export(run, tmp_path / f"exported-{merge}", merge=merge)
        assert check_directory(done.path, fix="")
        damage(done.path, 3)
        with pytest.raises(UserError):
            load(str(done.path))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_two_hundred_damages_to_any_file_of_a_run_are_errors_or_change_nothing(finished_run, tmp_path, monkeypatch):
    """Each resumes the run by its own recipe and loads its result: a UserError, or the undamaged run's numbers, bit for
    bit. (The header of the adapter's file records the path of the base, which is in the output.)"""
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))
    adapter = numbers_of(finished_run)
    outcomes = {"refused": 0, "unchanged": 0}
    for seed in range(200):
        output = pathlib.Path(shutil.copytree(finished_run, tmp_path / f"out-{seed}"))
        done = damage(output, seed)
        try:
            recipe = load_recipe(output / "recipe.yaml", [f"output={output}", "resume=true"])
            train(recipe, console=Console(file=io.StringIO()))
            load(str(output))
        except UserError:
            outcomes["refused"] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}, {done}: a traceback") from error
        else:
            assert numbers_of(output) == adapter, f"seed {seed}, {done}"
            outcomes["unchanged"] += 1
        shutil.rmtree(output)
    assert outcomes["unchanged"] > 0, "a run whose newest checkpoint is damaged continues from the one before it"


def numbers_of(output: pathlib.Path) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in load_file(output / "adapter/adapter_model.safetensors").items()}
