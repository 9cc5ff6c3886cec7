"""The data section of a recipe: sources, formats, what is learned from, and how rows are made."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator, model_validator


class SourceSection(BaseModel):
    """One source of records."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str | None = Field(None, description="A file, a directory of files of one kind, or a hub data set.")
    name: str | None = Field(None, description="An entry of data.registry; instead of path.")
    subset: str | None = Field(None, description="Configuration of a hub data set.")
    split: str = Field("train", description="Split of a hub data set.")
    revision: str | None = Field(None, description="Revision of a hub data set.")
    format: Literal["auto", "alpaca", "sharegpt", "messages", "prompt_completion", "text"] = "auto"
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Names of the record's fields where they differ from the format's, e.g. {prompt: question}.",
    )
    tags: dict[str, str] = Field(
        default_factory=dict, description="sharegpt: role_tag, content_tag, user_tag, assistant_tag, system_tag, ..."
    )
    weight: float | None = Field(None, gt=0, description="Share of the mixture, relative to the other weights.")
    cap: PositiveInt | None = Field(None, description="At most this many records, the first ones.")

    @model_validator(mode="after")
    def _one_origin(self) -> SourceSection:
        if (self.path is None) == (self.name is None):
            raise ValueError("give exactly one of path and name")
        return self


class DataSection(BaseModel):
    """What is learned from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    train: list[SourceSection] = Field(min_length=1, description="Sources; a path alone, or a list of paths, also works.")
    validation: float | list[SourceSection] | None = Field(
        None, description="Sources, or the share of the training records (0.05) or number of them (200) to hold out."
    )
    registry: str | None = Field(None, description="A LLaMA-Factory dataset_info.json, or the directory that holds one.")
    mixing: Literal["concat", "interleave_under", "interleave_over"] = Field(
        "concat",
        description="concat: each source once (weights repeat or thin it); interleave: draw sources by weight until the "
        "first is used up (under) or all are (over).",
    )
    max_length: PositiveInt = Field(1024, description="T, tokens in a row.")
    packing: bool = Field(True, description="Pack several documents into a row; false: one padded document a row.")
    overlong: Literal["truncate", "drop", "error"] = Field("truncate", description="Documents longer than max_length.")
    on_bad: Literal["error", "skip"] = Field("error", description="Records that do not fit their format.")
    train_on_prompt: bool = Field(False, description="Also learn system, user and tool turns.")
    last_turn_only: bool = Field(False, description="Learn only the last assistant turn.")
    system: str | None = Field(None, description="System prompt for conversations that have none.")
    shuffle: bool = Field(True, description="A new order every epoch, a function of the seed.")

    @field_validator("train", "validation", mode="before")
    @classmethod
    def _short_sources(cls, value: Any) -> Any:
        """A path, a mapping, or a list of either."""
        if isinstance(value, str | dict):
            value = [value]
        if isinstance(value, list):
            return [{"path": one} if isinstance(one, str) else one for one in value]
        return value

    @field_validator("validation")
    @classmethod
    def _share_or_number(cls, value: Any) -> Any:
        if isinstance(value, float) and (value <= 0 or (value > 1 and value != int(value))):
            raise ValueError("give a share between 0 and 1, or a whole number of records")
        return value
