"""Tokenises samples in parts of fixed size, several at a time, and keeps finished parts on disk until all are done.

A preparation that was killed reads back the parts that it had finished. A part depends only on its samples, so the
result is the same, bit for bit, wherever it was interrupted and however many threads or processes worked on it. Memory
is that of a few parts.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import queue
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from meshtune.data.conversation import Sample
from meshtune.data.store import ExampleArrays
from meshtune.data.tokens import Example, TokenCounts, Tokenize

PART = 2048  # samples
_UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)


@dataclasses.dataclass(frozen=True)
class Part:
    """The examples of consecutive samples, their counts, and whether any sample was a conversation."""

    examples: ExampleArrays
    counts: TokenCounts
    conversation: bool


Convert = Callable[[Tokenize, Iterable[Sample]], Iterable[Example]]
MakePart = Callable[[Sequence[Sample]], Part]


def make_part(samples: Iterable[Sample], tokenize: Tokenize, convert: Convert) -> Part:
    """The part of `samples`. Raises what `convert` raises."""
    tokenize.counts = TokenCounts()
    examples = ExampleArrays.of(list(convert(tokenize, samples)))
    return Part(examples, tokenize.counts, tokenize.saw_conversation)


def tokenised_parts(
    samples: Sequence[Sample],
    makers: Sequence[MakePart],
    directory: pathlib.Path | None,
    progress: Callable[[int], None],
    share: tuple[int, int] = (0, 1),
) -> Iterator[Part]:
    """The parts of `samples` in order, each made by one of `makers`; each maker serves one thread.

    Finished parts are in `directory` (None: nowhere) until the caller removes it. With a `share` of (index, hosts) this
    host makes its share of the parts first, then reads those that other hosts have put into the same directory by then.
    `progress` is told the number of samples done. Raises what `makers` raise for the first part in which one does.
    """
    idle: queue.SimpleQueue[MakePart] = queue.SimpleQueue()
    for make in makers:
        idle.put(make)

    def work(start: int) -> Part:
        file = None if directory is None else directory / f"{start:012}.npz"
        stored = None if file is None else read_part(file)
        if stored is not None:
            return stored
        make = idle.get()
        try:
            part = make([samples[index] for index in range(start, min(start + PART, len(samples)))])
        finally:
            idle.put(make)
        if file is not None:
            write_part(file, part)
        return part

    host, hosts = share
    starts = range(0, len(samples), PART)
    with ThreadPoolExecutor(len(makers), "tokenise") as pool:
        shared = 0
        for _ in (
            _submit_ahead(pool, work, starts[host::hosts], len(makers)) if hosts > 1 and directory is not None else ()
        ):
            shared = min(shared + PART, len(samples))
            progress(shared)
        for index, part in enumerate(_submit_ahead(pool, work, starts, len(makers))):
            progress(max(shared, index * PART))
            yield part
        progress(len(samples))


def _submit_ahead(
    pool: ThreadPoolExecutor, work: Callable[[int], Part], starts: Sequence[int], threads: int
) -> Iterator[Part]:
    """The results of `work` in order; a few are computed ahead."""
    remaining = iter(starts)
    pending: collections.deque[Future[Part]] = collections.deque()
    try:
        pending.extend(pool.submit(work, start) for start in itertools.islice(remaining, threads + 1))
        while pending:
            part = pending.popleft().result()
            if (start := next(remaining, None)) is not None:
                pending.append(pool.submit(work, start))
            yield part
    finally:
        for future in pending:
            future.cancel()


def add_counts(total: TokenCounts, part: TokenCounts) -> None:
    """Adds the counts of a part to `total`."""
    for field in dataclasses.fields(TokenCounts):
        if field.name != "first":
            setattr(total, field.name, getattr(total, field.name) + getattr(part, field.name))
    total.first = part.first | total.first


def write_part(file: pathlib.Path, part: Part) -> None:
    """Writes a part, which becomes visible only once it is complete. A disk that refuses is no error: the part is then
    tokenised again after an interruption."""
    arrays = vars(part.examples).copy()
    names = list(arrays.pop("names"))
    meta = {"counts": dataclasses.asdict(part.counts), "conversation": part.conversation, "sources": names}
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, draft = tempfile.mkstemp(dir=file.parent, suffix=".draft")
        try:
            with os.fdopen(descriptor, "wb") as stream:
                np.savez(stream, meta=np.frombuffer(json.dumps(meta).encode(), np.uint8), **arrays)
            os.replace(draft, file)
        except OSError:
            pathlib.Path(draft).unlink(missing_ok=True)


def read_part(file: pathlib.Path) -> Part | None:
    """A part that was written; None if there is none, or if it does not match its checksums."""
    try:
        with np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}  # checks the CRC-32 of each
        meta = json.loads(arrays.pop("meta").tobytes())
        counts = TokenCounts(**meta["counts"])
        counts.skipped = [(origin, reason) for origin, reason in counts.skipped]
        return Part(ExampleArrays(**arrays, names=tuple(meta["sources"])), counts, meta["conversation"])
    except (*_UNREADABLE, TypeError, IndexError):
        return None
