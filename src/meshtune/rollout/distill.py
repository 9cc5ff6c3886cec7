"""The batches of distillation on the student's own samples: completions without rewards, or the data's answers."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from meshtune.arrays.tree import Tree
from meshtune.data.answered_prompts import AnsweredPrompts
from meshtune.objectives.config import DistillConfig
from meshtune.rollout.generate import Completion, sample_seed
from meshtune.rollout.saved import Rollout
from meshtune.rollout.source import RolloutSource, completion_metrics
from meshtune.rollout.teacher_server import Named, TeacherServer

DRAW = -1  # the place of a prompt in the seeds of draws that are of a whole rollout


class DistillSource(RolloutSource):
    """A RolloutSource whose completions are drawn from the student in a share `stage.on_policy` of the rollouts, by a
    draw of (seed, rollout), and are the data's answers in the others. Every token has weight 1.

    A teacher behind an address is asked about every completion, and its answers are in the rollout's file."""

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
        tokens: dict[str, np.ndarray] = {"weights": np.ones(count, np.float32)}
        if self.teacher is not None:
            prompts = [record.ids for record in records for _ in range(samples)]
            texts = [ids + completion.ids for ids, completion in zip(prompts, completions, strict=True)]
            named = self.teacher.score(texts, [len(ids) for ids in prompts])
            tokens["named_ids"] = np.concatenate([of_text.ids for of_text in named])
            tokens["named_log_probs"] = np.concatenate([of_text.log_probs for of_text in named])
        return Rollout(
            number,
            [record.index for record in records],
            completions,
            np.zeros((len(completions), 0)),
            np.zeros(len(completions)),
            tokens,
            {"on_policy": float(own)} | (completion_metrics(completions) if own else {}),
            {},
            time.perf_counter() - started,
        )


class NamedRows:
    """Adds what a teacher's server says to the rows of validation; every document is asked about once."""

    def __init__(self, teacher: TeacherServer):
        self._teacher = teacher
        self._answers: dict[tuple[bytes, int], Named] = {}

    def __call__(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The arrays [.., T] of a batch, with `named_ids` and `named_log_probs`. Raises: UserError as its score."""
        shape, width = arrays["tokens"].shape, self._teacher.options.top_k + 1
        names = ("tokens", "targets", "segment_ids", "weights")
        tokens, targets, segment_ids, weights = (arrays[name].reshape(-1, shape[-1]) for name in names)
        places: list[tuple[int, slice, tuple[bytes, int]]] = []
        asked: dict[tuple[bytes, int], list[int]] = {}
        for row in range(len(tokens)):
            for segment in np.unique(segment_ids[row][weights[row] > 0]):
                positions = np.flatnonzero(segment_ids[row] == segment)
                first = int(np.flatnonzero(weights[row, positions] > 0)[0])
                ids = [*tokens[row, positions].tolist(), int(targets[row, positions[-1]])]
                key = np.array(ids, np.int32).tobytes(), first + 1
                places.append((row, slice(positions[first], positions[-1] + 1), key))
                if key not in self._answers:
                    asked[key] = ids
        answers = self._teacher.score(list(asked.values()), [start for _, start in asked]) if asked else []
        self._answers |= dict(zip(asked, answers, strict=True))
        ids, log_probs = np.zeros((*tokens.shape, width), np.int32), np.zeros((*tokens.shape, width), np.float32)
        for row, span, key in places:
            ids[row, span], log_probs[row, span] = self._answers[key]
        named = {"named_ids": ids, "named_log_probs": log_probs}
        return dict(arrays) | {name: array.reshape(*shape, width) for name, array in named.items()}
