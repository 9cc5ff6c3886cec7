"""The data section of a recipe: sources, formats, which tokens have a loss, and packing."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from meshtune.config.data_options import FormatName, LossPolicy, Overlong, Reasoning, SourceOptions, TokenOptions
from meshtune.config.section import PathText, Section, declared
from meshtune.config.short_forms import sources


class SourceSection(Section):
    """One source of records."""

    path: PathText | None = Field(
        default=None, description="A file, a directory of files of one kind, or a hub data set."
    )
    name: str | None = Field(default=None, description="An entry of data.registry; instead of path.")
    subset: str | None = declared(SourceOptions, "subset")
    split: str = declared(SourceOptions, "split")
    revision: str | None = declared(SourceOptions, "revision")
    format: FormatName = declared(SourceOptions, "format")
    columns: dict[str, str | None] = declared(SourceOptions, "columns")
    tags: dict[str, str] = declared(SourceOptions, "tags")
    weight: float | None = declared(SourceOptions, "weight")
    cap: PositiveInt | None = declared(SourceOptions, "cap")

    @model_validator(mode="after")
    def _one_origin(self) -> SourceSection:
        if (self.path is None) == (self.name is None):
            raise ValueError("give exactly one of path and name")
        return self


class DataSection(Section):
    """The training and validation data."""

    train: list[SourceSection] = Field(
        min_length=1, description="Sources; a path alone, or a list of paths, also works."
    )
    validation: float | list[SourceSection] | None = Field(
        default=None,
        description="Sources, or the share of the training records (0.05) or number of them (200) to hold out.",
    )
    registry: PathText | None = Field(
        default=None, description="A LLaMA-Factory dataset_info.json, or the directory that holds one."
    )
    mixing: Literal["concat", "interleave_under", "interleave_over"] = Field(
        default="concat",
        description="concat: each source once (weights repeat or thin it); interleave: draw sources by weight until "
        "the first is used up (under) or all are (over).",
    )
    max_length: PositiveInt = Field(default=1024, description="T, tokens in a row.")
    packing: bool = Field(
        default=True, description="Pack several documents into a row; false: one padded document a row."
    )
    overlong: Overlong = declared(TokenOptions, "overlong")
    streaming: bool = Field(
        default=False,
        description="Tokenise while training instead of before, for data of any size. Needs train.steps. In stage pt "
        "documents go on in the next row.",
    )
    on_bad: Literal["error", "skip"] = Field(
        default="error", description="How records that do not fit their format are treated."
    )
    train_on_prompt: bool = declared(LossPolicy, "train_on_prompt")
    last_turn_only: bool = declared(LossPolicy, "last_turn_only")
    reasoning: Reasoning = declared(LossPolicy, "reasoning")
    train_on_tail: bool = declared(LossPolicy, "train_on_tail")
    system: str | None = Field(default=None, description="System prompt for conversations that have none.")
    shuffle: bool = Field(default=True, description="A new order every epoch, a function of the seed.")

    @field_validator("train", "validation", mode="before")
    @classmethod
    def _short_sources(cls, value: object) -> object:
        return sources(value)

    @field_validator("validation")
    @classmethod
    def _share_or_number(cls, value: object) -> object:
        if isinstance(value, float) and (value <= 0 or (value > 1 and value != int(value))):
            raise ValueError("give a share between 0 and 1, or a whole number of records")
        return value

    @model_validator(mode="after")
    def _sources_can_be_found(self) -> DataSection:
        named = [source.name for source in self._all_sources() if source.name is not None]
        if named and self.registry is None:
            raise ValueError(f"the source named '{named[0]}' needs data.registry, the dataset_info.json that lists it")
        if self.train_on_prompt and self.last_turn_only:
            raise ValueError("give train_on_prompt or last_turn_only, not both")
        return self

    def _all_sources(self) -> list[SourceSection]:
        return [*self.train, *(self.validation if isinstance(self.validation, list) else [])]
