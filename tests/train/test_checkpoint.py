"""Checkpoints come back bit for bit, only whole ones count, and a disk that refuses loses nothing that was saved."""

import dataclasses
import json
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
import pytest
from checkpoint_states import bits, record_of, state_of

from meshtune.errors import UserError
from meshtune.train.checkpoint.checkpoints import Best, Checkpoints, versions
from meshtune.train.step.state import TrainState


def test_state_and_record_come_back_bit_for_bit(tmp_path):
    state, record = state_of(4), record_of(4, best=Best(2, 0.1 + 0.2), stale=2)
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        checkpoints.save(state, record)
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        assert checkpoints.latest() == 4
        assert checkpoints.record(4) == record
        restored = checkpoints.restore(4, jax.tree.map(jnp.zeros_like, state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(restored) == bits(state)


def test_keeps_the_newest_and_the_best(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in range(1, 7):
            checkpoints.save(state_of(step), record_of(step), keep=2 if step >= 2 else None)
        checkpoints.wait()
        assert checkpoints.steps() == [2, 5, 6]
        checkpoints.save(state_of(7), record_of(7), keep=7)  # a new best: the old one is thinned out
        checkpoints.wait()
        assert checkpoints.steps() == [6, 7]


def test_state_may_be_donated_while_it_is_being_saved(tmp_path):
    """The next step overwrites the buffers of a state that is still on its way to disk."""
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    state = TrainState(jnp.int32(0), {"w": jnp.zeros((2000, 1000))}, ())
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        for number in range(4):
            checkpoints.save(state, record_of(number))
            state = step(state)
        checkpoints.wait()
        for number in range(4):
            restored = checkpoints.restore(number, state)
            assert int(restored.step) == number
            np.testing.assert_array_equal(restored.trainable["w"], number)


def test_saving_does_not_wait_for_the_disk(tmp_path):
    """`save` returns while the checkpoint is not yet there; `wait` returns when it is."""
    state = TrainState(jnp.int32(0), {"w": jnp.asarray(np.random.default_rng(0).normal(size=5_000_000), "float32")}, ())
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(state, record_of(1))
        assert not checkpoints.path(1).exists()
        checkpoints.wait()
        assert checkpoints.path(1).exists()


def test_unfinished_checkpoints_do_not_count_and_are_removed(tmp_path):
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        checkpoints.save(state_of(1), record_of(1))
    shutil.copytree(tmp_path / "1", tmp_path / "2.orbax-checkpoint-tmp")
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        assert checkpoints.steps() == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path):
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        checkpoints.save(state_of(1), record_of(1))
        checkpoints.wait()
        with pytest.raises(UserError, match=r"adapter/a' is float32\[3, 5\] there and float32\[3, 6\] here"):
            checkpoints.restore(1, state_of(1, width=6))


def test_a_state_with_a_scale_of_the_loss_is_read_into_one_without_and_the_reverse(tmp_path):
    """An adapter of a run in float16 is trained on in bfloat16, where the loss is not scaled; and the reverse."""
    plain = state_of(1)
    scaled = dataclasses.replace(plain, loss_scale={"scale": jnp.float32(8), "good": jnp.int32(3)})
    first = dataclasses.replace(plain, loss_scale={"scale": jnp.float32(65536), "good": jnp.int32(0)})
    for number, (saved, like, expected) in enumerate(
        [(scaled, plain, plain), (plain, first, first), (scaled, first, scaled)]
    ):
        with Checkpoints(tmp_path / str(number), keep=3) as checkpoints:
            checkpoints.save(saved, record_of(1))
            checkpoints.wait()
            restored = checkpoints.restore(
                1, dataclasses.replace(like, trainable=jax.tree.map(jnp.zeros_like, like.trainable))
            )
        assert jax.tree.structure(restored) == jax.tree.structure(expected)
        assert bits(restored) == bits(expected)


@pytest.mark.parametrize("victim", ["state/manifest.ocdbt", "record/metadata", "state/_METADATA"])
def test_a_damaged_checkpoint_is_an_error_that_says_what_to_do(tmp_path, victim):
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        checkpoints.save(state_of(1), record_of(1))
    (tmp_path / "1" / victim).write_bytes(b"\x00broken")

    def read():
        with Checkpoints(tmp_path, keep=3) as checkpoints:
            checkpoints.record(1)
            checkpoints.restore(1, state_of(1))

    with pytest.raises(UserError, match="delete this directory"):
        read()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    process = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], capture_output=True, text=True
    )
    if process.returncode:
        pytest.skip(f"cannot mount a small file system: {process.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def big(step: int) -> TrainState:
    noise = np.random.default_rng(step).normal(size=600_000).astype("float32")  # noise: it does not compress
    return TrainState(jnp.int32(step), {"w": jnp.asarray(noise)}, ())


def test_a_disk_without_room_is_named_before_anything_is_trained(small_disk):
    noise = TrainState(jnp.int32(0), {"w": jnp.zeros(3_000_000)}, ())
    with Checkpoints(small_disk / "checkpoints", keep=3) as checkpoints:
        checkpoints.check_room(big(0))
        with pytest.raises(UserError, match="no space left on the device") as caught:
            checkpoints.check_room(noise)
    assert "make room" in (caught.value.fix or "")


def test_a_full_disk_is_one_message_and_loses_nothing_saved(small_disk):
    place = small_disk / "checkpoints"

    def fill():
        with Checkpoints(place, keep=99) as checkpoints:
            for step in range(1, 12):
                checkpoints.save(big(step), record_of(step))

    with pytest.raises(UserError, match=r"no space left on the device .*; whole checkpoints there: 1") as caught:
        fill()
    assert "resume=true" in (caught.value.fix or "")
    with Checkpoints(place, keep=99) as checkpoints:
        steps = checkpoints.steps()
        assert 1 <= len(steps) <= 4
        for step in steps:
            assert bits(checkpoints.restore(step, big(0))) == bits(big(step))
        # And once there is room again, the run goes on in the same place.
        shutil.rmtree(place / str(steps[0]))
        shutil.rmtree(place / str(steps[1]))
    with Checkpoints(place, keep=99) as checkpoints:
        checkpoints.save(big(50), record_of(50))
        checkpoints.wait()
        assert bits(checkpoints.restore(50, big(0))) == bits(big(50))


def test_a_read_only_disk_is_one_message_and_loses_nothing_saved(small_disk):
    place = small_disk / "checkpoints"
    with Checkpoints(place, keep=3) as checkpoints:
        checkpoints.save(big(1), record_of(1))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)

    def go_on():
        with Checkpoints(place, keep=3) as checkpoints:
            assert bits(checkpoints.restore(1, big(0))) == bits(big(1))
            checkpoints.save(big(2), record_of(2))

    with pytest.raises(UserError, match="the file system is read-only; whole checkpoints there: 1"):
        go_on()


def test_a_file_in_the_place_of_the_directory_is_an_error(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(UserError, match=r"a file is in the way|not a directory"):
        Checkpoints(tmp_path / "checkpoints", keep=1)


def test_memory_is_flat_over_fifty_saves(tmp_path):
    """4 MB of state each: a leak of one copy a save would be 120 MB over the last thirty."""
    state = TrainState(jnp.int32(0), {"w": jnp.ones(1_000_000)}, ())
    used = []
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in range(50):
            checkpoints.save(state, record_of(step))
            used.append(psutil.Process().memory_info().rss)
    assert max(used[40:]) - max(used[10:20]) < 30e6


def test_the_record_says_which_versions_made_the_numbers():
    record = versions()
    assert record["jax"] == jax.__version__
    assert record["optax"] == optax.__version__
    json.dumps(record)
