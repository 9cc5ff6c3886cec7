"""Writes a state that a checkpoint keeps as a result: the adapter or model after that number of updates."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import pathlib
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from rich.console import Console

from meshtune import terminal
from meshtune.adapters.peft_format import BaseRecord
from meshtune.arrays.tree import Tree, named_leaves
from meshtune.config.load import load_recipe
from meshtune.data.loader import Loader
from meshtune.data.prepare import prepare_data
from meshtune.data.stream import Stream
from meshtune.digests import FILE
from meshtune.errors import UserError
from meshtune.model.compute import Compute
from meshtune.runs.output import ADAPTER, BASE, CHECKPOINTS, MODEL, RECIPE, check_result, read_run
from meshtune.setup.machine import this_machine
from meshtune.setup.run import Run, resolve_run
from meshtune.setup.start import tokenizer_of
from meshtune.train.assemble import load_model, optimizer_for, state_like
from meshtune.train.checkpoint.state_handler import read_arrays
from meshtune.train.result.final import export_result
from meshtune.train.step.state import TrainState, result_params
from meshtune.weights.publish import disk_errors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from meshtune.data.prompts import PromptLoader

RESULTS = "results"  # in a run: what its states are as results, by their updates
RECORD = "state.json"  # in such a folder, written last: the digest of the checkpoint that it was made from


def write_state(run: pathlib.Path, step: int) -> pathlib.Path:
    """Writes the state after update `step` of a run to its folder results/STEP, verified like the run's result, and
    returns the directory of the adapter or model; one that is there already is used again.

    Only the base and the checkpoint are read, on one device, whatever mesh the run has: the data too where an adapter's
    start was measured on them. Raises UserError as training does, and DamagedError for a damaged checkpoint.
    """
    checkpoint, folder = run / CHECKPOINTS / str(step), run / RESULTS / str(step)
    digest = _digest(checkpoint)
    with disk_errors(folder), _lock(run / RESULTS):
        if (result := _find_result(folder, digest)) is not None:
            return result
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        console = terminal.console(stderr=True)
        console.print(f"writing the state after update {step} to {folder}", markup=False, soft_wrap=True)
        path = _export(run, checkpoint, folder, console)
        (folder / RECORD).write_text(json.dumps({"checkpoint": digest}), encoding="utf-8")
        return path


def _export(run: pathlib.Path, checkpoint: pathlib.Path, folder: pathlib.Path, console: Console) -> pathlib.Path:
    fields = read_run(run)
    recipe = load_recipe(str(run / RECIPE), ["mesh={}", "compute.offload=[]", "compute.attention=auto"])
    machine = this_machine()
    machine = dataclasses.replace(machine, devices=machine.devices[:1])
    resolved = resolve_run(recipe, machine)
    _check_platform(resolved, fields.get("platform"), run)
    tokenizer, _ = tokenizer_of(recipe.model, resolved.source)  # of the model as published: new tokens are added to it
    resolved = _with_start(resolved, run)
    loader = _calibration_data(resolved, tokenizer)
    model = load_model(resolved, Console(quiet=True), compute=Compute(), loader=loader)
    trainable = _load_trained(resolved, checkpoint, fields["total"])
    model = dataclasses.replace(model, trainable=trainable, buffers={})
    base = BaseRecord(**fields["base"])
    ends = tuple(fields.get("ends") or ())
    return export_result(folder, model, resolved.method, resolved.source, base, tokenizer, ends=ends)


def _with_start(resolved: Run, run: pathlib.Path) -> Run:
    """The run with the base that it made for itself, where it did."""
    if not resolved.start.changed:
        return resolved
    check_result(run / BASE)
    return dataclasses.replace(resolved, source=run / BASE)


def _check_platform(resolved: Run, platform: str | None, run: pathlib.Path) -> None:
    """Raises UserError where the run's adapters began at a decomposition that another kind of device computed."""
    adapters = resolved.method.adapters
    current = resolved.machine.platform
    if adapters is not None and adapters.adapter in ("pissa", "loftq") and platform not in (None, current):
        raise UserError(
            f"{adapters.adapter} began at a decomposition of the base that {platform} computed, and that of {current} "
            "differs in its last bits",
            where=str(run),
            fix=f"write the state where there is {platform}: meshtune export RUN@STEP --to FOLDER",
        )


def _calibration_data(run: Run, tokenizer: PreTrainedTokenizerFast) -> Loader | Stream | PromptLoader | None:
    if not run.method.calibration_rows:
        return None
    return prepare_data(run.recipe, tokenizer, vocab=run.spec.vocab).train


def _load_trained(run: Run, checkpoint: pathlib.Path, total: int) -> Tree:
    """The parameters of a checkpoint that the run evaluates, samples from and exports."""
    optimizer, _ = optimizer_for(run, total)
    like = state_like(run, optimizer)
    if optimizer.eval_params is None:  # the optimizer's state is large, and nothing of it is in a result
        like = dataclasses.replace(like, opt_state={})
    arrays = read_arrays(checkpoint / "state", {name: tuple(leaf.shape) for name, leaf in named_leaves(like)})
    leaves = [jnp.asarray(arrays.pop(name)) for name, _ in named_leaves(like)]
    state: TrainState = jax.tree.unflatten(jax.tree.structure(like), leaves)
    return result_params(optimizer, state)


def _digest(checkpoint: pathlib.Path) -> str:
    """Identifies a checkpoint: a hash of the digests of its files."""
    content = (checkpoint / "state" / FILE).read_bytes() if (checkpoint / "state" / FILE).is_file() else b""
    return hashlib.sha256(content).hexdigest()


def _find_result(folder: pathlib.Path, digest: str) -> pathlib.Path | None:
    """The result in a folder if it was written, as a whole, of this very checkpoint, else None."""
    try:
        if json.loads((folder / RECORD).read_bytes())["checkpoint"] != digest:
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    path = next((folder / name for name in (ADAPTER, MODEL) if (folder / name).is_dir()), None)
    if path is not None:
        check_result(path)
    return path


@contextlib.contextmanager
def _lock(folder: pathlib.Path) -> Iterator[None]:
    """Keeps other processes from writing states of the same run, and waits for one that does."""
    folder.mkdir(exist_ok=True)
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
