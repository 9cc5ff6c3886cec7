"""Lays completions with their prompts out in packed rows, and reads values of their tokens back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from meshtune.arrays.batch import TOKEN_ARRAYS, empty_arrays
from meshtune.config.recipe import Recipe
from meshtune.data.packing import PackedRows, pack, unpacked_rows
from meshtune.objectives.config import DistillConfig, GrpoConfig, OnlineDpoConfig, PpoConfig, RlooConfig
from meshtune.rollout.shared import Span, fill_shared_rows, plan_shared_rows


@dataclasses.dataclass(frozen=True)
class CompletionRows:
    """Rows [B, T] of prompts with their completions; `spans` has an entry for every completion, in their order.

    `arrays` holds those that the model reads (arrays.batch.TOKEN_ARRAYS, without weights; parent_ids where prompts are
    shared), `units` and `completion`.
    """

    arrays: dict[str, np.ndarray]
    spans: list[Span]

    def scatter(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Values of every completion's tokens as an array [B, T], 0 elsewhere."""
        result = np.zeros((*self.arrays["tokens"].shape, *values[0].shape[1:]), values[0].dtype)
        for span, of_tokens in zip(self.spans, values, strict=True):
            result[span.row, span.start : span.stop] = of_tokens
        return result

    def documents(self) -> list[list[tuple[int, int, int]]]:
        """The segments of each row, in order: the number of a completion that has the segment's prompt, and the
        positions of its first token and after its last, in that prompt with the completion."""
        completions, parents = dict[tuple[int, int], int](), self.arrays.get("parent_ids")
        for number, span in enumerate(self.spans):
            completions[span.row, span.segment] = number
            if parents is not None:
                completions[span.row, int(parents[span.row, span.start])] = number
        rows = []
        for row, (segments, positions) in enumerate(
            zip(self.arrays["segment_ids"], self.arrays["positions"], strict=True)
        ):
            places = [np.flatnonzero(segments == segment) for segment in range(1, int(segments.max()) + 1)]
            ends = [(int(positions[place[0]]), int(positions[place[-1]]) + 1) for place in places]
            rows.append([(completions[row, number], *end) for number, end in enumerate(ends, start=1)])
        return rows

    def gather(self, array: np.ndarray) -> list[np.ndarray]:
        """The values [B, T] of every completion's tokens."""
        return [array[span.row, span.start : span.stop] for span in self.spans]


def completion_rows(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[Sequence[int]]],
    sizes: Mapping[str, int],
    *,
    packing: bool = True,
    shared: bool = False,
    together: bool = False,
    patches: Sequence[int] | None = None,
    max_patches: int = 0,
) -> CompletionRows:
    """Lays the completions of every prompt out in rows, those that hold something first.

    `sizes` are those of the logical axes of the arrays: rows, positions, and segments of a row, at most. Each
    completion comes with its prompt, or with `shared` after its prompt, once for all of a row. With `together` the
    completions of a prompt, which must fit in a row, are neighbours in one. `patches` are those of each prompt's
    pictures, of which a row has `max_patches` at most.
    """
    count, length = sizes["batch"], sizes["length"]
    if shared:
        of_group = [[len(ids) for ids in group] for group in completions]
        plan = plan_shared_rows(
            [len(prompt) for prompt in prompts],
            of_group,
            length,
            together=together,
            patches=patches,
            max_patches=max_patches,
        )
        assert len(plan) <= count, f"{len(plan)} rows for {count}"
        plan += [[] for _ in range(count - len(plan))]
        arrays, groups = fill_shared_rows(prompts, completions, plan, length)
        spans = [span for group in groups for span in group]
    else:
        groups = [[(prompt, ids) for ids in group] for prompt, group in zip(prompts, completions, strict=True)]
        units = groups if together else [[pair] for group in groups for pair in group]
        of_units: np.ndarray | None = None
        if patches is not None:
            per_pair = np.repeat(np.asarray(patches, np.int64), [len(group) for group in groups])
            of_units = per_pair.reshape(len(units), -1).sum(1)
        lengths = np.array([sum(len(prompt) + len(ids) - 1 for prompt, ids in unit) for unit in units], np.int64)
        order = np.arange(len(units))
        plan = unpacked_rows(order)
        if packing:
            plan = pack(lengths, order, length, patches=of_units, max_patches=max_patches)
        arrays, spans = _fill_rows(units, plan, count, length)
    arrays |= empty_arrays(["units", "completion"], sizes)
    for span in spans:
        arrays["completion"][span.row, span.start : span.stop] = 1.0
        arrays["units"][span.row, span.segment - 1] = 1.0
    return CompletionRows(arrays, spans)


def _fill_rows(
    units: Sequence[Sequence[tuple[Sequence[int], Sequence[int]]]], plan: PackedRows, count: int, length: int
) -> tuple[dict[str, np.ndarray], list[Span]]:
    """Fills the rows of a plan with units of neighbours, each a prompt and a completion; the arrays of `count` rows,
    and the span of every completion."""
    assert len(plan) <= count, f"{len(plan)} rows for {count}"
    arrays = {name: np.zeros((count, length), np.int32) for name in TOKEN_ARRAYS if name != "weights"}
    spans: list[list[Span]] = [[] for _ in units]
    for row in range(len(plan)):
        stop = 0
        members = [(number, *pair) for number in plan[row].tolist() for pair in units[number]]
        for segment, (number, prompt, completion) in enumerate(members, start=1):
            ids = np.asarray([*prompt, *completion], np.int32)
            place = slice(stop, stop := stop + len(ids) - 1)
            arrays["tokens"][row, place], arrays["targets"][row, place] = ids[:-1], ids[1:]
            arrays["positions"][row, place] = np.arange(len(ids) - 1)
            arrays["segment_ids"][row, place] = segment
            spans[number].append(Span(row, place.start + len(prompt) - 1, stop, segment))
    return arrays, [span for unit in spans for span in unit]


def micro_batches(arrays: Mapping[str, np.ndarray], accumulation: int) -> dict[str, np.ndarray]:
    """Arrays of rows [B, ..] as micro-batches [A, B / A, ..]."""
    return {name: array.reshape(accumulation, -1, *array.shape[1:]) for name, array in arrays.items()}


def online_arrays(recipe: Recipe, *, shared: bool) -> list[str]:
    """The arrays of a batch of an online stage, whose prompts are `shared` or not."""
    stage, names = recipe.stage, [*TOKEN_ARRAYS, "units", "completion"] + ["parent_ids"] * shared
    if isinstance(stage, DistillConfig):
        return names + ["named_ids", "named_log_probs"] * (recipe.teacher is not None and recipe.teacher.is_server)
    names.append("advantages")
    if isinstance(stage, OnlineDpoConfig):
        return [*names, "reference_tokens"]
    names.append("sampled")
    if is_reused(recipe):
        names.append("old")
    if isinstance(stage, GrpoConfig):
        names += ["reference_tokens"] * (stage.beta > 0) + ["entropy_weights"] * (stage.entropy_coef != 0)
    if isinstance(stage, PpoConfig):
        names += ["values_old", "returns"]
    return names + ["policy_weights"] * has_policy_weights(recipe)


def named_sizes(recipe: Recipe) -> dict[str, int]:
    """The size of the logical axis of the tokens that a teacher's server names."""
    return {"named": 1 if recipe.teacher is None else recipe.teacher.top_k + 1}


def loss_temperature(recipe: Recipe) -> float:
    """The number that logits are divided by in the loss: the sampler's, which online DPO leaves out as trl does."""
    assert recipe.rollout is not None
    return 1.0 if isinstance(recipe.stage, OnlineDpoConfig) else recipe.rollout.temperature


def has_policy_weights(recipe: Recipe) -> bool:
    """Whether tokens have weights in the policy's loss alone: an importance correction, or a mask by entropy."""
    assert recipe.rollout is not None
    masked = isinstance(recipe.stage, GrpoConfig) and recipe.stage.top_entropy_quantile < 1
    return masked or recipe.rollout.correction is not None


def is_reused(recipe: Recipe) -> bool:
    """Whether several updates are made of a rollout, so that the weights change under it."""
    assert recipe.rollout is not None
    return recipe.rollout.updates * recipe.rollout.iterations > 1


def computed_values(recipe: Recipe) -> set[str]:
    """The values of completion tokens that advantages.rollout_tokens needs from passes over the rollout."""
    stage, reference = recipe.stage, getattr(recipe.stage, "beta", 0.0) > 0
    if isinstance(stage, OnlineDpoConfig):
        return {"reference_tokens"}
    if isinstance(stage, PpoConfig):
        return {"old", "values_old"} | ({"reference_tokens"} if stage.kl_coef else set[str]())
    of_rewards = isinstance(stage, RlooConfig) and reference
    names = {"reference_tokens"} if reference else set[str]()
    return names | (
        {"old", "entropies"} if is_reused(recipe) or of_rewards or has_policy_weights(recipe) else set[str]()
    )
