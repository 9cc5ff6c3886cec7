"""A rollout and its file, which is on disk before the first update is made of it, so that a resumed run reads it."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
import pathlib
from typing import Any

import numpy as np

from meshtune.digests import digest_bytes
from meshtune.rollout.generate import Completion, Episode

FOLDER = "rollouts"
DIGEST_BYTES = 32  # hex digits at the end of a file


@dataclasses.dataclass(frozen=True)
class Rollout:
    """The completions of a rollout with their rewards, in the order of prompts and of each one's samples.

    `prompts` are their places in the data, one for each group. `rewards` float64 [N, K] are NaN where a reward does not
    apply; `advantages` float64 [N]. `tokens` has, by the name of a batch's array, float32 values of every completion's
    tokens, one after another: those that depend on the weights before the first update, and what is made of them.
    `metrics` are those of the rollout, and `notes` columns of text or numbers that rewards logged, each [N].
    """

    number: int
    prompts: list[int]
    completions: list[Completion]
    rewards: np.ndarray
    advantages: np.ndarray
    tokens: dict[str, np.ndarray]
    metrics: dict[str, float]
    notes: dict[str, list[Any]]
    seconds: float

    @property
    def edges(self) -> np.ndarray:
        """Where each completion's tokens begin and end in `tokens`, int64 [N + 1]."""
        return np.cumsum([0, *(len(completion.ids) for completion in self.completions)])

    def per_completion(self, name: str) -> list[np.ndarray]:
        """The values `name` of every completion's tokens."""
        edges = self.edges
        return [self.tokens[name][start:stop] for start, stop in itertools.pairwise(edges)]


def rollout_file(folder: pathlib.Path, number: int) -> pathlib.Path:
    """The file of a rollout."""
    return folder / f"{number:08}.npz"


def encode_rollout(rollout: Rollout) -> bytes:
    """A rollout as the bytes of an .npz, with their digest at the end."""
    facts = {
        "number": rollout.number,
        "prompts": rollout.prompts,
        "reasons": [completion.reason for completion in rollout.completions],
        "episodes": [
            completion.episode and dataclasses.asdict(completion.episode) for completion in rollout.completions
        ],
        "metrics": rollout.metrics,
        "notes": rollout.notes,
        "seconds": rollout.seconds,
    }
    arrays = {
        "facts": np.frombuffer(json.dumps(facts).encode(), np.uint8),
        "ids": np.array([i for completion in rollout.completions for i in completion.ids], np.int32),
        "log_probs": np.array([p for completion in rollout.completions for p in completion.log_probs], np.float32),
        "drawn": np.array([drawn for completion in rollout.completions for drawn in completion.drawn], bool),
        "edges": rollout.edges,
        "rewards": rollout.rewards,
        "advantages": rollout.advantages,
    } | {f"tokens.{name}": values for name, values in rollout.tokens.items()}
    stream = io.BytesIO()
    np.savez(stream, **arrays)  # pyright: ignore[reportArgumentType]
    return stream.getvalue() + digest_bytes(stream.getvalue()).encode()


def decode_rollout(content: bytes) -> Rollout | None:
    """The rollout that `encode_rollout` gave; None for bytes that are not it."""
    body, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    if digest_bytes(body).encode() != digest:
        return None
    with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
        facts, edges = json.loads(arrays["facts"].tobytes()), arrays["edges"].tolist()
        ids, log_probs = arrays["ids"].tolist(), arrays["log_probs"].tolist()
        drawn, episodes = arrays["drawn"].tolist(), [fields and Episode(**fields) for fields in facts["episodes"]]
        spans = list(zip(edges[:-1], edges[1:], facts["reasons"], episodes, strict=True))
        return Rollout(
            facts["number"],
            facts["prompts"],
            [
                Completion(ids[start:stop], log_probs[start:stop], reason, drawn[start:stop], episode)
                for start, stop, reason, episode in spans
            ],
            arrays["rewards"],
            arrays["advantages"],
            {name.partition(".")[2]: arrays[name] for name in arrays.files if name.startswith("tokens.")},
            facts["metrics"],
            facts["notes"],
            facts["seconds"],
        )


def write_rollout(folder: pathlib.Path, number: int, content: bytes) -> None:
    """Writes a rollout's file, on disk when it returns: the file and its name are synchronised."""
    folder.mkdir(parents=True, exist_ok=True)
    file = rollout_file(folder, number)
    draft = file.with_suffix(".writing")
    with draft.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(draft, file)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_rollout(folder: pathlib.Path, number: int) -> bytes | None:
    """The bytes of a rollout's file; None if there is none or it is damaged."""
    try:
        content = rollout_file(folder, number).read_bytes()
    except FileNotFoundError:
        return None
    return None if decode_rollout(content) is None else content


def remove_rollouts(folder: pathlib.Path, *, before: int = 0, after: int | None = None) -> None:
    """Removes the files of rollouts with numbers below `before`, and above `after`."""
    for file in folder.glob("*.npz"):
        number = int(file.stem)
        if number < before or (after is not None and number > after):
            file.unlink(missing_ok=True)
