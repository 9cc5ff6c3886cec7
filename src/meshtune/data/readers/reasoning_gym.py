"""Tasks of reasoning-gym (https://github.com/open-thought/reasoning-gym) as prompts with rewards.

A record holds the task, its options and its number instead of reasoning-gym's own entry, which JSON would change: the
entry is made again from them where an answer is scored.
"""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshtune.data.conversation import Origin
from meshtune.data.readers.textfiles import one_run
from meshtune.errors import UserError, nearest, pip_install

if TYPE_CHECKING:
    from meshtune.data.readers.parquet import RunCache

SIZE = 500  # records, where the options say nothing


class GymRecords:
    """The records of a task (data.readers.textfiles.Records). `name` is what the recipe calls it."""

    files: Mapping[Any, Any] = types.MappingProxyType({})

    def __init__(self, records: list[dict[str, Any]], name: str, numbers: Sequence[int] | None = None):
        self._records, self.name, self._numbers = records, name, range(len(records)) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._records[index]

    def origin(self, index: int) -> Origin:
        return Origin(self.name, self._numbers[index])

    @property
    def runs(self) -> np.ndarray:
        return one_run(len(self))

    def random_access(self, cache: RunCache) -> GymRecords:
        return self

    def select(self, numbers: np.ndarray) -> GymRecords:
        return GymRecords([self._records[number] for number in numbers], self.name, numbers.tolist())

    def where(self, index: int) -> str:
        return str(self.origin(index))

    def sweep(self) -> Iterator[dict[str, Any]]:
        return iter(self._records)

    def check_unchanged(self) -> None:
        """Does nothing: there is no file."""


def open_gym(task: str, name: str, options: Mapping[str, Any]) -> GymRecords:
    """Opens a task as a source of records. Raises: UserError as `gym_records` does."""
    return GymRecords(gym_records(task, options), name)


def gym_records(task: str, options: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """The records of a task: `prompt`, a message; `answer`; and `entry` for the reward. A function of the options.

    `options` are size (500), seed (0) and those of the task's configuration. Raises UserError for an unknown task or
    option, and where the package is not installed.
    """
    chosen = {"size": SIZE, "seed": 0, **(options or {})}
    text = json.dumps(chosen, sort_keys=True)
    return [
        {
            "prompt": [{"role": "user", "content": str(entry["question"])}],
            "answer": str(entry["answer"]),
            "entry": json.dumps({"task": task, "options": chosen, "index": index}, sort_keys=True),
        }
        for index, entry in enumerate(_dataset(task, text))
    ]


def gym_score(completion: str, entry: str) -> float:
    """The score of a completion's answer, which may stand in <answer> tags, else is all of its text.

    `entry` is that of a record of `gym_records`.
    """
    from reasoning_gym.utils import extract_answer

    fields = json.loads(entry)
    dataset = _dataset(fields["task"], json.dumps(fields["options"], sort_keys=True))
    answer = extract_answer(completion) or completion.strip()
    return float(dataset.score_answer(answer, dataset[fields["index"]]))


@functools.lru_cache(maxsize=16)
def _dataset(task: str, options: str) -> Any:
    where = f"reasoning_gym:{task}"
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as problem:
        raise UserError(
            f"tasks of reasoning-gym need the package {problem.name}, which is not installed",
            where=where,
            fix=pip_install("rl"),
        ) from problem
    if task not in DATASETS:
        names = ", ".join(sorted(DATASETS))
        raise UserError(f"'{task}' is no task of reasoning-gym", where=where, fix=f"{nearest(task, DATASETS)}{names}")
    try:
        return reasoning_gym.create_dataset(task, **json.loads(options))
    except (TypeError, ValueError, AssertionError) as problem:
        fields = ", ".join(DATASETS[task][1].__dataclass_fields__)
        raise UserError(
            f"the task's options do not fit: {problem}", where=where, fix=f"its options are: {fields}"
        ) from problem
