"""The section of a recipe that ends a run with an evaluation, before and after."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from meshtune.config.section import PathText, Section


class EvaluateSection(Section):
    """An evaluation at the end of a run, of the base and of what the run made: `meshtune eval RUN --compare base`."""

    tasks: dict[str, PathText | None] = Field(
        default_factory=dict,
        description="Tasks with the path of their files, {mmlu: data/mmlu}; null: a task of lm-eval's hub or cache.",
    )
    held_out: bool = Field(default=True, description="Also the records of data.validation: loss, answers, metrics.")
    prompts: Literal["plain", "chat"] = Field(
        default="plain", description="chat: the tasks' prompts in the chat template, examples as turns."
    )
    num_fewshot: int | None = Field(default=None, ge=0, description="Examples shown; null: the task's own.")
    most_samples: PositiveInt | None = Field(
        default=None, description="Only the first examples of a task, and records, at most this many."
    )
    new_tokens: PositiveInt | None = Field(
        default=None, description="Tokens of an answer to a record, at most; null: 512."
    )
    metrics: list[str] = Field(
        default=["exact_match", "f1", "chrf", "rouge"], description="Of answers; see meshtune predict."
    )
