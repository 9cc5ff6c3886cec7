"""Lays completions with their prompts out in packed rows, and reads values of their tokens back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from meshtune.arrays.batch import TOKEN_ARRAYS, empty_arrays
from meshtune.config.recipe import Recipe
from meshtune.data.loader import pack, unpacked_rows
from meshtune.objectives.config import DistillConfig, GrpoConfig, RlooConfig


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a completion's tokens are predicted: positions `start` up to, not including, `stop` of row `row`, which is
    segment number `segment` there."""

    row: int
    start: int
    stop: int
    segment: int


@dataclasses.dataclass(frozen=True)
class CompletionRows:
    """Rows [B, T] of prompts with their completions; `placements` has an entry for every completion, in their order.

    `arrays` holds those that the model reads (arrays.batch.TOKEN_ARRAYS, without weights), `units` and `completion`.
    """

    arrays: dict[str, np.ndarray]
    placements: list[Placement]

    def scatter(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Values of every completion's tokens as an array [B, T], 0 elsewhere."""
        result = np.zeros(self.arrays["tokens"].shape, np.float32)
        for place, of_tokens in zip(self.placements, values, strict=True):
            result[place.row, place.start : place.stop] = of_tokens
        return result

    def gather(self, array: np.ndarray) -> list[np.ndarray]:
        """The values [B, T] of every completion's tokens."""
        return [array[place.row, place.start : place.stop] for place in self.placements]


def completion_rows(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    row_length: int,
    rows: int,
    segments: int,
    *,
    packing: bool = True,
) -> CompletionRows:
    """Packs every completion with its prompt (`prompts` has one entry for each) into at most `rows` rows.

    Rows that hold something come first; `segments` is the most that a row may have.
    """
    lengths = np.array([len(p) + len(c) - 1 for p, c in zip(prompts, completions, strict=True)], np.int64)
    order = np.arange(len(lengths))
    plan = pack(lengths, order, row_length) if packing else unpacked_rows(order)
    assert len(plan) <= rows, f"{len(plan)} rows for {rows}"
    arrays = empty_arrays(
        [*TOKEN_ARRAYS, "units", "completion"], {"batch": rows, "length": row_length, "units": segments}
    )
    del arrays["weights"]
    places: dict[int, Placement] = {}
    for row in range(len(plan)):
        position = 0
        for segment, number in enumerate(plan[row].tolist(), start=1):
            ids = np.asarray([*prompts[number], *completions[number]], np.int32)
            span = slice(position, position + len(ids) - 1)
            arrays["tokens"][row, span], arrays["targets"][row, span] = ids[:-1], ids[1:]
            arrays["positions"][row, span] = np.arange(len(ids) - 1)
            arrays["segment_ids"][row, span] = segment
            start = position + len(prompts[number]) - 1
            arrays["completion"][row, start : span.stop] = 1.0
            arrays["units"][row, segment - 1] = 1.0
            places[number] = Placement(row, start, span.stop, segment)
            position = span.stop
    return CompletionRows(arrays, [places[number] for number in range(len(lengths))])


def micro_batches(arrays: Mapping[str, np.ndarray], accumulation: int) -> dict[str, np.ndarray]:
    """Arrays of rows [B, ..] as micro-batches [A, B / A, ..]."""
    return {name: array.reshape(accumulation, -1, *array.shape[1:]) for name, array in arrays.items()}


def online_arrays(recipe: Recipe) -> list[str]:
    """The arrays of a batch of an online stage."""
    stage, names = recipe.stage, [*TOKEN_ARRAYS, "units", "completion"]
    if isinstance(stage, DistillConfig):
        return names
    names += ["advantages", "sampled"]
    if is_reused(recipe):
        names.append("old")
    if isinstance(stage, GrpoConfig):
        names += ["reference_tokens"] * (stage.beta > 0) + ["entropy_weights"] * (stage.entropy_coef != 0)
    return names + ["policy_weights"] * has_policy_weights(recipe)


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
    of_rewards = isinstance(stage, RlooConfig) and reference
    names = {"reference_tokens"} if reference else set[str]()
    return names | (
        {"old", "entropies"} if is_reused(recipe) or of_rewards or has_policy_weights(recipe) else set[str]()
    )
