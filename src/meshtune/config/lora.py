"""Adapters beside a frozen base, as a section of the recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from meshtune.config.section import Section


class LoraMethod(Section):
    """Adapters beside frozen weights: LoRA (https://arxiv.org/abs/2106.09685) and its variants (docs/adapters.md)."""

    kind: Literal["lora"] = Field(default="lora", description="Which method: lora, full, freeze or llama_pro.")
    adapter: Literal["lora", "dora", "pissa", "loftq", "oft", "vera"] = Field(
        default="lora", description="Which kind of adapter; rank, alpha, rslora and dropout are not of every kind."
    )
    rank: PositiveInt = Field(default=8, description="R, the adapters' inner dimension.")
    alpha: float = Field(
        default=16.0, gt=0, description="Adapters are scaled by alpha / rank (rslora: alpha / sqrt(rank))."
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout on the adapters' input while training.")
    targets: str | list[str] = Field(
        default="all-linear",
        description="'all-linear' (every linear layer but the head), module names (q_proj), "
        "or patterns (layers.*.mlp.*).",
    )
    rslora: bool = Field(default=False, description="Rank-stabilised scaling (https://arxiv.org/abs/2312.03732).")
    train_modules: list[str] = Field(
        default_factory=list, description="Modules trained in full beside the adapters, e.g. embed_tokens, lm_head."
    )
    svd_iterations: PositiveInt | None = Field(
        default=16,
        description="pissa, loftq: iterations of a randomised decomposition; null: an exact one, slow.",
    )
    pissa_convert: bool = Field(
        default=True,
        description="pissa: write a plain LoRA of twice the rank for the base as it is; false: PEFT's own form, whose "
        "base PEFT decomposes again when it loads it (needs svd_iterations: null).",
    )
    loftq_iterations: PositiveInt = Field(
        default=1,
        description="loftq: alternations of quantising and decomposing; above 1 the run keeps its own base in base/.",
    )
    loftq_calibration: NonNegativeInt = Field(
        default=0,
        description="loftq: rows of the training data on which the inputs of every weight are measured first, so that "
        "errors at large inputs count more; 0: all alike.",
    )
    oft_block_size: PositiveInt = Field(
        default=32, description="oft: neighbouring inputs that turn together; must divide the inputs of every target."
    )
    oft_cayley_terms: PositiveInt | None = Field(
        default=5, description="oft: terms of the series for the rotation, as PEFT's; null: the exact transform."
    )
    vera_key: int = Field(default=0, ge=0, description="vera: the seed of its random projections, PEFT's for the same.")
    vera_d_initial: float = Field(default=0.1, description="vera: initial value of the trained vector d.")
