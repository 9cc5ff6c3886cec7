"""The sections of a recipe: model, data, method, stage, optimizer, evaluation and hub."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveInt, field_validator, model_validator

from meshtune.adapters.config import ExpandConfig, FreezeConfig, FullConfig, LoraOptions
from meshtune.config.data_options import GYM, FormatName, LossPolicy, Overlong, Reasoning, SourceOptions, TokenOptions
from meshtune.config.rewards import rewards_written_out
from meshtune.config.section import PathText, Section, declared, refuse_truth_values
from meshtune.objectives.config import (
    CpoConfig,
    DistillConfig,
    DpoConfig,
    GrpoConfig,
    KtoConfig,
    OnlineDpoConfig,
    OrpoConfig,
    PpoConfig,
    PtConfig,
    RlooConfig,
    RmConfig,
    SftConfig,
    SimpoConfig,
)
from meshtune.optim.config import OptimizerOptions


class ModelSection(Section):
    """The model to start from."""

    path: PathText = Field(
        description="A Hugging Face directory or a hub id, such as HuggingFaceTB/SmolLM2-135M-Instruct."
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit on the hub.")
    load: Literal["direct", "broadcast", "replica"] = Field(
        default="direct",
        description="direct: every process reads what its devices hold. For slow shared storage: broadcast, one "
        "process a host reads for all, or replica, one replica of mesh.dp reads for the others, checkpoints too.",
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


# Stages known by names of their own, and the options of a stage that they stand for.
STAGE_PRESETS: dict[str, dict[str, object]] = {
    "dr_grpo": {"kind": "grpo", "loss": "dr_grpo", "scale": "none"},
    "dapo": {"kind": "grpo", "loss": "dapo", "epsilon_high": 0.28},
    "gspo": {"kind": "grpo", "loss": "grpo", "ratio": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "reinforce++": {"kind": "grpo", "loss": "dapo", "baseline": "none", "scale": "tokens"},
}


def written_out(raw: Mapping[str, object]) -> dict[str, object]:
    """A copy of a recipe's raw mapping with its short forms written out.

    `model: PATH` is `model: {path: PATH}`, and so is `teacher: PATH`; `method: full` is `method: {kind: full}`, and a
    method without a kind is lora; `stage: dpo` is `stage: {kind: dpo}`, a stage without a kind is sft, and one of the
    kind gspo, or of another of STAGE_PRESETS, has the preset's options where it gives none; `quantize: nf4` is
    `quantize: {format: nf4}`; `data: PATH` is `data: {train: PATH}`; a path or a single source becomes a list of
    mappings; tasks of reasoning-gym bring their reward. The short forms of `rewards` are in config.rewards.
    """
    raw = {key: _copy(value) for key, value in raw.items()}
    for key in ("model", "teacher"):
        if isinstance(raw.get(key), str):
            raw[key] = {"path": raw[key]}
    for key, default in (("method", "lora"), ("stage", "sft")):
        value = raw.get(key)
        if isinstance(value, str):
            raw[key] = {"kind": value}
        elif isinstance(value, dict) and "kind" not in value:
            raw[key] = {"kind": default, **value}
    if isinstance(stage := raw.get("stage"), dict) and (preset := STAGE_PRESETS.get(str(stage["kind"]))):
        raw["stage"] = {**preset, **stage, "kind": preset["kind"]}
    if "rewards" in raw:
        raw["rewards"] = rewards_written_out(raw["rewards"])
    for section in (raw, raw.get("teacher")):
        if isinstance(section, dict) and isinstance(section.get("quantize"), str):
            section["quantize"] = {"format": section["quantize"]}
    if isinstance(raw.get("data"), str | list):
        raw["data"] = {"train": raw["data"]}
    if isinstance(data := raw.get("data"), dict):
        for key in ("train", "validation"):
            if key in data:
                data[key] = sources(data[key])
        _complete_gym(raw, data)
    return raw


def _complete_gym(raw: dict[str, object], data: Mapping[str, Any]) -> None:
    """Adds what `data` with tasks of reasoning-gym leave out: their reward, and another seed for validation."""
    gym = {
        key: [entry for entry in data.get(key) or () if isinstance(entry, dict) and is_gym(entry.get("path"))]
        for key in ("train", "validation")
        if isinstance(data.get(key), list)
    }
    for entry in gym.get("validation", ()):
        options = entry.get("options", {})
        if isinstance(options, dict):
            entry["options"] = {"seed": 1, **options}
    if gym.get("train") and "rollout" in raw and not raw.get("rewards"):
        raw["rewards"] = [{"kind": "reasoning_gym"}]


def is_gym(path: object) -> bool:
    """Whether the path of a source names a task of reasoning-gym."""
    return isinstance(path, str) and path.startswith(GYM)


def sources(value: object) -> object:
    """A path, a mapping, or a list of either, as a list of mappings; anything else unchanged."""
    if isinstance(value, str | dict):
        value = [value]
    if isinstance(value, list):
        return [{"path": entry} if isinstance(entry, str) else entry for entry in value]
    return value


def _copy(value: object) -> object:
    """Fresh containers, so that an override never writes into what the caller gave."""
    if isinstance(value, dict):
        return {key: _copy(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(entry) for entry in value]
    return value


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
    options: dict[str, Any] = declared(SourceOptions, "options")

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
    prepared: str | None = Field(
        default=None,
        description="A folder for prepared data: s3://, gs://, file:// and so on. meshtune data prepare uploads them, "
        "runs open them there.",
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


class VisionSection(Section):
    """Pictures, for models that see. With this section (vision: {} is enough) the pictures of records are read."""

    train: list[Literal["projector", "tower"]] = Field(
        default_factory=list,
        description="Parts trained in full beside what method trains in the language model; default: neither.",
    )
    freeze_language: bool = Field(default=False, description="Train nothing of the language model.")
    max_pixels: PositiveInt | None = Field(
        default=None,
        description="Pixels of a picture at most; a larger one is scaled down before the model's own resize, its "
        "aspect kept. Fewer pixels are fewer tokens, where a model's tokens depend on the size.",
    )
    min_pixels: PositiveInt | None = Field(
        default=None, description="Pixels of a picture at least; a smaller one is scaled up."
    )
    crops: PositiveInt | None = Field(
        default=None,
        description="Tiles that a picture is cut into at most, of models that cut (each costs the tokens of a "
        "picture); 1: none; null: the model's own number.",
    )
    max_patches: PositiveInt | None = Field(
        default=None, description="Patches of pictures in a row at most; null: enough for nearly all rows of the data."
    )
    media_dir: PathText | None = Field(
        default=None, description="Folder that paths of pictures are below; null: that of the data file."
    )

    @model_validator(mode="after")
    def _check_limits(self) -> VisionSection:
        if self.max_pixels is not None and self.min_pixels is not None and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} must not be above max_pixels {self.max_pixels}")
        return self


class RolloutSection(Section):
    """Completions that an online stage generates from the weights it trains, and the updates made of them."""

    prompts: PositiveInt = Field(default=4, description="Prompts in a rollout.")
    samples: PositiveInt = Field(default=8, description="Completions of every prompt, which are compared.")
    updates: PositiveInt = Field(
        default=1, description="Optimizer updates that share a rollout, each with its part of the prompts."
    )
    iterations: PositiveInt = Field(default=1, description="Times that these updates are repeated on one rollout.")
    max_tokens: PositiveInt = Field(default=256, description="Tokens of a completion at most.")
    temperature: float = Field(default=1.0, gt=0, le=100, description="Divides the logits, in the loss too.")
    top_k: int = Field(default=0, ge=0, description="Draw from the k likeliest tokens only; 0: from all.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Draw from the likeliest tokens up to this probability.")
    min_p: float = Field(
        default=0.0, ge=0, le=1, description="Draw from tokens this likely, relative to the likeliest."
    )
    correction: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None = Field(
        default=None,
        description="Multiply the policy's loss by p(trained) / p(sampled) of tokens or completions; beyond its bounds "
        "truncate: the bound, mask: 0. null: no correction, as the sampler has the trained weights.",
    )
    correction_min: float | None = Field(default=None, ge=0, description="Lower bound of the correction.")
    correction_max: float | None = Field(default=3.0, gt=0, description="Upper bound of the correction.")
    environment: str | dict[str, str] | None = Field(
        default=None,
        description='A class "file.py:Class" whose methods are tools that completions call, or several, by the names '
        "in the records' field `environment`.",
    )
    max_turns: PositiveInt | None = Field(
        default=None, description="Turns that may call tools; null: as many as max_tokens has room for."
    )
    tool_timeout: float = Field(default=60.0, gt=0, description="Seconds for the tool calls of a turn.")
    shared_prompts: bool | None = Field(
        default=None,
        description="Compute a prompt once for all of its completions in training; null: where the model allows it.",
    )
    rows: PositiveInt | None = Field(
        default=None, description="Completions decoded at once; default: as many as are expected to fit."
    )
    replicas: bool = Field(
        default=False, description="Let `meshtune serve-rollouts` processes, any number of them, generate completions."
    )
    eval_samples: PositiveInt = Field(default=1, description="Completions of every validation prompt, in evaluations.")
    keep: PositiveInt | None = Field(
        default=None, description="Newest rollouts kept on disk; default: those that a checkpoint may need."
    )

    @model_validator(mode="after")
    def _check_split(self) -> RolloutSection:
        if self.prompts % self.updates:
            raise ValueError(f"prompts {self.prompts} cannot be divided into {self.updates} updates")
        lower, upper = self.correction_min, self.correction_max
        if lower is not None and upper is not None and lower >= upper:
            raise ValueError(f"correction_min {lower} must be below correction_max {upper}")
        if self.correction is not None and self.correction.endswith("truncate") and lower is None and upper is None:
            raise ValueError(f"correction {self.correction} has no bound: give correction_max, such as 3.0")
        if self.replicas and self.environment is not None:
            raise ValueError("replicas call no tools, which environment has: leave one of the two out")
        if self.max_turns is not None and self.environment is None:
            raise ValueError("max_turns needs environment: without one a completion has a single turn")
        return self

    @property
    def completions(self) -> int:
        """Completions of one update."""
        return self.prompts * self.samples // self.updates


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
NOT_IN_BACKWARD = {
    "badam": "it computes the gradient of one layer only in any case",
    "prodigy": "it estimates its rate from the gradients of all parameters together",
    "sophia": "it estimates the curvature of all parameters at once",
}
ONE_RATE = {
    "badam": "badam trains whole layers of the language model in turns",
    "prodigy": "prodigy estimates one rate for all parameters",
    "sophia": "sophia has one rate for all parameters",
}


def check_all_read(options: OptimizerOptions) -> OptimizerOptions:
    """Raises ValueError for a setting that the chosen optimizer or schedule would ignore."""
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    if options.warmup_steps is not None and options.warmup_ratio != defaults["warmup_ratio"]:
        raise ValueError("give warmup_ratio or warmup_steps, not both")
    readers_of = {name: (options.name, readers) for name, readers in READERS.items()}
    for name, (chosen, readers) in (readers_of | {"decay_ratio": (options.schedule, ("wsd",))}).items():
        value = getattr(options, name)
        is_default = value == defaults[name] or (name == "momentum" and value == 0)
        if not is_default and chosen not in readers:
            names = " and ".join(filter(None, (", ".join(readers[:-1]), readers[-1])))
            raise ValueError(f"{name} is read by {names} alone, and {chosen} was chosen: leave {name} out")
    return options


def check_possible(options: OptimizerOptions) -> OptimizerOptions:
    """Raises ValueError for options that contradict each other."""
    if options.name == "schedule_free":
        if options.schedule != "constant":
            raise ValueError(
                "schedule_free averages weights instead of decaying the learning rate, and schedule is "
                f"{options.schedule}: use schedule: constant (a warm-up is fine)"
            )
        if options.beta1 == 0:
            raise ValueError("schedule_free interpolates with beta1 between average and iterate: it must be above 0")
    if options.lora_plus_embedding_rate is not None and options.lora_plus_ratio is None:
        raise ValueError("lora_plus_embedding_rate is a part of LoRA+: give lora_plus_ratio too, or leave it out")
    for name in options.own_rates if options.name in ONE_RATE else ():
        raise ValueError(
            f"{name} gives some parameters their own rate, and {ONE_RATE[options.name]}: use adamw with it, or leave "
            f"{name} out"
        )
    if options.in_backward and options.name in NOT_IN_BACKWARD:
        raise ValueError(
            f"in_backward updates a layer as soon as its gradient is computed, which {options.name} cannot: "
            f"{NOT_IN_BACKWARD[options.name]}; leave in_backward out, or use adamw8bit, adafactor or sgd with it"
        )
    if options.in_backward and options.max_grad_norm is not None:
        raise ValueError(
            "max_grad_norm clips by the norm of all gradients, and with in_backward the first is used before the last "
            "is known: set max_grad_norm: null with in_backward (adafactor clips each update by its own size "
            "instead), or leave in_backward out"
        )
    return options


OptimizerSection = Annotated[
    OptimizerOptions,
    refuse_truth_values(OptimizerOptions),
    AfterValidator(check_all_read),
    AfterValidator(check_possible),
]


METHODS = (LoraOptions, FullConfig, FreezeConfig, ExpandConfig)
MethodSection = Annotated[
    Annotated[LoraOptions, refuse_truth_values(LoraOptions)]
    | Annotated[FullConfig, refuse_truth_values(FullConfig)]
    | Annotated[FreezeConfig, refuse_truth_values(FreezeConfig)]
    | Annotated[ExpandConfig, refuse_truth_values(ExpandConfig)],
    Field(discriminator="kind"),
]


Reference = Annotated[
    PathText,
    Field(
        description="What answers are compared with; auto: the base with its adapters off where that is the start, "
        "else cached; base: adapters off; cached: the start's log-probabilities, computed once and kept on disk; or "
        "another model, a directory or hub id, whose log-probabilities are cached."
    ),
]


@dataclasses.dataclass(frozen=True)
class DpoStage(DpoConfig):
    """Direct preference optimisation, from pairs and a reference."""

    reference: Reference = "auto"


@dataclasses.dataclass(frozen=True)
class KtoStage(KtoConfig):
    """Kahneman-Tversky optimisation, from answers labelled good or bad and a reference."""

    reference: Reference = "auto"


STAGES = (
    SftConfig,
    PtConfig,
    RmConfig,
    DpoStage,
    OrpoConfig,
    SimpoConfig,
    CpoConfig,
    KtoStage,
    DistillConfig,
    GrpoConfig,
    RlooConfig,
    OnlineDpoConfig,
    PpoConfig,
)
StageSection = Annotated[
    Annotated[SftConfig, refuse_truth_values(SftConfig)]
    | Annotated[PtConfig, refuse_truth_values(PtConfig)]
    | Annotated[RmConfig, refuse_truth_values(RmConfig)]
    | Annotated[DpoStage, refuse_truth_values(DpoStage)]
    | Annotated[OrpoConfig, refuse_truth_values(OrpoConfig)]
    | Annotated[SimpoConfig, refuse_truth_values(SimpoConfig)]
    | Annotated[CpoConfig, refuse_truth_values(CpoConfig)]
    | Annotated[KtoStage, refuse_truth_values(KtoStage)]
    | Annotated[DistillConfig, refuse_truth_values(DistillConfig)]
    | Annotated[GrpoConfig, refuse_truth_values(GrpoConfig)]
    | Annotated[RlooConfig, refuse_truth_values(RlooConfig)]
    | Annotated[OnlineDpoConfig, refuse_truth_values(OnlineDpoConfig)]
    | Annotated[PpoConfig, refuse_truth_values(PpoConfig)],
    Field(discriminator="kind"),
]


class EvaluateSection(Section):
    """An evaluation at the end of a run, of the base and of what the run made: `meshtune eval RUN --compare base`."""

    tasks: dict[str, PathText | None] = Field(
        default_factory=dict,
        description="Tasks with the path of their files, {mmlu: data/mmlu}; null: a task of lm-eval's hub or cache.",
    )
    held_out: bool = Field(default=True, description="Also the records of data.validation: loss, answers, metrics.")
    prompts: Literal["plain", "chat"] = Field(
        default="plain", description="chat: the tasks' prompts in the chat template, examples as turns."
    )
    num_fewshot: int | None = Field(default=None, ge=0, description="Examples shown; null: the task's own.")
    most_samples: PositiveInt | None = Field(
        default=None, description="Only the first examples of a task, and records, at most this many."
    )
    new_tokens: PositiveInt | None = Field(
        default=None, description="Tokens of an answer to a record, at most; null: 512."
    )
    metrics: list[str] = Field(
        default=["exact_match", "f1", "chrf", "rouge"], description="Of answers; see meshtune predict."
    )


class HubSection(Section):
    """Push the result to the hub when the run has ended, as `meshtune push` does, and on the way at its saves."""

    repository: str = Field(description="user/name or organisation/name; made if it does not exist.")
    public: bool = Field(default=False, description="Everybody may see it.")
    merge: bool = Field(default=False, description="Push the adapter merged into its base, at the end.")
    base_model: str | None = Field(default=None, description="The base's id on the hub, if its folder does not say it.")
    overwrite: bool = Field(default=False, description="Also into a repository with other files; they stay.")
    every: PositiveInt | None = Field(
        default=None, description="Saves between pushes of the result as it is by then; null: at the end only."
    )
