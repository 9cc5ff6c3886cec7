"""Updates that bfloat16 rounds away are warned of, on every optimizer, and not where they are kept."""

from __future__ import annotations

import io
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import meshtune
from meshtune.arrays.spec import ArraySpec
from meshtune.config.load import load_recipe
from meshtune.optim.build import OPTIMIZERS
from meshtune.train.loop import LostUpdates
from meshtune.train.run import train

QUICKSTART = pathlib.Path(meshtune.__file__).parent / "quickstart"
WARNING = r"warning: only (\d+(?:\.\d+)?)% of the weights in bfloat16 changed in updates 1 to 3: at a rate of"
BY_OPTIMIZER = {
    "galore": ("optimizer.rank=8",),
    "apollo": ("optimizer.rank=8",),
    "prodigy": ("optimizer.learning_rate=1",),
    "in backward": ("optimizer.name=adamw8bit", "optimizer.in_backward=true", "optimizer.max_grad_norm=null"),
}


def run(folder: pathlib.Path, *changes: str) -> str:
    """Returns the output of a run of four updates."""
    data = folder / "lesson.jsonl"
    data.write_text("".join((QUICKSTART / "lesson.jsonl").read_text().splitlines(keepends=True)[:12]))
    fields = {
        "model": str(QUICKSTART / "model"),
        "data": {"train": str(data), "max_length": 256},
        "output": str(folder / "out"),
        "method": "full",
        "train": {"steps": 4, "batch_size": 2},
        "compute": {"precision": "bfloat16"},
        "optimizer": {"learning_rate": 2e-6, "schedule": "constant", "warmup_steps": 0},
    }
    text = io.StringIO()
    train(load_recipe(fields, list(changes)), console=Console(file=text, width=400))
    return text.getvalue()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))


@pytest.mark.slow
def test_a_rate_that_bfloat16_rounds_away_is_warned_of_with_what_to_do(tmp_path):
    output = run(tmp_path)
    match = re.search(WARNING, output)
    assert match, output
    assert float(match[1]) < 5
    assert "compute.precision=mixed" in output
    assert "optimizer.stochastic_rounding=true" in output


NAMES = [name for name in OPTIMIZERS if name not in ("adamw", "badam")] + ["in backward"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_is_watched(tmp_path, name):
    chosen = BY_OPTIMIZER.get(name, ())
    named = () if name == "in backward" else (f"optimizer.name={name}",)
    assert re.search(WARNING, run(tmp_path, *named, *chosen))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        ("compute.precision=mixed",),
        ("compute.precision=float32",),
        ("optimizer.stochastic_rounding=true",),
        ("optimizer.learning_rate=1e-2",),
        ("optimizer.name=badam", "optimizer.switch_every=2"),  # its layer has a float32 copy
        ("method=lora", "optimizer.learning_rate=2e-4"),
    ],
    ids=lambda changes: changes[0],
)
def test_each_way_out_ends_the_warning(tmp_path, changes):
    assert "warning: only" not in run(tmp_path, *changes)


def test_the_share_is_of_matrices_in_narrow_dtypes():
    """Of an embedding, and of float32 arrays, unchanged numbers mean nothing."""
    roles = {"matrix": ("matrix", "bfloat16"), "embed": ("table", "bfloat16"), "wide": ("matrix", "float32")}
    abstract = {
        name: {"weight": ArraySpec((64, 64), dtype, ("out", "in"), role=role)} for name, (role, dtype) in roles.items()
    }
    before = {name: {"weight": jnp.ones((64, 64), dtype)} for name, (_, dtype) in roles.items()}
    rates = np.full(5, 1e-3)
    for rows, expected in ((2, "only 3.1% of the weights in bfloat16 changed in updates 1 to 3"), (40, None)):
        watch = LostUpdates(abstract, rates, 0)
        watch.before(before, 0)
        after = before | {"matrix": {"weight": before["matrix"]["weight"].at[:rows].add(0.5)}}
        assert watch.after(after, 2) is None
        warning = watch.after(after, 3)
        assert warning is None if expected is None else expected in (warning or "")
        assert watch.after(before, 4) is None, "it is said once"


def test_updates_of_a_warm_up_are_not_watched():
    """During it even updates are lost that will be large enough at the full rate."""
    rates = np.concatenate([np.linspace(0, 1e-3, 10, endpoint=False), np.full(10, 1e-3)])
    watch = LostUpdates({}, rates, 0)
    assert (watch._first, watch._last) == (5, 8)
    assert LostUpdates({}, rates, 12)._first == 12, "a resumed run begins where it is"
