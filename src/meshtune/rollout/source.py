"""The batches of online stages: rollouts of the weights that are trained, scored and laid out in rows."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshtune.arrays.batch import empty_arrays
from meshtune.arrays.tree import Tree
from meshtune.config.recipe import Recipe
from meshtune.config.rewards import reward_names
from meshtune.data.conversation import Origin
from meshtune.data.pictures.rows import Segment
from meshtune.data.prompts import PromptLoader, PromptRecord
from meshtune.generate.pictures import PromptPicture, PromptPictures, place_pictures, record_picture
from meshtune.mesh.processes import Job
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec
from meshtune.objectives.answers import without_critic
from meshtune.objectives.config import PpoConfig, RlooConfig
from meshtune.objectives.stages import STAGES
from meshtune.rollout.advantages import (
    next_kl_coef,
    rollout_tokens,
    start_kl_coef,
    total_rewards,
    with_kl_coef,
)
from meshtune.rollout.batch import (
    CompletionRows,
    completion_rows,
    computed_values,
    micro_batches,
    named_sizes,
    online_arrays,
)
from meshtune.rollout.environment import Environments, Episodes
from meshtune.rollout.generate import Completion, FollowTurns, generate, sample_seed
from meshtune.rollout.replicas import RolloutReplicas
from meshtune.rollout.rewards import Completions, Rewards, Scores
from meshtune.rollout.saved import (
    Rollout,
    decode_rollout,
    encode_rollout,
    read_rollout,
    write_rollout,
)
from meshtune.rollout.scoring import Scorer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from meshtune.data.pictures.expansion import DocumentPicture
    from meshtune.data.pictures.reader import PictureReader
    from meshtune.rollout.teacher_server import TeacherServer

HELD_OUT = -1  # the number of the rollouts of validation prompts: all evaluations draw with the same seeds


@dataclasses.dataclass(frozen=True)
class RolloutBatch:
    """The rows of one update (train.loop.TrainBatch). `rollout_rows` has the completions of a rollout that begins."""

    arrays: dict[str, np.ndarray]
    origins: list[list[list[Origin]]]
    step: int
    metrics: Mapping[str, float]
    seconds: float
    rollout_rows: Sequence[Mapping[str, object]] = ()
    counts: None = None


@dataclasses.dataclass(frozen=True)
class RolloutModel:
    """The model that completions are drawn from. `reference(params)` are the parameters of the reference model, None
    where the loss has none."""

    spec: ModelSpec
    compute: Compute
    tokenizer: PreTrainedTokenizerFast
    stop_ids: frozenset[int]
    scorer: Scorer
    reference: Callable[[Tree], Tree] | None


class RolloutSource:
    """A train.loop.BatchSource that generates every rollout from the state before its first update.

    A rollout is in `folder`, on disk, before an update is made of it, and is read from there by a resumed run.
    `params_of(state)` is the whole tree of parameters. `rewards` are those of process 0, None on the others. `notify`
    gets messages; `progress(done, all)`, if it is set, is called while completions are generated. With `environments`,
    completions have turns that call tools of theirs. `teacher` is that of a distillation, behind an address. With
    `replicas`, other processes generate, and `stop_signal()`, if it is set, gives the signal by which a run that waits
    for them is to stop. `kl_coef` is the weight of the KL divergence in the next rollout's rewards, where it is steered
    to a target.
    """

    uses_state = True

    def __init__(
        self,
        recipe: Recipe,
        loader: PromptLoader,
        model: RolloutModel,
        rewards: Rewards | None,
        params_of: Callable[[Any], Tree],
        job: Job,
        folder: pathlib.Path,
        notify: Callable[[str], None] = print,
        environments: Environments | None = None,
        teacher: TeacherServer | None = None,
        replicas: RolloutReplicas | None = None,
    ):
        assert recipe.rollout is not None
        self.recipe, self.options, self.loader, self.model = recipe, recipe.rollout, loader, model
        self._rewards, self._params_of, self._job, self._folder = rewards, params_of, job, folder
        of_environments = list(environments.rewards) if environments is not None else []
        self.reward_names = reward_names(recipe.rewards) + of_environments
        self._weights = np.array([reward.weight for reward in recipe.rewards] + [1.0] * len(of_environments))
        self._notify, self._shared, self._environments = notify, model.compute.shared_prompts, environments
        self.teacher, self._replicas = teacher, replicas
        self.progress: Callable[[int, int], None] | None = None
        self.stop_signal: Callable[[], int | None] | None = None
        self.kl_coef = start_kl_coef(recipe.stage)
        self._said_equal = False
        # A completion with its prompt has at least as many positions as the prompt, which an environment may change;
        # alone it may have one.
        shortest = 1 if self._shared or environments is not None else int(loader.store.lengths.min())
        self._segments = max(1, min(self.options.completions * (1 + self._shared), loader.row_length // shortest))
        self._rollout: Rollout | None = None

    @property
    def rows_sizes(self) -> dict[str, int]:
        """The sizes of the logical axes of a batch."""
        sizes = {"batch": self.loader.batch_size, "length": self.loader.row_length, "units": self._segments}
        return sizes | named_sizes(self.recipe)

    def empty_batch(self) -> dict[str, np.ndarray]:
        """The arrays of a batch that holds nothing, without those of pictures: of their shapes and dtypes."""
        arrays = empty_arrays(online_arrays(self.recipe, shared=self._shared), self.rows_sizes)
        return micro_batches(arrays, self.loader.accumulation)

    def next(self, step: int, state: Any) -> RolloutBatch:
        """The batch of update `step`. Raises: UserError as generation and rewards do."""
        started = time.perf_counter()
        number, part = divmod(step, self.loader.updates)
        if self._rollout is None or self._rollout.number != number:
            self._rollout = self._read(number, part) or self._make(number, state)
            self._adapt_kl_coef(self._rollout)
        batch = self._batch(self._rollout, step, part % self.options.updates)
        rows = self.rows_of(self._rollout) if part == 0 else ()
        return dataclasses.replace(batch, seconds=time.perf_counter() - started, rollout_rows=rows)

    def _adapt_kl_coef(self, rollout: Rollout) -> None:
        stage = self.recipe.stage
        # A rollout that was made before the recipe had a target says nothing.
        if self.kl_coef is not None and "kl_coef" in rollout.metrics:
            assert isinstance(stage, RlooConfig | PpoConfig)
            coef, count = rollout.metrics["kl_coef"], len(rollout.completions)
            self.kl_coef = next_kl_coef(stage, coef, rollout.metrics, count)

    def close(self) -> None:
        if self._rewards is not None:
            self._rewards.close()
        if self._replicas is not None:
            self._replicas.close(None if self.stop_signal is None else self.stop_signal())

    # Rollouts

    def _read(self, number: int, part: int) -> Rollout | None:
        """Process 0 reads the rollout's file, for all."""
        content = read_rollout(self._folder, number) if self._job.is_main_process else None
        text = None if content is None else content.hex()
        text = self._job.broadcast(f"saved rollout {number}", text)
        if text is not None:
            return decode_rollout(bytes.fromhex(text))
        if part:
            self._notify(f"the file of rollout {number} is gone or damaged: it is generated again, by later weights")
        return None

    def _make(self, number: int, state: Any) -> Rollout:
        """Generates a rollout, and process 0 writes it."""
        content = encode_rollout(self.generate(number, self._params_of(state)))
        if self._job.is_main_process:
            write_rollout(self._folder, number, content)
        self._job.barrier(f"rollout {number}")
        rollout = decode_rollout(content)
        assert rollout is not None
        return rollout

    def generate(self, number: int, params: Tree) -> Rollout:
        """Generates and scores rollout `number`; writes nothing. Raises: UserError as generation and rewards do."""
        started = time.perf_counter()
        records = self.loader.rollout(number)
        groups = self._generate(without_critic(params), records, number, self.options.samples)
        scores = self._score(records, groups, number)
        completions = [completion for group in groups for completion in group]
        samples = self.options.samples
        group_ids = np.repeat(np.arange(len(records)), samples)
        of_completion = [record for record in records for _ in range(samples)]
        computed = self._log_probs(params, of_completion, completions)
        recipe = self.recipe if self.kl_coef is None else with_kl_coef(self.recipe, self.kl_coef)
        made = rollout_tokens(recipe, completions, scores.values, self._weights, group_ids, computed)
        metrics = rollout_metrics(completions, scores, self.reward_names, made.rewards, group_ids)
        metrics |= made.metrics | ({} if self.kl_coef is None else {"kl_coef": self.kl_coef})
        if metrics["frac_reward_zero_std"] == 1.0 and not self._said_equal:
            self._said_equal = True
            self._notify(
                f"rollout {number}: in every group all completions have equal rewards, so there is nothing to learn "
                "from; `meshtune rewards` shows what the rewards tell apart"
            )
        return Rollout(
            number,
            [record.index for record in records],
            completions,
            scores.values,
            made.advantages,
            made.tokens,
            metrics | scores.metrics,
            scores.columns,
            time.perf_counter() - started,
        )

    def _generate(
        self, params: Tree, records: Sequence[PromptRecord], number: int, samples: int
    ) -> list[list[Completion]]:
        if self._environments is not None:
            return self._generate_episodes(self._environments, params, records, number, samples)
        prompts = [record.ids for record in records]
        pictures = None
        if self.loader.reader is not None:
            pictures = [prompt_pictures(self.loader.reader, record) for record in records]
        return self._draw(
            params,
            prompts,
            samples,
            records,
            lambda *place: sample_seed(self.recipe.seed, number, *place),
            pictures=pictures,
        )

    def _generate_episodes(
        self, environments: Environments, params: Tree, records: Sequence[PromptRecord], number: int, samples: int
    ) -> list[list[Completion]]:
        """Generates completions of several turns; every one has a prompt, which its environment may have added to."""
        model, of_completion = self.model, [record for record in records for _ in range(samples)]
        most_ids = min(self.loader.row_length, model.spec.max_length) - self.options.max_tokens
        tag = f"rollout {number}"
        episodes = Episodes(environments, model.tokenizer, model.stop_ids, of_completion, self._job, tag, most_ids)
        seed = self.recipe.seed
        completions = self._draw(
            params,
            episodes.prompt_ids,
            1,
            of_completion,
            lambda place, _: sample_seed(seed, number, *divmod(place, samples)),
            episodes.follow,
        )
        completed = episodes.complete([completion for (completion,) in completions])
        return [completed[start : start + samples] for start in range(0, len(completed), samples)]

    def _draw(
        self,
        params: Tree,
        prompts: Sequence[Sequence[int]],
        samples: int,
        records: Sequence[PromptRecord],
        seed_of: Callable[[int, int], int],
        follow_turns: FollowTurns | None = None,
        pictures: Sequence[PromptPictures | None] | None = None,
    ) -> list[list[Completion]]:
        model, where = self.model, [str(record.origin) for record in records]
        if self._replicas is not None:
            hooks = self.progress, self.stop_signal
            return self._replicas.draw(params, prompts, samples, model.stop_ids, seed_of, where, *hooks)
        return generate(
            params,
            model.spec,
            model.compute,
            prompts,
            samples,
            self.options,
            model.stop_ids,
            seed_of,
            where,
            self.progress,
            follow_turns,
            pictures,
        )

    def _score(self, records: Sequence[PromptRecord], groups: Sequence[Sequence[Completion]], number: int) -> Scores:
        """Process 0 computes the rewards, for all."""
        result = None
        if self._rewards is not None:
            result = self._rewards.score(self._completions(records, groups, number)).to_json()
        return Scores.from_json(self._job.broadcast(f"rewards of rollout {number}", result))

    def _completions(
        self, records: Sequence[PromptRecord], groups: Sequence[Sequence[Completion]], number: int
    ) -> Completions:
        pairs = [(record, completion) for record, group in zip(records, groups, strict=True) for completion in group]
        names = dict.fromkeys(name for record in records for name in record.columns)
        return Completions(
            prompts=[prompt_of(*pair) for pair in pairs],
            completions=[
                self._text(completion)
                if isinstance(record.prompt, str)
                else completion.episode.messages
                if completion.episode is not None
                else [{"role": "assistant", "content": self._text(completion)}]
                for record, completion in pairs
            ],
            completion_ids=[completion.ids for _, completion in pairs],
            columns={name: [record.columns.get(name) for record, _ in pairs] for name in names},
            origins=[record.origin for record, _ in pairs],
            step=max(0, number) * self.loader.updates,
            reasons=[completion.reason for _, completion in pairs],
            environments=self._environments.instances if self._environments is not None else None,
        )

    def _text(self, completion: Completion) -> str:
        return str(self.model.tokenizer.decode(completion.ids, skip_special_tokens=True))

    def _log_probs(
        self, params: Tree, records: Sequence[PromptRecord], completions: Sequence[Completion]
    ) -> dict[str, list[np.ndarray]]:
        """Values of every completion's tokens before the first update: `old`, `entropies`, `values_old` and
        `reference_tokens`, as far as the loss needs them."""
        needed = computed_values(self.recipe)
        result: dict[str, list[np.ndarray]] = {}
        if not needed:
            return result
        size = len(completions) // self.options.updates
        for start in range(0, len(completions), size):
            rows = self._lay_out(records[start : start + size], completions[start : start + size])
            if "old" in needed:
                scores = self.model.scorer(params, rows.arrays, self.loader.accumulation)
                result.setdefault("old", []).extend(rows.gather(scores["log_probs"]))
                result.setdefault("entropies", []).extend(rows.gather(scores["entropies"]))
                if "values_old" in needed:
                    result.setdefault("values_old", []).extend(rows.gather(scores["values"]))
            if "reference_tokens" in needed:
                assert self.model.reference is not None
                scores = self.model.scorer(self.model.reference(params), rows.arrays, self.loader.accumulation)
                result.setdefault("reference_tokens", []).extend(rows.gather(scores["log_probs"]))
        return result

    # Batches

    def _lay_out(self, records: Sequence[PromptRecord], completions: Sequence[Completion]) -> CompletionRows:
        """Lays completions out in rows; `records` has one entry for each."""
        pictures = self.loader.pictures

        # An environment may give the completions of a record different prompts, and prompts about two pictures may
        # have the same tokens.
        def prompt(pair: tuple[PromptRecord, Completion]) -> tuple[list[int], Sequence[DocumentPicture]]:
            return prompt_ids(*pair), pair[0].pictures

        pairs = zip(records, completions, strict=True)
        groups = [(key, [ids for _, ids in group]) for key, group in itertools.groupby(pairs, prompt)]
        rows = completion_rows(
            [ids for (ids, _), _ in groups],
            [[completion.ids for completion in group] for _, group in groups],
            self.rows_sizes,
            packing=self.recipe.data.packing,
            shared=self._shared,
            together=STAGES[self.recipe.stage.kind].unit_segments == 2,
            patches=None if pictures is None else [pictures.count(placed) for (_, placed), _ in groups],
            max_patches=0 if pictures is None else pictures.sizes[0],
        )
        arrays = rows.arrays | {"completion": rows.scatter([np.array(x.drawn, np.float32) for x in completions])}
        if pictures is not None:
            segments = [
                [Segment(records[number].pictures, stop, records[number].origin, start) for number, start, stop in row]
                for row in rows.documents()
            ]
            arrays |= pictures.segment_arrays(segments, self.loader.row_length)
        return dataclasses.replace(rows, arrays=arrays)

    def _batch(self, rollout: Rollout, step: int, part: int) -> RolloutBatch:
        records = [self.loader.record(index) for index in rollout.prompts]
        samples, size, count = self.options.samples, self.options.completions, self.loader.batch_size
        span = slice(part * size, (part + 1) * size)
        of_completion = [record for record in records for _ in range(samples)][span]
        completions = rollout.completions[span]
        rows = self._lay_out(of_completion, completions)
        arrays = dict(rows.arrays)
        for name in online_arrays(self.recipe, shared=self._shared):
            if name not in arrays:
                arrays[name] = rows.scatter(rollout.per_completion(name)[span])
        origins: list[list[Origin]] = [[] for _ in range(count)]
        for span, record in sorted(zip(rows.spans, of_completion, strict=True), key=lambda x: x[0].segment):
            origins[span.row].append(record.origin)
        per_micro = count // self.loader.accumulation
        return RolloutBatch(
            micro_batches(arrays, self.loader.accumulation),
            [origins[start : start + per_micro] for start in range(0, count, per_micro)],
            step,
            rollout.metrics,
            0.0,
        )

    def rows_of(self, rollout: Rollout) -> list[dict[str, object]]:
        """The completions of a rollout as people read them."""
        samples = self.options.samples
        records = [self.loader.record(index) for index in rollout.prompts for _ in range(samples)]
        rows = []
        for number, (record, completion) in enumerate(zip(records, rollout.completions, strict=True)):
            values = zip(self.reward_names, rollout.rewards[number].tolist(), strict=True)
            rows.append(
                {
                    "rollout": rollout.number,
                    "group": number // samples,
                    "prompt": prompt_of(record, completion),
                    "completion": self._text(completion),
                    "rewards": {name: None if math.isnan(value) else value for name, value in values},
                    "advantage": float(rollout.advantages[number]),
                    "tokens": sum(completion.drawn),
                    "reason": completion.reason,
                    "origin": str(record.origin),
                    **{name: values[number] for name, values in rollout.notes.items()},
                }
            )
        return rows

    def evaluate(self, params: Tree, held_out: PromptLoader) -> tuple[dict[str, float], int]:
        """Generates `rollout.eval_samples` completions of every held-out prompt; (mean metrics, completions)."""
        records = [held_out.record(index) for index in range(len(held_out.store))]
        groups = self._generate(params, records, HELD_OUT, self.options.eval_samples)
        scores = self._score(records, groups, HELD_OUT)
        completions = [completion for group in groups for completion in group]
        total = total_rewards(scores.values, self._weights)
        group_ids = np.repeat(np.arange(len(records)), self.options.eval_samples)
        return rollout_metrics(completions, scores, self.reward_names, total, group_ids), len(completions)


def completion_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """The lengths of completions and the share of those that were cut, under trl's names."""
    lengths = np.array([sum(completion.drawn) for completion in completions])
    ended = np.array([completion.reason == "stop" for completion in completions])
    return {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(1 - ended.mean()),
        "completions/mean_terminated_length": float(lengths[ended].mean()) if ended.any() else 0.0,
    }


def prompt_of(record: PromptRecord, completion: Completion) -> str | list[dict[str, Any]]:
    """The prompt of a completion as people and rewards read it, with the text of its environment."""
    return record.prompt if completion.episode is None else completion.episode.prompt


def prompt_pictures(reader: PictureReader, record: PromptRecord) -> PromptPictures | None:
    """The pictures of a prompt, whose files are read when their features are computed."""
    if not record.pictures:
        return None
    where = str(record.origin)
    placed = [PromptPicture(item.start, record_picture(reader, item.picture, where)) for item in record.pictures]
    return place_pictures(reader, len(record.ids), placed)


def prompt_ids(record: PromptRecord, completion: Completion) -> list[int]:
    """The ids of a completion's prompt."""
    return record.ids if completion.episode is None else completion.episode.prompt_ids


def rollout_metrics(
    completions: Sequence[Completion], scores: Scores, names: Sequence[str], total: np.ndarray, groups: np.ndarray
) -> dict[str, float]:
    """The metrics of a rollout, under trl's names. `total` [N] is the weighted reward, NaN where there is none."""
    scored = total[~np.isnan(total)]
    by_group = [total[groups == group] for group in np.unique(groups)]
    deviations = [float(np.std(group, ddof=1)) if len(group) > 1 else 0.0 for group in by_group]
    metrics = {
        "reward": float(scored.mean()) if len(scored) else 0.0,
        "reward_std": float(np.nanmean(deviations)) if deviations else 0.0,
        "frac_reward_zero_std": float(np.mean([len(set(group.tolist())) == 1 for group in by_group])),
    } | completion_metrics(completions)
    episodes = [completion.episode for completion in completions if completion.episode is not None]
    if episodes:
        calls = sum(episode.calls for episode in episodes)
        metrics["tools/call_frequency"] = calls / len(episodes)
        metrics["tools/failure_frequency"] = sum(episode.failures for episode in episodes) / max(calls, 1)
    for name, values in zip(names, scores.values.T, strict=True):
        values = values[~np.isnan(values)]
        metrics[f"rewards/{name}/mean"] = float(values.mean()) if len(values) else 0.0
        metrics[f"rewards/{name}/std"] = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    return metrics
