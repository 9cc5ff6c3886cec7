"""Completions that other processes generate: `meshtune serve-rollouts`, in any number, through files of the run.

A request is a file: prompts, seeds, sampling, and the name of the file with the weights that have changed. Its blocks
of completions are computed from an empty batch by whichever replica locks them first, so the completions are the same
bits however many replicas there are. The lock of a replica that dies is free again, and another one takes its block.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from meshtune.arrays.tree import Tree, flatten, split
from meshtune.config.sections import RolloutSection
from meshtune.errors import StopRequested, UserError
from meshtune.mesh.layout import Layout
from meshtune.mesh.processes import Job
from meshtune.rollout.generate import Completion

FOLDER = "replicas"  # in that of rollouts
REQUEST = "request.json"
COMPLETIONS = 32  # of a block, where rollout.rows is not given
PAUSE = 0.05  # seconds between two looks at the files
PATIENCE = 60.0  # seconds without a block before a message
AGAIN = 60.0
DAY = 86400.0  # seconds that the other processes of a run wait for

Request = dict[str, Any]
Block = Callable[[Request, int], "list[list[Completion]]"]
"""Computes the completions of the prompts of a block."""


class RolloutReplicas:
    """A run's side: asks for completions and waits for them. All processes of `job` call it, and process 0 writes."""

    def __init__(
        self,
        folder: pathlib.Path,
        options: RolloutSection,
        changing: frozenset[str],
        layout: Layout | None,
        job: Job,
        notify: Callable[[str], None],
        identity: Mapping[str, Any],
    ):
        """`changing` are the paths of the parameters that updates change, and `identity` says whose run it is."""
        self._folder, self._options, self._changing, self._job = folder, options, changing, job
        self._layout, self._notify, self._identity, self._count = layout, notify, dict(identity), 0
        if job.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)

    def draw(
        self,
        params: Tree,
        prompts: Sequence[Sequence[int]],
        samples: int,
        stop_ids: frozenset[int],
        seed_of: Callable[[int, int], int],
        where: Sequence[str],
        progress: Callable[[int, int], None] | None = None,
        stop_signal: Callable[[], int | None] | None = None,
    ) -> list[list[Completion]]:
        """Returns `samples` completions of every prompt, as rollout.generate does.

        Raises: UserError of a replica; StopRequested once process 0 has a `stop_signal`, on all processes.
        """
        self._count += 1
        arrays = changing_arrays(params, self._changing, self._layout)
        blocks: list[Any] | int | None = None
        if self._job.is_main_process:
            name = f"{self._count:06}-{os.getpid()}-{time.time_ns()}"
            weights = f"{name}.safetensors"
            draft = self._folder / f".{weights}.partial"
            save_file({str(number): array for number, array in enumerate(arrays)}, draft)
            os.replace(draft, self._folder / weights)
            request = {
                "name": name,
                "weights": weights,
                "identity": self._identity,
                "options": self._options.model_dump(mode="json"),
                "prompts": [list(prompt) for prompt in prompts],
                "seeds": [[seed_of(prompt, sample) for sample in range(samples)] for prompt in range(len(prompts))],
                "stop_ids": sorted(stop_ids),
                "where": list(where),
            }
            _write(self._folder / REQUEST, request)
            blocks = self._wait(request, progress, stop_signal)
            (self._folder / weights).unlink()  # first: without them no replica computes a block again
            for file in self._folder.glob("[0-9]*"):
                file.unlink(missing_ok=True)
        blocks = self._job.broadcast(f"completions of replicas {self._count}", blocks, timeout=DAY)
        if isinstance(blocks, int):
            raise StopRequested(blocks)
        groups: list[list[Completion]] = []
        for block in blocks or ():
            if isinstance(block, dict):
                raise UserError(block["what"], where=block["where"], fix=block["fix"])
            groups += [[Completion(ids, log_probs, reason) for ids, log_probs, reason in group] for group in block]
        return groups

    def _wait(
        self,
        request: Request,
        progress: Callable[[int, int], None] | None,
        stop_signal: Callable[[], int | None] | None,
    ) -> list[Any] | int:
        """The results of all blocks, in their order, or the signal that came before."""
        missing, results = dict.fromkeys(range(len(block_spans(request)))), dict[int, Any]()
        since = time.monotonic()
        while missing:
            for number in list(missing):
                file = result_file(self._folder, request, number)
                if file.is_file():
                    results[number] = json.loads(file.read_text())
                    del missing[number]
                    since = time.monotonic()
            if progress is not None:
                progress(len(results), len(results) + len(missing))
            if time.monotonic() - since > PATIENCE:
                since = time.monotonic()
                self._notify("waiting for replicas that generate: meshtune serve-rollouts RECIPE, with this recipe")
            if missing:
                if stop_signal is not None and (received := stop_signal()) is not None:
                    return received
                time.sleep(PAUSE)
        return [results[number] for number in sorted(results)]

    def close(self, stopped_by: int | None = None) -> None:
        """Lets the replicas end, unless SIGTERM has stopped the run: a scheduler that sends it starts the run again."""
        if self._job.is_main_process and self._folder.is_dir() and stopped_by != signal.SIGTERM:
            _write(self._folder / REQUEST, {"name": f"end-{time.time_ns()}", "end": True})


def changing_arrays(params: Tree, changing: frozenset[str], layout: Layout | None) -> list[np.ndarray]:
    """The arrays of the parameters that updates change, in an order that depends on their paths only. Collective; one
    array after another is gathered from the devices."""
    chosen, _ = split(params, lambda path: path in changing)
    leaves = [leaf for _, leaf in sorted(flatten(chosen).items())]
    arrays = jax.tree.leaves(leaves)
    if layout is None:
        return [np.asarray(array) for array in arrays]
    replicate = jax.jit(lambda array: array, out_shardings=layout.replicated)
    return [np.asarray(replicate(array).addressable_data(0)) for array in arrays]


def with_arrays(params: Tree, changing: frozenset[str], arrays: Sequence[np.ndarray]) -> Tree:
    """The inverse: parameters with these arrays, which are placed as the old ones are. Raises: UserError for arrays of
    another model or method."""
    flat = flatten(params)
    paths = sorted(path for path in flat if path in changing)
    old, tree = jax.tree.flatten([flat[path] for path in paths])
    if [array.shape for array in old] != [array.shape for array in arrays]:
        raise UserError(
            "the run trains other parameters than this recipe",
            where="method",
            fix="give serve-rollouts the recipe and the overrides of the run",
        )
    new = [jax.device_put(array, before.sharding) for before, array in zip(old, arrays, strict=True)]
    changed = dict(zip(paths, jax.tree.unflatten(tree, new), strict=True))
    return _replace(params, changed)


def _replace(tree: Tree, leaves: Mapping[str, Any], prefix: str = "") -> Tree:
    return {
        key: _replace(value, leaves, f"{prefix}{key}/")
        if isinstance(value, dict)
        else leaves.get(f"{prefix}{key}", value)
        for key, value in tree.items()
    }


def block_spans(request: Request) -> list[slice]:
    """The prompts of each block: as many as have `rollout.rows` completions together, and one at least."""
    prompts, samples = len(request["prompts"]), len(request["seeds"][0])
    size = max(1, (request["options"]["rows"] or COMPLETIONS) // samples)
    return [slice(first, first + size) for first in range(0, prompts, size)]


def result_file(folder: pathlib.Path, request: Request, block: int) -> pathlib.Path:
    """The file of a block's completions."""
    return folder / f"{request['name']}-{block:04}.json"


def requests(folder: pathlib.Path) -> Iterator[Request]:
    """A replica's side: the request to work on, again and again, until the run ends. Where it has ended already, it may
    go on within AGAIN seconds."""
    started, first = time.monotonic(), _read(folder)
    while True:
        request = _read(folder)
        if request is not None and request.get("end"):
            if request != first or time.monotonic() - started > AGAIN:
                return
        elif request is not None:
            yield request
        time.sleep(PAUSE)


def compute_blocks(folder: pathlib.Path, request: Request, first: int, compute: Block) -> None:
    """Computes the blocks of a request that no replica computes or has computed, from number `first` on; none of a
    request that is complete."""
    count = len(block_spans(request))
    for number in ((first + n) % count for n in range(count)):
        file, weights = result_file(folder, request, number), folder / request["weights"]
        if file.exists() or not weights.exists():
            continue
        with _lock(file.with_suffix(".lock")) as is_free:
            if not is_free or file.exists() or not weights.exists():  # in this order: weights are removed first
                continue
            try:
                groups = compute(request, number)
            except UserError as problem:
                _write(file, {"what": problem.what, "where": problem.where, "fix": problem.fix})
                return
            _write(file, [[[c.ids, c.log_probs, c.reason] for c in group] for group in groups])


def read_weights(folder: pathlib.Path, request: Request) -> list[np.ndarray]:
    """The arrays of a request. Raises FileNotFoundError for one that is complete."""
    arrays = load_file(folder / request["weights"])
    return [arrays[str(number)] for number in range(len(arrays))]


@contextlib.contextmanager
def _lock(file: pathlib.Path) -> Iterator[bool]:
    """Whether this process has the lock of a block, which the operating system releases when it ends."""
    with file.open("w") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _read(folder: pathlib.Path) -> Request | None:
    try:
        return json.loads((folder / REQUEST).read_text())
    except FileNotFoundError:
        return None


def _write(file: pathlib.Path, value: Any) -> None:
    draft = file.with_name(f".{file.name}.{os.uname().nodename}-{os.getpid()}.partial")
    draft.write_text(json.dumps(value))
    os.replace(draft, file)
