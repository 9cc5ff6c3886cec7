"""The recipe: everything a run is, as one pydantic model. Its fields are Meshtune's public YAML schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from meshtune.config.data import DataSection


class Section(BaseModel):
    """A part of a recipe: unknown keys are errors, values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(Section):
    """The model to start from."""

    path: str = Field(description="A Hugging Face directory or a hub id, such as HuggingFaceTB/SmolLM2-135M-Instruct.")
    revision: str | None = Field(None, description="Branch, tag or commit on the hub.")
    tokenizer: str | None = Field(None, description="Directory or hub id of the tokenizer, if not the model's own.")
    chat_template: str | None = Field(
        None, description="A Jinja file, or the name of a template that ships with Meshtune; default: the tokenizer's own."
    )


class LoraMethod(Section):
    """Low-rank adapters beside frozen weights (https://arxiv.org/abs/2106.09685)."""

    kind: Literal["lora"] = "lora"
    rank: PositiveInt = Field(8, description="R, the adapters' inner dimension.")
    alpha: float = Field(16.0, gt=0, description="Adapters are scaled by alpha / rank (rslora: alpha / sqrt(rank)).")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the adapters' input while training.")
    targets: str | list[str] = Field(
        "all-linear",
        description="'all-linear' (every linear layer but the head), module names (q_proj), or patterns (layers.*.mlp.*).",
    )
    rslora: bool = Field(False, description="Rank-stabilised scaling (https://arxiv.org/abs/2312.03732).")
    train_modules: list[str] = Field(
        default_factory=list, description="Modules trained in full beside the adapters, e.g. embed_tokens, lm_head."
    )


class FullMethod(Section):
    """Every weight is trained."""

    kind: Literal["full"] = "full"


class FreezeMethod(Section):
    """Some layers or modules are trained in full, the rest is frozen."""

    kind: Literal["freeze"] = "freeze"
    last_layers: PositiveInt | None = Field(None, description="Train the last n decoder layers.")
    first_layers: PositiveInt | None = Field(None, description="Train the first n decoder layers.")
    modules: list[str] = Field(
        default_factory=list,
        description="Names or patterns: within the chosen layers if some are chosen, else in all; also embed_tokens, norm, lm_head.",
    )

    @model_validator(mode="after")
    def _something(self) -> FreezeMethod:
        if not (self.last_layers or self.first_layers or self.modules):
            raise ValueError("freeze needs at least one of last_layers, first_layers, modules; otherwise nothing is trained")
        if self.last_layers and self.first_layers:
            raise ValueError("give last_layers or first_layers, not both")
        return self


Method = Annotated[LoraMethod | FullMethod | FreezeMethod, Field(discriminator="kind")]


class TrainSection(Section):
    """How long, and how many rows an update sees. A row is one packed (or padded) sequence of data.max_length tokens."""

    epochs: float | None = Field(None, gt=0, description="Passes over the data; default 3 if steps is not given.")
    steps: PositiveInt | None = Field(None, description="Optimizer updates; instead of epochs.")
    batch_size: PositiveInt = Field(16, description="Rows an update, over all devices and micro-batches.")
    micro_batch: PositiveInt | None = Field(
        None, description="Rows computed at once; batch_size must divide by it. Default: the whole batch."
    )

    @model_validator(mode="after")
    def _whole(self) -> TrainSection:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("give epochs or steps, not both")
        if self.micro_batch is not None and self.batch_size % self.micro_batch:
            raise ValueError(f"batch_size {self.batch_size} does not divide by micro_batch {self.micro_batch}")
        return self

    @property
    def accumulation(self) -> int:
        """Micro-batches an update."""
        return self.batch_size // (self.micro_batch or self.batch_size)


class OptimizerSection(Section):
    """The optimizer and its schedule. Defaults marked 'per method' are 2e-4 for lora and 2e-5 for full and freeze."""

    name: Literal["adamw", "sgd", "adafactor", "lion"] = "adamw"
    learning_rate: float | None = Field(None, gt=0, description="Peak learning rate; default per method.")
    schedule: Literal["linear", "cosine", "constant", "wsd", "inverse_sqrt"] = "cosine"
    warmup_ratio: float = Field(0.03, ge=0, lt=1, description="Share of the steps spent warming up.")
    warmup_steps: int | None = Field(None, ge=0, description="Steps spent warming up; instead of warmup_ratio.")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="The schedule ends at this share of the peak.")
    decay_ratio: float = Field(0.2, gt=0, le=1, description="wsd: share of the steps spent decaying at the end.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    no_decay: list[str] = Field(
        default_factory=lambda: ["*norm*", "*bias"], description="Patterns of parameters that are never decayed."
    )
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float | None = Field(None, ge=0, lt=1, description="Default 0.999 (adamw), 0.99 (lion).")
    eps: float = Field(1e-8, gt=0)
    momentum: float = Field(0.0, ge=0, lt=1, description="sgd: momentum.")
    max_grad_norm: float | None = Field(1.0, gt=0, description="Clip the global gradient norm; null: never.")


class ComputeSection(Section):
    """How the numbers are computed. None of these changes what is learned beyond rounding."""

    precision: Literal["auto", "mixed", "float32", "bfloat16"] = Field(
        "auto",
        description="mixed: bf16 compute, float32 trainables and optimizer state; bfloat16: everything bf16; "
        "auto: mixed on accelerators, float32 on CPU.",
    )
    remat: Literal["auto", "none", "selective", "full"] = Field(
        "auto", description="What is recomputed in the backward pass; auto: none on CPU, selective elsewhere."
    )
    attention: Literal["auto", "direct", "blockwise"] = Field("auto", description="The attention backend.")
    loss_chunk: PositiveInt | None = Field(None, description="Tokens of logits held at once; default: chosen by size.")
    scan_layers: bool = Field(True, description="Scan over layers (compile time does not grow with depth) or unroll.")


class EvalSection(Section):
    """Loss on the validation data while training."""

    every: PositiveInt | Literal["epoch"] | None = Field("epoch", description="Steps between evaluations, 'epoch', or null.")
    at_start: bool = Field(False, description="Also evaluate before the first step.")
    early_stopping: PositiveInt | None = Field(None, description="Stop after this many evaluations without improvement.")
    min_delta: float = Field(0.0, ge=0, description="An improvement must be larger than this.")


class SampleSection(Section):
    """Text generated while training, to see what is learned."""

    every: PositiveInt | None = Field(None, description="Steps between samples; null: only at the start and the end.")
    prompts: list[str] = Field(default_factory=list, description="User messages (chat data) or text to continue.")
    max_tokens: PositiveInt = 64
    temperature: float = Field(0.0, ge=0, description="0 is greedy.")


class LogSection(Section):
    """What is written while training."""

    every: PositiveInt = Field(1, description="Steps between lines of metrics.jsonl.")
    plot_every: PositiveInt = Field(20, description="Steps between refreshes of loss.png.")
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = Field(default_factory=list)
    project: str = Field("meshtune", description="Project name in wandb, trackio and mlflow.")


class CheckpointSection(Section):
    """Run state on disk, for resuming."""

    every: PositiveInt | None = Field(None, description="Steps between saves; default: about ten a run, and at the end.")
    keep: PositiveInt = Field(3, description="Newest checkpoints kept.")
    keep_best: bool = Field(True, description="Also keep the one with the lowest validation loss.")


class Recipe(Section):
    """A whole run. `meshtune schema` prints this as JSON schema; `key.sub=value` on the command line overrides."""

    model: ModelSection
    data: DataSection
    output: str = Field(description="Directory of the run: checkpoints, logs, plots, the final adapter or model.")
    method: Method = Field(default_factory=LoraMethod)
    train: TrainSection = Field(default_factory=TrainSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    compute: ComputeSection = Field(default_factory=ComputeSection)
    eval: EvalSection = Field(default_factory=EvalSection)
    sample: SampleSection = Field(default_factory=SampleSection)
    log: LogSection = Field(default_factory=LogSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of data order, initialisation and dropout.")
    resume: bool = Field(False, description="Go on from the newest checkpoint in output, if there is one.")
    overwrite: bool = Field(False, description="Start anew although output is not empty; the old run is moved aside.")

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        """`model: PATH` means `model: {path: PATH}`; `method: full` means `method: {kind: full}`."""
        if isinstance(value, dict):
            value = dict(value)
            if isinstance(value.get("model"), str):
                value["model"] = {"path": value["model"]}
            method = value.get("method")
            if isinstance(method, str):
                value["method"] = {"kind": method}
            elif isinstance(method, dict) and "kind" not in method:
                value["method"] = {"kind": "lora", **method}
            if isinstance(value.get("data"), str | list):
                value["data"] = {"train": value["data"]}
        return value

    @model_validator(mode="after")
    def _start(self) -> Recipe:
        if self.resume and self.overwrite:
            raise ValueError("give resume or overwrite, not both")
        return self
