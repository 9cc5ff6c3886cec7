"""The section `rewards` of a recipe: what scores the completions of an online stage."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from meshtune.config.section import PathText, Section, expand_path

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


class Reward(Section):
    """The options that every kind of reward has."""

    weight: float = Field(default=1.0, description="Factor of this reward in the sum of all.")
    name: str | None = Field(
        default=None, description="Its name in metrics and tables; default: the function's, or the kind."
    )
    timeout: float = Field(default=60.0, gt=0, description="Seconds for all completions of a rollout together.")

    @field_validator("name")
    @classmethod
    def _fits_metrics(cls, name: str | None) -> str | None:
        if name is not None and not NAME.fullmatch(name):
            raise ValueError(f"'{name}' is no name of a metric: use letters, digits, _, . and -, at most 64")
        return name


class FunctionReward(Reward):
    """A Python function with the arguments of TRL's reward functions."""

    kind: Literal["function"] = "function"
    function: str = Field(description="file.py:name or package.module:name.")

    @field_validator("function")
    @classmethod
    def _file_and_name(cls, text: str) -> str:
        place, _, name = text.rpartition(":")
        if not place.strip() or not name.isidentifier():
            raise ValueError(f"'{text}' names no function: write file.py:name, or package.module:name")
        return expand_path(text)


class ModelReward(Reward):
    """A reward model, which scores prompt and completion in its own chat template."""

    kind: Literal["model"] = "model"
    model: PathText = Field(description="A run of stage rm, or a model or adapter with a head of one score.")
    max_length: PositiveInt | None = Field(
        default=None, description="Tokens of prompt and completion at most; default: the model's context."
    )


class UrlReward(Reward):
    """A server that answers {prompts, completions, columns} with {rewards}."""

    kind: Literal["url"] = "url"
    url: str = Field(description="http(s) address that the JSON is posted to; tried three times within the timeout.")

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if not re.match(r"https?://[^/\s]+", url):
            raise ValueError(f"'{url}' is no address: it begins with http:// or https://")
        return url


class PatternReward(Reward):
    """1 where a regular expression matches the completion, else 0."""

    kind: Literal["pattern"] = "pattern"
    pattern: str = Field(description="Python's regular expression; (?s) at its start lets . match line breaks.")
    match: Literal["full", "search"] = Field(
        default="full", description="full: all of the completion; search: anywhere in it."
    )
    group: int | str | None = Field(
        default=None, description="Group of the pattern that must be equal to the column; default: the match will do."
    )
    column: str = Field(default="answer", description="Field of the record that the group is compared with.")

    @model_validator(mode="after")
    def _compiles(self) -> PatternReward:
        try:
            compiled = re.compile(self.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"pattern is no regular expression: {error}") from error
        if isinstance(self.group, str) and self.group not in compiled.groupindex:
            raise ValueError(f"pattern has no group named '{self.group}': write (?P<{self.group}>...)")
        if isinstance(self.group, int) and not 0 <= self.group <= compiled.groups:
            raise ValueError(f"pattern has {compiled.groups} groups, and group is {self.group}")
        return self


class JsonSchemaReward(Reward):
    """1 where the completion is JSON that a schema allows, else 0."""

    kind: Literal["json_schema"] = "json_schema"
    json_schema: PathText | dict[str, Any] = Field(description="The JSON schema, or the file that holds it.")


class EqualsReward(Reward):
    """1 where the completion is equal to a field of the record, else 0; null there: not applicable."""

    kind: Literal["equals"] = "equals"
    column: str = Field(default="answer", description="Field of the record.")
    part: Literal["auto", "number", "text"] = Field(
        default="auto",
        description="number: the last number of both; text: both without white space at the ends; auto: number where "
        "the field is one.",
    )


class MathsReward(Reward):
    """1 where math-verify says that the completion's result is that of the record, else 0."""

    kind: Literal["maths"] = "maths"
    column: str = Field(default="answer", description="Field with the solution; not applicable where it has no result.")


class CodeReward(Reward):
    """The share of the record's tests that the completion's code passes, in a confined process."""

    kind: Literal["code"] = "code"
    column: str = Field(default="tests", description="Field with tests in Python: a text, or a list of them.")
    seconds: float = Field(default=5.0, gt=0, description="Time of one completion's code and tests.")
    memory: PositiveInt = Field(default=512, description="MiB of memory of one completion's process.")


class LengthReward(Reward):
    """How well the completion's number of tokens fits.

    With a target it falls from 1 at the target to 0 at twice that, and at none; with bounds it is 1 between them, else
    0.
    """

    kind: Literal["length"] = "length"
    target: PositiveInt | None = Field(default=None, description="Tokens that are best.")
    min_tokens: PositiveInt | None = Field(default=None, description="Tokens at least.")
    max_tokens: PositiveInt | None = Field(default=None, description="Tokens at most.")

    @model_validator(mode="after")
    def _one_form(self) -> LengthReward:
        bounds = [bound for bound in (self.min_tokens, self.max_tokens) if bound is not None]
        if (self.target is None) == (not bounds):
            raise ValueError("length needs a target, or min_tokens and max_tokens (or one of them)")
        if bounds != sorted(bounds):
            raise ValueError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        return self


class OverlongReward(Reward):
    """DAPO's soft punishment of long completions (https://arxiv.org/abs/2503.14476, equation 13).

    0 up to max_tokens - buffer tokens, then falling to -1 at max_tokens.
    """

    kind: Literal["overlong"] = "overlong"
    buffer: PositiveInt = Field(description="Tokens below max_tokens from which completions are punished.")
    max_tokens: PositiveInt | None = Field(default=None, description="Default: that of rollout.")


class ReasoningGymReward(Reward):
    """The score that reasoning-gym gives to an answer; of data that are reasoning_gym's."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"


REWARDS = (
    FunctionReward, ModelReward, UrlReward, PatternReward, JsonSchemaReward, EqualsReward, MathsReward, CodeReward,
    LengthReward, OverlongReward, ReasoningGymReward,
)  # fmt: skip
RewardSection = Annotated[
    FunctionReward
    | ModelReward
    | UrlReward
    | PatternReward
    | JsonSchemaReward
    | EqualsReward
    | MathsReward
    | CodeReward
    | LengthReward
    | OverlongReward
    | ReasoningGymReward,
    Field(discriminator="kind"),
]
# The option that a kind's short form gives: {equals: result} is {kind: equals, column: result}.
SHORT = {
    "function": "function", "model": "model", "url": "url", "pattern": "pattern", "json_schema": "json_schema",
    "equals": "column", "maths": "column", "code": "column", "length": "target", "overlong": "buffer",
}  # fmt: skip


def rewards_written_out(value: object) -> object:
    """The raw section with its short forms written out.

    A text or mapping is a list of one. "file.py:name" is {kind: function, function: "file.py:name"}, "maths" is
    {kind: maths}, and {pattern: ...} is {kind: pattern, pattern: ...}.
    """
    if isinstance(value, str | dict):
        value = [value]
    return [_written_out(entry) for entry in value] if isinstance(value, list) else value


def _written_out(entry: object) -> object:
    if isinstance(entry, str):
        return {"kind": "function", "function": entry} if ":" in entry else {"kind": entry}
    if not isinstance(entry, dict) or "kind" in entry:
        return entry
    kinds = [key for key in entry if key in SHORT]
    if len(kinds) != 1:
        return entry
    kind = kinds[0]
    return {"kind": kind, SHORT[kind]: entry[kind], **{key: entry[key] for key in entry if key != kind}}


def reward_names(sections: Sequence[Reward]) -> list[str]:
    """A name for each reward: its own, else its function's or kind's, with a number where that is taken.

    Raises ValueError for a name that two sections give.
    """
    explicit = [section.name for section in sections if section.name is not None]
    twice = next((name for name in explicit if explicit.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two rewards are named '{twice}': give each its own name")
    names: list[str] = []
    for section in sections:
        default = section.function.rpartition(":")[2] if isinstance(section, FunctionReward) else str(section.kind)  # pyright: ignore[reportAttributeAccessIssue]
        name, number = section.name or default, 1
        while section.name is None and (name in names or name in explicit):
            number += 1
            name = f"{default}_{number}"
        names.append(name)
    return names
