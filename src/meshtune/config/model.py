"""The model section of a recipe: where the model is, and changes to it before training."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from meshtune.config.section import PathText, Section


class ModelSection(Section):
    """The model to start from."""

    path: PathText = Field(
        description="A Hugging Face directory or a hub id, such as HuggingFaceTB/SmolLM2-135M-Instruct."
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit on the hub.")
    load: Literal["direct", "broadcast"] = Field(
        default="direct",
        description="direct: every process reads what its devices hold; broadcast: one process a host reads for all, "
        "for slow shared storage.",
    )
    tokenizer: PathText | None = Field(
        default=None, description="Directory or hub id of the tokenizer, if not the model's own."
    )
    chat_template: PathText | None = Field(
        default=None,
        description="A Jinja file, or the name of a template that ships with Meshtune; default: the tokenizer's own.",
    )
    adapter: PathText | None = Field(
        default=None,
        description="An adapter (its directory, or its run's) to continue training; with method lora, whose rank, "
        "alpha and targets are then the adapter's.",
    )
    merge_adapters: list[PathText] = Field(
        default_factory=list,
        description="Adapters to merge into the model first; the run keeps the result in base/.",
    )
    any_base: bool = Field(
        default=False, description="Accept these adapters although they were trained on another base."
    )
    new_tokens: list[str] = Field(
        default_factory=list, description="Tokens to add to the tokenizer, with rows of the embedding and the head."
    )
    new_special_tokens: list[str] = Field(
        default_factory=list, description="The same, left out of decoded text like other special tokens."
    )
    pad_vocab_to: PositiveInt | None = Field(
        default=None, description="Round the rows of embedding and head up to a multiple of this, such as 64."
    )
    router_aux_loss: float | None = Field(
        default=None,
        ge=0,
        description="Coefficient of the loss that balances the load of experts, such as 0.001; default: no such loss.",
    )
    router_bias_update_rate: float | None = Field(
        default=None,
        gt=0,
        description="What every update moves an expert's correction bias by, such as 0.001: up where the expert "
        "computed fewer tokens than the mean of its layer, down where more; default: biases stay as they are.",
    )

    @model_validator(mode="after")
    def _one_start(self) -> ModelSection:
        if self.any_base and not (self.adapter or self.merge_adapters):
            raise ValueError("any_base is about adapters: give adapter or merge_adapters, or leave it out")
        if self.adapter and (self.new_tokens or self.new_special_tokens or self.pad_vocab_to or self.merge_adapters):
            raise ValueError(
                "adapter continues training an adapter of the model as it is, and merge_adapters, new tokens and "
                "pad_vocab_to change the model: merge that adapter too, or do one after the other"
            )
        return self

    @property
    def changed(self) -> bool:
        """Whether the run starts from another model than the one at `path`, made from it."""
        return bool(self.merge_adapters or self.new_tokens or self.new_special_tokens or self.pad_vocab_to)
