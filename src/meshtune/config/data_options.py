"""The options of sources and of tokenising, read by recipes and by whoever works with them alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from meshtune.errors import UserError
from meshtune.options import option

FormatName = Literal[
    "auto", "alpaca", "sharegpt", "messages", "prompt_completion", "text", "preference", "openai", "hh",
    "stanford_alpaca", "hermes", "xlam",
]  # fmt: skip
Overlong = Literal["truncate", "turns", "drop", "error"]
Reasoning = Literal["template", "inline", "drop"]
GYM = "reasoning_gym:"  # begins the path of a source that is a task of reasoning-gym


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """How the records of a source are read. A column of None is one that the records do not have."""

    format: FormatName = option(
        "auto", "Format of the records; auto: detected from the records. preference, openai and hh hold pairs."
    )
    columns: Mapping[str, str | None] = dataclasses.field(
        default_factory=dict,
        metadata={
            "description": "Names of the record's fields where they differ from the format's, e.g. {prompt: question}; "
            "null: not read."
        },
    )
    tags: Mapping[str, str] = dataclasses.field(
        default_factory=dict,
        metadata={"description": "sharegpt: role_tag, content_tag, user_tag, assistant_tag, system_tag, ..."},
    )
    subset: str | None = option(None, "Configuration of a hub data set.")
    split: str = option("train", "Split of a hub data set.")
    revision: str | None = option(None, "Revision of a hub data set.")
    weight: float | None = option(None, "Share of the mixture, relative to the other weights.", gt=0)
    cap: int | None = option(None, "Use only the first records, at most this many.")
    options: Mapping[str, Any] = dataclasses.field(
        default_factory=dict,
        metadata={
            "description": "Of a task of reasoning-gym: size (500), seed (0; 1 for validation) and those of its "
            "configuration."
        },
    )


@dataclasses.dataclass(frozen=True)
class LossPolicy:
    """Which parts of a conversation are trained on: assistant turns, unless these options say otherwise.

    Raises UserError for options that contradict each other.
    """

    train_on_prompt: bool = option(False, "Also train on system, user and tool turns.")
    last_turn_only: bool = option(False, "Train on the last assistant turn only.")
    reasoning: Reasoning = option(
        "template",
        "Reasoning of assistant turns; template: where the chat template writes it (often in the last turns only), and "
        "trained on there; inline: as <think> text before the answer; drop: left out.",
    )
    train_on_tail: bool = option(
        False, "Also train on what the chat template writes after the end of an answer's turn, such as a line break."
    )

    def __post_init__(self):
        if self.train_on_prompt and self.last_turn_only:
            raise UserError(
                "train_on_prompt and last_turn_only contradict each other", where="data", fix="set only one of them"
            )


@dataclasses.dataclass(frozen=True)
class TokenOptions:
    """How documents are tokenised. `max_length` is the largest number of tokens of a document."""

    max_length: int
    policy: LossPolicy = dataclasses.field(default_factory=LossPolicy)
    overlong: Overlong = option(
        "truncate",
        "How documents longer than max_length are treated; truncate: cut at the end; turns: prompt and answer of each "
        "turn are cut in proportion, as in LLaMA-Factory.",
    )
    skip_bad: bool = False

    def cache_key(self) -> str:
        """A text that identifies the options. It must not change with the names of classes or fields: stores would be
        built again, and earlier runs could not be resumed."""
        policy = f"train_on_prompt={self.policy.train_on_prompt}, last_turn_only={self.policy.last_turn_only}"
        if self.policy.reasoning != "template":
            policy += f", reasoning={self.policy.reasoning}"
        if self.policy.train_on_tail:
            policy += ", train_on_tail=True"
        return (
            f"TokenOptions(max_length={self.max_length}, learn=Learn({policy}), overlong={self.overlong!r}, "
            f"skip_bad={self.skip_bad})"
        )
