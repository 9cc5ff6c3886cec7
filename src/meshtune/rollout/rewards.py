"""The rewards of a recipe: scores of completions, from functions, reward models and servers."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshtune.config.rewards import FunctionReward, JsonSchemaReward, ModelReward, OverlongReward, Reward, reward_names
from meshtune.digests import digest_bytes, digest_json
from meshtune.errors import UserError
from meshtune.rollout.reward_functions import Completions, RewardLog, call_function, gather_functions, load_function
from meshtune.rollout.reward_process import RewardProcess, RewardTask

if TYPE_CHECKING:
    from meshtune.rollout.environment import Environments
    from meshtune.rollout.reward_model import RewardModel

__all__ = ["Completions", "Rewards", "Scores", "check_rewards"]


@dataclasses.dataclass(frozen=True)
class Scores:
    """`values` float64 [N, K] are the rewards of N completions by K functions, NaN where one does not apply. `columns`
    and `metrics` are what the functions logged."""

    values: np.ndarray
    columns: dict[str, list[Any]]
    metrics: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """The scores as JSON, for other processes."""
        values = [[None if math.isnan(value) else value for value in row] for row in self.values.tolist()]
        return {"values": values, "columns": self.columns, "metrics": self.metrics}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Scores:
        """The scores that `to_json` gave."""
        values = [[math.nan if value is None else value for value in row] for row in fields["values"]]
        return cls(np.array(values, np.float64), fields["columns"], fields["metrics"])


class Rewards:
    """The rewards of a recipe, ready to score. Close it, or use it as a context.

    `names` and `weights` float64 [K] are in the recipe's order. `digest` changes with the options that decide about a
    score, with the files of functions (and of modules that lie in their folder and are imported when they are loaded),
    with schemas and with the weights of reward models. It knows nothing of servers and installed packages.
    `max_tokens` is that of rollout; the rewards of `environments` come last.
    Raises UserError for what cannot be loaded.
    """

    def __init__(
        self,
        sections: Sequence[Reward],
        *,
        max_tokens: int | None = None,
        environments: Environments | None = None,
    ):
        self._sections, self._environments = list(sections), environments
        of_environments = list(environments.rewards) if environments is not None else []
        self.names = _names(sections) + of_environments
        self.weights = np.array([section.weight for section in sections] + [1.0] * len(of_environments), np.float64)
        _check_names(_names(sections), environments)
        self._tasks = {
            index: RewardTask(name, _options(section, max_tokens), section.timeout)
            for index, (name, section) in enumerate(zip(_names(sections), sections, strict=True))
            if not isinstance(section, ModelReward)
        }
        self._process = RewardProcess(list(self._tasks.values())) if self._tasks else None
        try:
            self._models = {
                index: _load_model(section)
                for index, section in enumerate(sections)
                if isinstance(section, ModelReward)
            }
        except BaseException:
            self.close()
            raise
        facts = [self._facts(index) for index in range(len(sections))]
        files = environments.files if environments is not None else ()
        self.digest = digest_json(facts + sorted(digest_bytes(file.read_bytes()) for file in files))

    def score(self, completions: Completions) -> Scores:
        """Scores completions.

        Raises UserError, naming function and record, where a reward fails or takes too long; nothing is scored after.
        """
        values = np.full((len(completions), len(self.names)), np.nan)
        log = RewardLog(count=len(completions))
        if len(completions):
            try:
                self._score(completions, values, log)
            except BaseException:
                self.close()  # replies may still come that are of these completions
                raise
        return Scores(values, log.columns, log.metrics)

    def _score(self, completions: Completions, values: np.ndarray, log: RewardLog) -> None:
        places = {index: place for place, index in enumerate(self._tasks)}
        local = [index for index in places if completions.environments is not None and self._names_environments(index)]
        remote = [place for index, place in places.items() if index not in local]
        if self._process is not None and remote:
            self._process.start(completions, remote)
        for index, model in self._models.items():
            values[:, index] = model.score(completions)
        for index in local:
            values[:, index] = _call_in_thread(self._tasks[index], completions, log)
        if self._environments is not None:
            for index, name in enumerate(self._environments.rewards, start=len(self._sections)):
                values[:, index] = self._environments.score(name, completions)
        if self._process is not None and remote:
            results, remote_log = self._process.results(remote)
            for index, place in places.items():
                if place in results:
                    values[:, index] = results[place]
            log.columns |= remote_log.columns
            log.metrics |= remote_log.metrics

    def _names_environments(self, index: int) -> bool:
        assert self._process is not None
        return self._process.loaded[list(self._tasks).index(index)].names_environments

    def _facts(self, index: int) -> object:
        """The facts about a reward that its scores depend on, as JSON."""
        section = self._sections[index]
        if isinstance(section, ModelReward):
            return [section.kind, section.max_length, self._models[index].digest]
        assert self._process is not None
        task = self._tasks[index]
        options = {key: value for key, value in task.options.items() if key not in ("timeout", "name", "weight")}
        files = list(self._process.loaded[list(self._tasks).index(index)].files)
        if isinstance(section, FunctionReward):
            options["function"] = section.function.rpartition(":")[2]
        if isinstance(section, JsonSchemaReward) and isinstance(section.json_schema, str):
            files, options["json_schema"] = [Path(section.json_schema)], None
        return [options, section.weight, sorted(digest_bytes(file.read_bytes()) for file in files)]

    def close(self) -> None:
        """Ends the process of the functions."""
        if self._process is not None:
            self._process.close()

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_rewards(
    sections: Sequence[Reward], *, max_tokens: int | None = None, environments: Environments | None = None
) -> None:
    """Raises UserError for rewards that cannot be loaded: names, files, functions, schemas, packages; and where neither
    sections nor `environments` have one.

    Functions are imported in a process that ends again; of reward models only small files are read, and servers are
    not called.
    """
    for section in sections:
        if isinstance(section, ModelReward):
            from meshtune.rollout.reward_model import check_reward_model

            check_reward_model(section.model)
    Rewards([section for section in sections if not isinstance(section, ModelReward)], max_tokens=max_tokens).close()
    _check_names(_names(sections), environments)


def _load_model(section: ModelReward) -> RewardModel:
    from meshtune.rollout.reward_model import RewardModel  # it imports generation, which runs without one may not need

    return RewardModel(section.model, section.max_length)


def _names(sections: Sequence[Reward]) -> list[str]:
    try:
        return reward_names(sections)
    except ValueError as problem:
        raise UserError(str(problem), where="rewards", fix="change one of them") from problem


def _check_names(names: Sequence[str], environments: Environments | None) -> None:
    """Raises UserError where environments have no reward and there is no other, and for a name that both have."""
    if environments is None:
        return
    if not names and not environments.rewards:
        raise UserError(
            "there is no reward: rewards is empty, and no environment has a method 'get_reward'",
            where="rewards",
            fix="give a list, such as rewards: [reward.py:score], or add get_reward to the environment",
        )
    if twice := next((name for name in environments.rewards if name in names), None):
        raise UserError(f"'{twice}' is a reward and an environment's", where="rewards", fix="give the reward a name")


def _options(section: Reward, max_tokens: int | None) -> dict[str, Any]:
    options = section.model_dump(mode="json")
    if isinstance(section, OverlongReward):
        options["max_tokens"] = section.max_tokens or max_tokens
    return options


def _call_in_thread(task: RewardTask, completions: Completions, log: RewardLog) -> list[float]:
    """Calls a function that has a parameter for environments, which live in this process, in a thread.

    A thread cannot be ended: one that does not return in time is left behind when the error ends the run.
    """
    function, _ = load_function(task.options["function"], task.name, task.timeout)
    results: list[list[float] | UserError] = []

    def call() -> None:
        try:
            if function.is_async:
                results.extend(asyncio.run(gather_functions([function], completions, log)))
            else:
                results.append(call_function(function, completions, log))
        except UserError as problem:
            results.append(problem)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(task.timeout)
    if not results:
        raise UserError(
            f"the reward '{task.name}' did not return within {task.timeout:g} seconds",
            where=function.place,
            fix="correct the function, or raise its `timeout` (seconds for all completions of a rollout)",
        )
    if isinstance(result := results[0], UserError):
        raise result
    return result
