"""The batches of distillation on the student's own samples: completions without rewards, or the data's answers."""

from __future__ import annotations

import time

import numpy as np

from meshtune.arrays.tree import Tree
from meshtune.data.answered_prompts import AnsweredPrompts
from meshtune.objectives.config import DistillConfig
from meshtune.rollout.generate import Completion, sample_seed
from meshtune.rollout.saved import Rollout
from meshtune.rollout.source import RolloutSource, completion_metrics

DRAW = -1  # the place of a prompt in the seeds of draws that are of a whole rollout


class DistillSource(RolloutSource):
    """A RolloutSource whose completions are drawn from the student in a share `stage.on_policy` of the rollouts, by a
    draw of (seed, rollout), and are the data's answers in the others. Every token has weight 1."""

    def is_on_policy(self, number: int) -> bool:
        """Whether the completions of a rollout are the student's own."""
        assert isinstance(self.recipe.stage, DistillConfig)
        return sample_seed(self.recipe.seed, number, DRAW, 0) / 2**31 < self.recipe.stage.on_policy

    def generate(self, number: int, params: Tree) -> Rollout:
        """Generates rollout `number`, or takes it from the data; writes nothing. Raises: UserError as generate does."""
        started = time.perf_counter()
        records, samples = self.loader.rollout(number), self.options.samples
        own = self.is_on_policy(number)
        if own:
            groups = self._generate(params, records, number, samples)
        else:
            assert isinstance(self.loader.store, AnsweredPrompts)
            answers = [self.loader.store.answer(record.index).tolist() for record in records]
            groups = [[Completion(ids, [0.0] * len(ids), "data")] * samples for ids in answers]
        completions = [completion for group in groups for completion in group]
        count = sum(len(completion.ids) for completion in completions)
        return Rollout(
            number,
            [record.index for record in records],
            completions,
            np.zeros((len(completions), 0)),
            np.zeros(len(completions)),
            {"weights": np.ones(count, np.float32)},
            {"on_policy": float(own)} | (completion_metrics(completions) if own else {}),
            {},
            time.perf_counter() - started,
        )
