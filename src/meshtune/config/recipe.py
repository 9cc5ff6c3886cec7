"""The recipe: everything a run is, as one pydantic model. Its fields are Meshtune's public YAML schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from meshtune.config.data import DataSection
from meshtune.config.lora import LoraMethod
from meshtune.config.model import ModelSection
from meshtune.config.optimizer import LOW_RANK, OptimizerSection
from meshtune.config.quantize import QuantizeSection
from meshtune.config.section import PathText, Section
from meshtune.config.short_forms import written_out
from meshtune.config.stage import SftStage, Stage


class FullMethod(Section):
    """Every weight is trained."""

    kind: Literal["full"] = "full"


class FreezeMethod(Section):
    """Some layers or modules are trained in full, the rest is frozen."""

    kind: Literal["freeze"] = "freeze"
    last_layers: PositiveInt | None = Field(default=None, description="Train the last n decoder layers.")
    first_layers: PositiveInt | None = Field(default=None, description="Train the first n decoder layers.")
    modules: list[str] = Field(
        default_factory=list,
        description="Names or patterns: within the chosen layers if some are chosen, else in all; "
        "also embed_tokens, norm, lm_head.",
    )

    @model_validator(mode="after")
    def _something(self) -> FreezeMethod:
        if not (self.last_layers or self.first_layers or self.modules):
            raise ValueError("give last_layers, first_layers or modules; otherwise nothing is trained")
        if self.last_layers and self.first_layers:
            raise ValueError("give last_layers or first_layers, not both")
        return self


class LlamaProMethod(Section):
    """New layers are put between those of the model, which stay as they are (https://arxiv.org/abs/2401.02415)."""

    kind: Literal["llama_pro"] = "llama_pro"
    blocks: PositiveInt = Field(
        default=8,
        description="New layers, spread evenly; they begin as copies that add nothing, and they alone are trained.",
    )


METHODS = (LoraMethod, FullMethod, FreezeMethod, LlamaProMethod)
Method = Annotated[LoraMethod | FullMethod | FreezeMethod | LlamaProMethod, Field(discriminator="kind")]


class TrainSection(Section):
    """Length, and rows an update. A row is one packed or padded sequence of data.max_length tokens."""

    epochs: float | None = Field(
        default=None, gt=0, description="Passes over the data; default 3 if steps is not given."
    )
    steps: PositiveInt | None = Field(default=None, description="Optimizer updates; instead of epochs.")
    batch_size: PositiveInt = Field(default=16, description="Rows an update, over all devices and micro-batches.")
    micro_batch: PositiveInt | Literal["auto"] | None = Field(
        default=None,
        description="Rows computed at once; batch_size must divide by it. Default: the whole batch; "
        "auto: what is fastest and fits (see meshtune plan).",
    )

    @model_validator(mode="after")
    def _whole(self) -> TrainSection:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("give epochs or steps, not both")
        if isinstance(self.micro_batch, int) and self.batch_size % self.micro_batch:
            raise ValueError(f"batch_size {self.batch_size} does not divide by micro_batch {self.micro_batch}")
        return self

    @property
    def accumulation(self) -> int:
        """Micro-batches an update; one as long as micro_batch is auto (plan.auto settles that first)."""
        return self.batch_size // (self.micro_batch if isinstance(self.micro_batch, int) else self.batch_size)


class ComputeSection(Section):
    """How the numbers are computed. None of these changes what is learned beyond rounding."""

    precision: Literal["auto", "mixed", "float32", "bfloat16"] = Field(
        default="auto",
        description="mixed: bf16 compute, float32 trainables and optimizer state; bfloat16: everything bf16; "
        "auto: mixed on accelerators, float32 on CPU.",
    )
    remat: Literal["auto", "none", "selective", "full"] = Field(
        default="auto",
        description="What is recomputed in the backward pass: nothing, everything but products, or all of a layer; "
        "auto: the faster that fits.",
    )
    attention: Literal["auto", "direct", "splash", "cudnn", "triton", "blockwise"] = Field(
        default="auto",
        description="The attention backend; auto: the first that serves, in this order. splash: TPU; cudnn: NVIDIA, "
        "one document a row; triton: NVIDIA and AMD; blockwise: everywhere; direct: short rows.",
    )
    loss_chunk: PositiveInt | None = Field(
        default=None, description="Tokens of logits held at once; default: chosen by size."
    )
    mlp_chunk: PositiveInt | Literal["auto"] | None = Field(
        default=None,
        description="Tokens of a row whose feed-forward layer exists at once; auto: by size; null: the whole row.",
    )
    attention_chunk: PositiveInt | Literal["auto"] | None = Field(
        default=None,
        description="Tokens of a row whose queries, attention and feed-forward layer exist at once, for rows of tens "
        "of thousands of tokens; auto: by size; null: the whole row.",
    )
    offload: list[Literal["residual", "optimizer", "weights"]] = Field(
        default_factory=list,
        description="What waits in the host's memory: residual, the stream that enters each layer; optimizer, its "
        "state; weights, the layers' frozen weights, and with optimizer.fused all that are trained.",
    )
    scan_layers: bool = Field(
        default=True, description="Scan over layers (compile time does not grow with depth) or unroll."
    )

    @model_validator(mode="after")
    def _offload(self) -> ComputeSection:
        if "residual" in self.offload and self.remat == "none":
            raise ValueError(
                "offload: residual sends away what the backward pass starts a layer from, and remat: none keeps all "
                "that is made of it: use remat: full or selective"
            )
        if len(set(self.offload)) < len(self.offload):
            raise ValueError("offload names something twice")
        return self


AxisSize = Annotated[int, Field(ge=-1)]


class MeshSection(Section):
    """Devices along each axis of the mesh; they multiply to the number of devices. One may be -1: all that are left."""

    dp: AxisSize = Field(default=1, description="Replicas: rows are split, parameters are not; goes across hosts.")
    fsdp: AxisSize = Field(default=1, description="Rows and parameters are split.")
    tp: AxisSize = Field(default=1, description="Heads, ffn and vocabulary are split.")
    cp: AxisSize = Field(default=1, description="The sequence is split; parameters as with fsdp.")
    ep: AxisSize = Field(default=1, description="Experts are split.")

    @model_validator(mode="after")
    def _sizes(self) -> MeshSection:
        sizes = self.model_dump()
        if empty := [axis for axis, size in sizes.items() if size == 0]:
            raise ValueError(f"{empty[0]} is 0: give a whole number from 1, or -1 for as many devices as are left")
        if len(left := [axis for axis, size in sizes.items() if size == -1]) > 1:
            raise ValueError(f"{' and '.join(left)} are both -1: leave at most one axis open")
        return self


class EvalSection(Section):
    """Loss on the validation data while training."""

    every: PositiveInt | Literal["epoch"] | None = Field(
        default="epoch", description="Steps between evaluations, 'epoch', or null."
    )
    at_start: bool = Field(default=False, description="Also evaluate before the first step.")
    early_stopping: PositiveInt | None = Field(
        default=None, description="Stop after this many evaluations without improvement."
    )
    min_delta: float = Field(default=0.0, ge=0, description="An improvement must be larger than this.")


class SampleSection(Section):
    """Text generated while training, to see what is learned."""

    every: PositiveInt | None = Field(
        default=None, description="Steps between samples; null: only at the start and the end."
    )
    prompts: list[str] = Field(default_factory=list, description="User messages (chat data) or text to continue.")
    max_tokens: PositiveInt = Field(default=64, description="New tokens a sample at most.")
    temperature: float = Field(default=0.0, ge=0, description="0 is greedy.")


class LogSection(Section):
    """What is written while training."""

    every: PositiveInt = Field(default=1, description="Steps between lines of metrics.jsonl.")
    plot_every: PositiveInt = Field(default=20, description="Steps between refreshes of loss.png.")
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = Field(
        default_factory=list, description="Also send the metrics there; each must be installed."
    )
    project: str = Field(default="meshtune", description="Project name in wandb, trackio and mlflow.")


class CheckpointSection(Section):
    """Run state on disk, for resuming."""

    every: PositiveInt | None = Field(
        default=None, description="Steps between saves; default: about ten a run, and at the end."
    )
    keep: PositiveInt = Field(default=3, description="Newest checkpoints kept.")
    keep_best: bool = Field(default=True, description="Also keep the one with the lowest validation loss.")


class Recipe(Section):
    """A whole run. `meshtune schema` prints this as JSON schema; `key.sub=value` on the command line overrides."""

    model: ModelSection
    data: DataSection
    output: PathText = Field(description="Directory of the run: checkpoints, logs, plots, the final adapter or model.")
    stage: Stage = Field(default_factory=SftStage, description="What is learned and how it is scored.")
    method: Method = Field(default_factory=LoraMethod)
    quantize: QuantizeSection | None = Field(
        default=None, description="Keep the frozen base in few bits (nf4, int8, fp8 or int4); null: as it is."
    )
    mesh: MeshSection | Literal["auto"] = Field(
        default="auto", description="How devices share the work; auto: what is fastest and fits (see meshtune plan)."
    )
    train: TrainSection = Field(default_factory=TrainSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    compute: ComputeSection = Field(default_factory=ComputeSection)
    eval: EvalSection = Field(default_factory=EvalSection)
    sample: SampleSection = Field(default_factory=SampleSection)
    log: LogSection = Field(default_factory=LogSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    seed: int = Field(default=0, ge=0, lt=2**31, description="Seed of data order, initialisation and dropout.")
    resume: bool = Field(default=False, description="Go on from the newest checkpoint in output, if there is one.")
    overwrite: bool = Field(
        default=False, description="Start anew although output is not empty; the old run is moved aside."
    )

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        return written_out(value) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _start(self) -> Recipe:
        if self.resume and self.overwrite:
            raise ValueError("give resume or overwrite, not both")
        if self.data.validation is None:
            for wanted, key in (
                (self.eval.early_stopping is not None, "eval.early_stopping"),
                (self.eval.at_start, "eval.at_start"),
                (isinstance(self.eval.every, int), "eval.every"),
            ):
                if wanted:
                    raise ValueError(f"{key} needs validation data: give data.validation, or leave {key} out")
        if self.eval.early_stopping is not None and self.eval.every is None:
            raise ValueError("eval.early_stopping needs eval.every: with null nothing is evaluated")
        if self.quantize is not None and self.method.kind not in ("lora", "llama_pro"):
            raise ValueError(
                f"quantize keeps the base frozen, in codes that no update can change, and method {self.method.kind} "
                "trains the base itself: use method: lora or llama_pro with quantize, or leave quantize out"
            )
        self._adapter_fits()
        self._optimizer_fits()
        if self.model.adapter is not None and self.method.kind != "lora":
            raise ValueError(
                f"model.adapter goes on with an adapter, and method {self.method.kind} trains none: use method: "
                "lora, or model.merge_adapters, which folds it in first"
            )
        if self.stage.kind == "rm" and self.sample.prompts:
            raise ValueError("sample.prompts has no meaning with stage rm: its model gives a score, it writes no text")
        if self.data.train_on_prompt and (
            self.stage.kind in ("rm", "kto") or getattr(self.stage, "sft_weight", 1.0) == 0
        ):
            raise ValueError(
                f"data.train_on_prompt has no meaning with stage {self.stage.kind} without sft_weight: only answers "
                "are compared"
            )
        if self.sample.every is not None and not self.sample.prompts:
            raise ValueError("sample.every needs sample.prompts: there is nothing to continue")
        return self

    def _adapter_fits(self) -> None:
        adapter = getattr(self.method, "adapter", None)
        if adapter == "pissa" and self.quantize is not None:
            raise ValueError(
                "method.adapter: pissa takes the base apart, and a quantised one has lost what it would find: use "
                "method.adapter: loftq with quantize, or leave quantize out"
            )
        if adapter == "loftq" and self.quantize is None:
            raise ValueError(
                "method.adapter: loftq begins at what quantising the base loses: add quantize: nf4 (or int8, int4, "
                "fp8), or use method.adapter: pissa"
            )

    def _optimizer_fits(self) -> None:
        asked, remat = self.optimizer, self.compute.remat
        what = "optimizer.fused" if asked.fused else f"optimizer.name: {asked.name}"
        if asked.name in LOW_RANK and self.method.kind == "lora":
            raise ValueError(
                f"optimizer.name: {asked.name} makes the gradients of whole matrices narrow, and adapters are narrow "
                "already: use method: full or freeze with it, or optimizer.name: adamw with lora"
            )
        if asked.name == "sophia" and self.stage.kind not in ("sft", "pt"):
            raise ValueError(
                "optimizer.name: sophia measures how predictions of tokens curve the loss, and stage "
                f"{self.stage.kind} is learned from answers as a whole: use adamw with it, or sophia with sft or pt"
            )
        if asked.lora_plus_ratio is not None and self.method.kind != "lora":
            raise ValueError(
                f"optimizer.lora_plus_ratio is of the rates of an adapter's A and B, and method {self.method.kind} has "
                "no adapters: use method: lora, or leave it out"
            )
        if "weights" in self.compute.offload and self.method.kind == "full" and not asked.fused:
            raise ValueError(
                "compute.offload: [weights] has nothing to send away: method full trains all, and what is trained can "
                "wait on the host only where each layer is updated as soon as its gradient is there: set "
                "optimizer.fused: true and max_grad_norm: null (as docs/memory.md has it), or leave weights out"
            )
        if not asked.walks:
            return
        if "weights" in self.compute.offload and asked.name == "schedule_free":
            raise ValueError(
                "schedule_free evaluates and exports an average of all its weights, which would come to the device at "
                "once: use another optimizer with compute.offload: [weights], or leave weights out"
            )
        if self.method.kind == "lora":
            raise ValueError(
                f"{what} saves gradients and state of whole layers, and adapters have little of either: use method: "
                "full or freeze with it, or leave it out"
            )
        if asked.fused and (self.train.micro_batch == "auto" or self.train.accumulation > 1):
            raise ValueError(
                "optimizer.fused uses a micro-batch's gradient up, so that the next one's cannot be added to it: leave "
                f"train.micro_batch out (all {self.train.batch_size} rows at once) or lower train.batch_size; "
                "adamw8bit, galore or badam without fused take several micro-batches"
            )
        if remat not in ("auto", "full"):
            raise ValueError(
                f"{what} goes back through the layers one by one and makes each again from what entered it: use "
                f"compute.remat: full or auto, not {remat}"
            )
        if asked.name == "badam" and "optimizer" in self.compute.offload:
            raise ValueError("badam keeps the state of one layer: there is none worth compute.offload: [optimizer]")
        if not self.compute.scan_layers:
            raise ValueError(f"{what} goes through the layers in a loop: leave compute.scan_layers out")
