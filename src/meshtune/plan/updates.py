"""Counts the updates of a recipe in epochs: exactly for a small data set, from a sample of a large one."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from collections.abc import Sequence

from meshtune.config.data import DataSection
from meshtune.config.recipe import DEFAULT_EPOCHS, Recipe
from meshtune.data.checked_source import CheckedSource
from meshtune.data.documents import load_documents
from meshtune.data.prepare import prepare_data
from meshtune.data.tokenizer import tokenizer_of
from meshtune.errors import UserError
from meshtune.objectives.stages import STAGES

SAMPLE = 2000  # documents that are tokenised


@dataclasses.dataclass(frozen=True)
class Updates:
    """The updates of a whole recipe, None if unknown, and where the number comes from (or why it is unknown)."""

    count: float | None
    source: str


def updates_of(recipe: Recipe) -> Updates:
    """The updates of a recipe: `train.steps`, else counted from its data if these and the tokenizer are local files.

    At most SAMPLE documents are tokenised and packed; the count of a larger data set is scaled up from them.
    """
    if recipe.train.steps is not None:
        return Updates(recipe.train.steps, "train.steps")
    if remote := _remote_paths(recipe):
        return Updates(None, f"the number of updates depends on data that are not local ({', '.join(remote)})")
    try:
        return _count(recipe)
    except UserError as error:
        return Updates(None, f"the number of updates depends on the data, which could not be read: {error.what}")


def _remote_paths(recipe: Recipe) -> list[str]:
    paths = [source.path for source in recipe.data.train if source.path is not None]
    paths.append(recipe.model.tokenizer or recipe.model.path)
    return [path for path in paths if not pathlib.Path(path).expanduser().exists()]


def _count(recipe: Recipe) -> Updates:
    epochs = recipe.train.epochs or DEFAULT_EPOCHS
    tokenizer, _ = tokenizer_of(recipe.model)
    documents = load_documents(recipe.data, seed=recipe.seed, dataset_type=STAGES[recipe.stage.kind].dataset_type).train
    total = len(documents)
    if total <= SAMPLE:
        return Updates(prepare_data(recipe, tokenizer).train.total_steps(epochs), f"{epochs:g} epochs of the data")
    data = _sample(recipe.data, documents.sources, SAMPLE / total)
    with tempfile.TemporaryDirectory(prefix="meshtune-updates-") as cache:
        # One row per update, so that a fraction of a batch is not rounded up before scaling.
        one_row = recipe.train.model_copy(update={"batch_size": 1, "micro_batch": 1})
        sample = prepare_data(recipe.model_copy(update={"data": data, "train": one_row}), tokenizer, cache=cache).train
        rows = sample.total_steps(1)
    sampled = len(load_documents(data, seed=recipe.seed, dataset_type=STAGES[recipe.stage.kind].dataset_type).train)
    updates = epochs * rows * total / sampled / recipe.train.batch_size
    return Updates(updates, f"{epochs:g} epochs, estimated from {sampled:,} of {total:,} documents")


def _sample(data: DataSection, sources: Sequence[CheckedSource], fraction: float) -> DataSection:
    """The data section with this fraction of every source's records, and without validation data."""
    train = [
        section.model_copy(update={"cap": max(1, round(len(checked.usable) * fraction))})
        for section, checked in zip(data.train, sources, strict=True)
    ]
    return data.model_copy(update={"train": train, "validation": None})
