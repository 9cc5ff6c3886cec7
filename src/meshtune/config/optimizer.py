"""The optimizer and its schedule, as a section of the recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from meshtune.config.section import Section

ADAM = (
    "adamw", "adamw8bit", "adam_mini", "muon", "galore", "apollo", "badam", "schedule_free", "prodigy", "sophia",
)  # fmt: skip
LOW_RANK = ("galore", "apollo")
# Which optimizers (or, of the schedule, which schedules) read a key; those not named are read by all.
READERS: dict[str, tuple[str, ...]] = {
    "beta1": (*ADAM, "lion"),
    "beta2": (*ADAM, "lion"),
    "eps": ADAM,
    "momentum": ("sgd", "muon"),
    "match_rms": ("muon",),
    "rank": LOW_RANK,
    "update_gap": LOW_RANK,
    "scale": LOW_RANK,
    "scaling": ("apollo",),
    "switch_every": ("badam",),
    "block_order": ("badam",),
    "d_coef": ("prodigy",),
    "gamma": ("sophia",),
    "curvature_every": ("sophia",),
}
NOT_FUSED = {
    "badam": "it has the gradient of one layer alone already",
    "prodigy": "it finds its rate from the gradients of all parameters together",
    "sophia": "it takes the curvature along all parameters at once",
}
ONE_RATE = {"prodigy": "prodigy finds one rate for all parameters", "sophia": "sophia has one for all parameters"}


class OptimizerSection(Section):
    """The optimizer and its schedule. Defaults marked 'per method' are 2e-4 for lora and 2e-5 for full and freeze; a
    tenth of these for stages that compare answers."""

    name: Literal[
        "adamw", "adamw8bit", "adam_mini", "muon", "galore", "apollo", "badam", "adafactor", "lion", "sgd",
        "schedule_free", "prodigy", "sophia",
    ] = Field(
        default="adamw",
        description="The optimizer. adamw8bit: its state in 8 bits; adam_mini: one second moment a block; muon: for "
        "matrices; galore, apollo: state of low rank; badam: one layer at a time; schedule_free: without decay of the "
        "rate; prodigy: finds its rate; sophia: divides by the curvature.",
    )  # fmt: skip
    fused: bool = Field(
        default=False,
        description="Update each layer as soon as the backward pass has its gradient, so that no gradient of the whole "
        "model ever exists (with sgd: LOMO); for method full or freeze, with one micro-batch and max_grad_norm null.",
    )
    learning_rate: float | None = Field(
        default=None, gt=0, description="Peak learning rate; default per method; prodigy: a factor, 1 by default."
    )
    schedule: Literal["linear", "cosine", "constant", "wsd", "inverse_sqrt"] = Field(
        default="cosine", description="How the learning rate goes after warm-up; wsd stays at the peak, then decays."
    )
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1, description="Share of the steps spent warming up.")
    warmup_steps: int | None = Field(default=None, ge=0, description="Steps spent warming up; instead of warmup_ratio.")
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1, description="The schedule ends at this share of the peak.")
    decay_ratio: float = Field(
        default=0.2, gt=0, le=1, description="wsd: share of the steps spent decaying at the end."
    )
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay.")
    no_decay: list[str] = Field(
        default_factory=lambda: ["*norm*", "*bias"], description="Patterns of parameters that are never decayed."
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="adamw and its kin, lion: decay of the first moment.")
    beta2: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="adamw and its kin, lion: decay of the second moment; default 0.999, of lion and sophia 0.99.",
    )
    eps: float = Field(default=1e-8, gt=0, description="adamw and its kin: added to the root of the second moment.")
    momentum: float | None = Field(default=None, ge=0, lt=1, description="sgd: default 0; muon: default 0.95.")
    match_rms: bool = Field(
        default=True,
        description="muon: updates as large as AdamW's, so that one learning rate serves both; false: the author's "
        "own sqrt(max(1, rows / columns)).",
    )
    rank: PositiveInt = Field(default=128, description="galore, apollo: rank at which a matrix's gradient is kept.")
    update_gap: PositiveInt = Field(default=200, description="galore, apollo: updates with the same projection.")
    scale: float | None = Field(
        default=None,
        gt=0,
        description="galore: factor of its updates, default 0.25; apollo: of their square, default 1.",
    )
    scaling: Literal["channel", "tensor"] = Field(
        default="channel", description="apollo: a factor for every row or column, or one a matrix (rank 1, scale 128)."
    )
    switch_every: PositiveInt = Field(default=50, description="badam: updates of a layer before the next has its turn.")
    block_order: Literal["ascending", "descending", "random"] = Field(
        default="ascending", description="badam: the order in which layers take turns."
    )
    d_coef: float = Field(default=1.0, gt=0, description="prodigy: factor of the rate that it finds.")
    gamma: float = Field(
        default=0.05, gt=0, description="sophia: factor of the curvature; the larger, the fewer changes are clipped."
    )
    curvature_every: PositiveInt = Field(default=10, description="sophia: updates between estimates of the curvature.")
    lora_plus_ratio: float | None = Field(
        default=None,
        ge=1,
        description="LoRA+: how many times faster an adapter's B learns than its A, such as 16; null: equally fast.",
    )
    lora_plus_embedding_rate: float | None = Field(
        default=None, gt=0, description="LoRA+: the learning rate of embeddings; default: that of A."
    )
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="Clip the global gradient norm; null: never.")

    @model_validator(mode="after")
    def _nothing_ignored(self) -> OptimizerSection:
        """A setting that the chosen optimizer or schedule would not read is an error, not a silence."""
        default = type(self).model_fields
        if self.warmup_steps is not None and self.warmup_ratio != default["warmup_ratio"].default:
            raise ValueError("give warmup_ratio or warmup_steps, not both")
        read = {field: (self.name, readers) for field, readers in READERS.items()}
        for field, (chosen, readers) in (read | {"decay_ratio": (self.schedule, ("wsd",))}).items():
            given = getattr(self, field)
            unsaid = given == default[field].default or (field == "momentum" and given == 0)
            if not unsaid and chosen not in readers:
                names = " and ".join(filter(None, (", ".join(readers[:-1]), readers[-1])))
                raise ValueError(f"{field} is read by {names} alone, and {chosen} was chosen")
        return self

    @model_validator(mode="after")
    def _possible(self) -> OptimizerSection:
        if self.name == "schedule_free":
            if self.schedule != "constant":
                raise ValueError(
                    f"schedule_free averages in the place of a decaying rate, and schedule is {self.schedule}: use "
                    "schedule: constant (a warm-up is fine)"
                )
            if self.beta1 == 0:
                raise ValueError("schedule_free's beta1 is the share of the average in what is trained: above 0")
        if self.lora_plus_embedding_rate is not None and self.lora_plus_ratio is None:
            raise ValueError("lora_plus_embedding_rate is a part of LoRA+: give lora_plus_ratio too, or leave it out")
        if self.lora_plus_ratio is not None and self.name in ONE_RATE:
            raise ValueError(
                f"lora_plus_ratio gives A and B rates of their own, and {ONE_RATE[self.name]}: use adamw with it, or "
                "leave lora_plus_ratio out"
            )
        if self.fused and self.name in NOT_FUSED:
            raise ValueError(
                f"fused updates a layer as soon as its gradient is there, and {self.name} cannot: "
                f"{NOT_FUSED[self.name]}; leave fused out, or use adamw8bit, adafactor or sgd with it"
            )
        if self.fused and self.max_grad_norm is not None:
            raise ValueError(
                "max_grad_norm clips by the norm of all gradients, and fused has used up the first before it knows the "
                "last: set max_grad_norm: null with fused (adafactor clips each update by its own size instead), or "
                "leave fused out"
            )
        return self

    @property
    def walks(self) -> bool:
        """Whether gradients exist for a layer at a time only, and so layers are made again from what entered them."""
        return self.fused or self.name == "badam"
