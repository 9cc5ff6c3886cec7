"""The recipe: everything a run is, as one pydantic model. Its fields are Meshtune's public YAML schema."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, ValidationError, model_validator

from meshtune.adapters.config import LoraOptions
from meshtune.config.rewards import RewardSection
from meshtune.config.rules import check_together
from meshtune.config.section import Duration, PathText, Section, check_duration, declared, refuse_truth_values
from meshtune.config.sections import (
    DataSection,
    EvaluateSection,
    HubSection,
    MethodSection,
    ModelSection,
    OptimizerSection,
    RolloutSection,
    StageSection,
    VisionSection,
    written_out,
)
from meshtune.mesh.config import MeshConfig
from meshtune.model.compute import AttentionName, Compute, ExchangeName, OffloadName, RematName
from meshtune.objectives.config import PAIR_STAGES, SftConfig
from meshtune.optim.config import OptimizerOptions
from meshtune.quantize.config import QuantizeConfig

DEFAULT_EPOCHS = 3.0


class TrainSection(Section):
    """Length, and rows an update. A row is one packed or padded sequence of data.max_length tokens."""

    epochs: float | None = Field(
        default=None, gt=0, description=f"Passes over the data; default {DEFAULT_EPOCHS:g} if steps is not given."
    )
    steps: PositiveInt | None = Field(default=None, description="Optimizer updates; instead of epochs.")
    batch_size: PositiveInt = Field(default=16, description="Rows an update, over all devices and micro-batches.")
    micro_batch: PositiveInt | Literal["auto"] | None = Field(
        default=None,
        description="Rows computed at once; batch_size must divide by it. Default: the whole batch; "
        "auto: what is fastest and fits, made smaller if it turns out not to fit.",
    )
    hang_seconds: float | None = Field(
        default=600.0,
        ge=10,
        description="Without an update for so long, and hang_factor times the median, every process writes its stacks "
        "and ends with 75. null: never.",
    )
    hang_factor: float = Field(default=20.0, ge=1, description="See hang_seconds.")

    @model_validator(mode="after")
    def _check_batch(self) -> TrainSection:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("give epochs or steps, not both: steps=null or epochs=null takes one away")
        if isinstance(self.micro_batch, int) and self.batch_size % self.micro_batch:
            raise ValueError(f"batch_size {self.batch_size} does not divide by micro_batch {self.micro_batch}")
        return self

    @property
    def accumulation(self) -> int:
        """Micro-batches an update; one as long as micro_batch is auto (setup.search resolves that first)."""
        return self.batch_size // (self.micro_batch if isinstance(self.micro_batch, int) else self.batch_size)


def with_online_batch(raw: dict[str, object]) -> dict[str, object]:
    """A raw recipe with the batch of an online stage, if none is given: a row for every completion of an update, or for
    every pair.

    Rows that packing leaves empty cost nothing where all of a micro-batch are empty, so the default is eight of them.
    """
    train = raw.get("train", {})
    if not isinstance(raw.get("rollout"), dict) or not isinstance(train, dict) or "batch_size" in train:
        return raw
    try:
        rows = RolloutSection.model_validate(raw["rollout"]).completions
    except ValidationError:
        return raw  # whose mistake is reported with those of the other sections
    stage = raw.get("stage")
    if isinstance(stage, dict) and stage.get("kind") in PAIR_STAGES:
        rows //= 2
    mesh = raw.get("mesh")
    sizes = [mesh.get(axis, 1) for axis in ("dp", "fsdp")] if isinstance(mesh, dict) else []
    split = math.prod(size for size in sizes if isinstance(size, int) and size > 0)
    micro_batch = next((rows // n for n in (8, 4, 2) if rows % n == 0 and rows // n % split == 0), rows)
    given = {key: value for key, value in train.items() if value is not None or key != "micro_batch"}
    return raw | {"train": {"batch_size": rows, "micro_batch": micro_batch, **given}}


class ComputeSection(Section):
    """How the numbers are computed. None of these changes the result beyond rounding."""

    precision: Literal["auto", "mixed", "float16", "float32", "bfloat16"] = Field(
        default="auto",
        description="mixed: bf16 compute, float32 trainables and optimizer state; bfloat16: everything bf16; "
        "float16: as mixed, with float16 and a scaled loss, for cards without bf16; auto: mixed on accelerators that "
        "have bf16, else float16, and float32 for models that overflow in it and on CPU.",
    )
    remat: Literal["auto", RematName] = Field(
        default="auto",
        description="What is recomputed in the backward pass: nothing, everything but products, or all of a layer; "
        "auto: the faster that fits.",
    )
    attention: AttentionName = declared(Compute, "attention")
    loss_chunk: PositiveInt | None = Field(
        default=None, description="Tokens of logits held at once; default: chosen by size."
    )
    mlp_chunk: PositiveInt | Literal["auto"] | None = declared(Compute, "mlp_chunk")
    attention_chunk: PositiveInt | Literal["auto"] | None = declared(Compute, "attention_chunk")
    offload: tuple[OffloadName, ...] = declared(Compute, "offload")
    expert_exchange: ExchangeName = declared(Compute, "expert_exchange")
    memory_check: bool = Field(
        default=True,
        description="Refuse a run that does not fit the memory that is free, before loading and after compiling; "
        "false: try it all the same.",
    )
    scan_layers: bool = Field(
        default=True, description="Scan over layers (compile time does not grow with depth) or unroll."
    )

    @model_validator(mode="after")
    def _offload(self) -> ComputeSection:
        if "residual" in self.offload and self.remat == "none":
            raise ValueError(
                "offload: residual moves the input of each layer to the host, and remat: none keeps all activations on "
                "the device: use remat: full or selective"
            )
        if len(set(self.offload)) < len(self.offload):
            raise ValueError("offload names something twice")
        return self


MeshSection = Annotated[MeshConfig, refuse_truth_values(MeshConfig)]
QuantizeSection = Annotated[QuantizeConfig, refuse_truth_values(QuantizeConfig)]


class TeacherSection(Section):
    """The model that stage distill learns from: frozen, in memory with the student, or behind an address."""

    path: PathText = Field(
        description="A Hugging Face directory, a hub id, or a run (RUN, RUN@best), of the student's vocabulary; or the "
        "address of a server with vLLM's completions API, such as http://localhost:8000/v1."
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit on the hub.")
    quantize: QuantizeSection | None = Field(
        default=None, description="Keep the teacher in few bits (nf4, int8, fp8 or int4); null: as it is."
    )

    model: str | None = Field(default=None, description="Of a server: the model's name; null: its only one.")
    top_k: int = Field(
        default=20, ge=1, le=1000, description="Of a server: likeliest tokens whose probabilities it is asked for."
    )
    timeout: float = Field(default=600.0, gt=0, description="Of a server: seconds for all completions of a rollout.")

    @property
    def is_server(self) -> bool:
        """Whether the teacher is behind an address, so that it takes no memory here."""
        return self.path.startswith(("http://", "https://"))

    @model_validator(mode="after")
    def _fits_place(self) -> TeacherSection:
        unread = ("revision", "quantize") if self.is_server else ("model", "top_k", "timeout")
        for key in unread:
            if getattr(self, key) != type(self).model_fields[key].default:
                kind, other = ("a server", "a model's files") if self.is_server else ("a model's files", "a server")
                raise ValueError(f"{key} is an option of {other}, and {self.path} is {kind}: leave it out")
        if self.is_server and not re.match(r"https?://[^/\s]+", self.path):
            raise ValueError(f"'{self.path}' names no server: write http://HOST:PORT/v1")
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
    """Text generated during training, to watch progress."""

    every: PositiveInt | None = Field(
        default=None, description="Steps between samples; null: only at the start and the end."
    )
    prompts: list[str | list[dict[str, str]]] = Field(
        default_factory=list,
        description="User messages (chat data) or text to continue. A message with pictures is a list of parts, such "
        'as {"type": "image", "image": FILE} and {"type": "text", "text": "What is it?"}.',
    )
    max_tokens: PositiveInt = Field(default=64, description="New tokens a sample at most.")
    temperature: float = Field(default=0.0, ge=0, description="0 is greedy.")


class LogSection(Section):
    """The logs written during training."""

    every: PositiveInt = Field(default=1, description="Steps between lines of metrics.jsonl.")
    plot_every: PositiveInt = Field(default=20, description="Steps between refreshes of loss.png.")
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = Field(
        default_factory=list, description="Also send the metrics there; each must be installed."
    )
    project: str = Field(default="meshtune", description="Project name in wandb, trackio and mlflow.")


def _check_save_interval(value: object) -> object:
    """Raises ValueError for text that is neither auto nor a time."""
    if isinstance(value, str) and value != "auto":
        try:
            check_duration(value)
        except ValueError as error:
            raise ValueError(f"{error}, nor a number of updates, nor auto") from None
    return value


def _check_address(value: str | None) -> str | None:
    """Raises ValueError for text that is no address with a protocol."""
    if value is not None and not re.fullmatch(r"[a-z0-9+]+://\S+", value):
        raise ValueError(f"'{value}' is no address such as s3://bucket/run: folders here are given as output")
    return value


class CheckpointSection(Section):
    """Run state on disk, for resuming."""

    every: Annotated[PositiveInt | str | None, BeforeValidator(_check_save_interval)] = Field(
        default=None,
        description="Between saves: a number of updates; a time such as 10m or 2h; or auto, the time that loses least "
        "to failures, by the cost of a save and by mtbf. Default: about ten saves a run. There is one at the end too.",
    )
    mtbf: Duration | None = Field(
        default=None,
        description="For every: auto, the mean time between failures of the whole job, such as 12h; null: 5.8 years "
        "divided by the number of devices.",
    )
    keep: PositiveInt = Field(default=3, description="Newest checkpoints kept.")
    keep_best: bool = Field(
        default=True,
        description="Also keep the one with the lowest validation loss, RUN@best for export, generate and the other "
        "commands.",
    )
    copy_to: Annotated[str | None, AfterValidator(_check_address)] = Field(
        default=None,
        description="Address of an object store, such as s3://bucket/run or gs://bucket/run, that every complete "
        "checkpoint is copied to during training. resume=true fetches them where the output has none or older ones.",
    )
    result: Literal["last", "best"] | None = Field(
        default=None,
        description="Which state becomes the result: the last, or the best by its validation loss; null: the best "
        "where eval.early_stopping is set, else the last.",
    )


class Recipe(Section):
    """A whole run. `meshtune schema` prints this as JSON schema; `key.sub=value` on the command line overrides."""

    model: ModelSection
    data: DataSection
    output: PathText = Field(description="Directory of the run: checkpoints, logs, plots, the final adapter or model.")
    stage: StageSection = Field(default_factory=SftConfig, description="What is learned and how it is scored.")
    teacher: TeacherSection | None = Field(default=None, description="The model that stage distill learns from.")
    rollout: RolloutSection | None = Field(
        default=None, description="Completions that online stages (grpo, rloo), and distill on policy, are trained on."
    )
    rewards: list[RewardSection] = Field(default_factory=list, description="Scores of completions; they are added up.")
    method: MethodSection = Field(default_factory=LoraOptions)
    vision: VisionSection | None = Field(
        default=None, description="Read pictures, with a model that sees; null: text only."
    )
    quantize: QuantizeSection | None = Field(
        default=None, description="Keep the frozen base in few bits (nf4, int8, fp8 or int4); null: as it is."
    )
    mesh: MeshSection | Literal["auto"] = Field(
        default="auto", description="How devices share the work; auto: what is fastest and fits (see meshtune plan)."
    )
    train: TrainSection = Field(default_factory=TrainSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerOptions)
    compute: ComputeSection = Field(default_factory=ComputeSection)
    eval: EvalSection = Field(default_factory=EvalSection)
    evaluate: EvaluateSection | None = Field(
        default=None, description="Measure the base and the result when the run has ended; null: do not."
    )
    hub: HubSection | None = Field(default=None, description="Push the result to the Hugging Face hub; null: do not.")
    sample: SampleSection = Field(default_factory=SampleSection)
    log: LogSection = Field(default_factory=LogSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    seed: int = Field(default=0, ge=0, lt=2**31, description="Seed of data order, initialisation and dropout.")
    resume: bool = Field(default=False, description="Go on from the newest checkpoint in output, if there is one.")
    overwrite: bool = Field(
        default=False, description="Start anew although output is not empty; the old run is moved aside."
    )

    accept_changes: bool = Field(
        default=False,
        description="With resume: go on although keys have changed that change what is learned, such as the learning "
        "rate after a loss that was not finite.",
    )

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, value: object) -> object:
        return with_online_batch(written_out(value)) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _check_sections_together(self) -> Recipe:
        check_together(self)
        return self
