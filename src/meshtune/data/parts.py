"""Tokenises samples in parts of fixed size, several at a time, and keeps finished parts on disk until all are done.

A preparation that was killed reads back the parts that it had finished. A part depends on its samples alone, so the
result is the same, bit for bit, wherever it was interrupted and however many threads worked on it. Memory is that of a
few parts.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import queue
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from meshtune.data.conversation import Origin, Sample
from meshtune.data.tokens import Example, TokenCounts, Tokenize

PART = 2048  # samples
_UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)


@dataclasses.dataclass(frozen=True)
class Part:
    """The examples of consecutive samples, what was counted, and whether any sample was a conversation."""

    examples: list[Example]
    counts: TokenCounts
    conversation: bool


Convert = Callable[[Tokenize, Iterable[Sample]], Iterable[Example]]


def tokenised_parts(
    samples: Sequence[Sample],
    tokenizes: Sequence[Tokenize],
    convert: Convert,
    directory: pathlib.Path | None,
    progress: Callable[[int], None],
) -> Iterator[Part]:
    """The parts of `samples` in order, each made by `convert` with one of `tokenizes`, of which each serves a thread.

    The tokenizer works outside of Python's lock, so that another part is rendered meanwhile. Finished parts are in
    `directory` (None: nowhere) until the caller removes it. `progress` is told the number of samples done. Raises what
    `convert` raises for the first part in which it does.
    """
    idle: queue.SimpleQueue[Tokenize] = queue.SimpleQueue()
    for tokenize in tokenizes:
        idle.put(tokenize)

    def work(start: int) -> Part:
        file = None if directory is None else directory / f"{start:012}.npz"
        stored = None if file is None else read_part(file)
        if stored is not None:
            return stored
        tokenize = idle.get()
        try:
            tokenize.counts = TokenCounts()
            chosen = (samples[index] for index in range(start, min(start + PART, len(samples))))
            part = Part(list(convert(tokenize, chosen)), tokenize.counts, tokenize.saw_conversation)
        finally:
            idle.put(tokenize)
        if file is not None:
            write_part(file, part)
        return part

    starts = iter(range(0, len(samples), PART))
    with ThreadPoolExecutor(len(tokenizes), "tokenise") as pool:
        pending: collections.deque[Future[Part]] = collections.deque()
        try:
            for start in starts:
                pending.append(pool.submit(work, start))
                if len(pending) > len(tokenizes):
                    break
            done = 0
            while pending:
                progress(done)
                part = pending.popleft().result()
                if (start := next(starts, None)) is not None:
                    pending.append(pool.submit(work, start))
                yield part
                done = min(done + PART, len(samples))
            progress(len(samples))
        finally:
            for future in pending:
                future.cancel()


def add_counts(total: TokenCounts, part: TokenCounts) -> None:
    """Adds the counts of a part to `total`."""
    for field in dataclasses.fields(TokenCounts):
        setattr(total, field.name, getattr(total, field.name) + getattr(part, field.name))


def write_part(file: pathlib.Path, part: Part) -> None:
    """Writes a part, which becomes visible only once it is complete. A disk that refuses is no error: the part is then
    tokenised again after an interruption."""
    names: dict[str, int] = {}
    sources = [names.setdefault(example.origin.source, len(names)) for example in part.examples]
    meta = {"counts": dataclasses.asdict(part.counts), "conversation": part.conversation, "sources": list(names)}
    arrays = {
        "ids": np.concatenate([np.zeros(0, np.int32), *(example.ids for example in part.examples)]),
        "weights": np.concatenate([np.zeros(0, np.float32), *(example.weights for example in part.examples)]),
        "lengths": np.array([len(example.ids) for example in part.examples], np.int64),
        "sources": np.array(sources, np.int32),
        "records": np.array([example.origin.record for example in part.examples], np.int64),
        "values": np.array([example.value for example in part.examples], np.float64),
        "meta": np.frombuffer(json.dumps(meta).encode(), np.uint8),
    }
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, draft = tempfile.mkstemp(dir=file.parent, suffix=".draft")
        try:
            with os.fdopen(descriptor, "wb") as stream:
                np.savez(stream, **arrays)
            os.replace(draft, file)
        except OSError:
            pathlib.Path(draft).unlink(missing_ok=True)


def read_part(file: pathlib.Path) -> Part | None:
    """A part that was written; None if there is none, or if it does not match its checksums."""
    try:
        with np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}  # checks the CRC-32 of each
        meta = json.loads(arrays["meta"].tobytes())
        ends = np.cumsum(arrays["lengths"])
        counts = TokenCounts(**meta["counts"])
        counts.skipped = [(origin, reason) for origin, reason in counts.skipped]
        rows = zip(ends - arrays["lengths"], ends, arrays["sources"], arrays["records"], arrays["values"], strict=True)
        examples = [
            Example(
                arrays["ids"][start:end],
                arrays["weights"][start:end],
                Origin(meta["sources"][source], int(record)),
                float(value),
            )
            for start, end, source, record, value in rows
        ]
        return Part(examples, counts, meta["conversation"])
    except (*_UNREADABLE, TypeError, IndexError):
        return None
