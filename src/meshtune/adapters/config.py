"""The training methods, which recipes read too: which parameters a run trains, and what follows from that."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from meshtune.adapters.training_method import Method, Modules, Selection
from meshtune.errors import UserError
from meshtune.options import option

ALL_LINEAR = "all-linear"
AdapterName = Literal["lora", "dora", "pissa", "loftq", "oft", "vera"]  # the keys of ADAPTERS


@dataclasses.dataclass(frozen=True)
class LoraOptions(Method):
    """Adapters on frozen weights: LoRA (https://arxiv.org/abs/2106.09685) and its variants (docs/adapters.md)."""

    kind: Literal["lora"] = option("lora", "Which method: lora, full, freeze or llama_pro.")
    adapter: AdapterName = option(
        "lora",
        "Which kind of adapter; rank, alpha, rslora and dropout are not of every kind.",
    )
    rank: int = option(8, "R, the adapters' inner dimension.", gt=0)
    alpha: float = option(16.0, "Adapters are scaled by alpha / rank (rslora: alpha / sqrt(rank)).", gt=0)
    dropout: float = option(0.0, "Dropout on the adapters' input while training.", ge=0, lt=1)
    targets: str | tuple[str, ...] = option(
        ALL_LINEAR,
        "'all-linear' (every linear layer but the head), module names (q_proj), or patterns (layers.*.mlp.*).",
    )
    rslora: bool = option(False, "Rank-stabilised scaling (https://arxiv.org/abs/2312.03732).")
    train_modules: tuple[str, ...] = option(
        (), "Modules trained in full beside the adapters, e.g. embed_tokens, lm_head."
    )
    svd_iterations: int | None = option(
        16, "pissa, loftq: iterations of a randomised decomposition; null: an exact one, slow.", gt=0
    )
    pissa_convert: bool = option(
        True,
        "pissa: write a plain LoRA of twice the rank for the base as it is; false: PEFT's own form, whose base PEFT "
        "decomposes again when it loads it (needs svd_iterations: null).",
    )
    loftq_iterations: int = option(
        1, "loftq: alternations of quantising and decomposing; above 1 the run keeps its own base in base/.", gt=0
    )
    loftq_calibration: int = option(
        0,
        "loftq: rows of the training data on which the inputs of every weight are measured first, so that errors at "
        "large inputs count more; 0: all alike.",
        ge=0,
    )
    oft_block_size: int = option(
        32, "oft: neighbouring inputs that turn together; must divide the inputs of every target.", gt=0
    )
    oft_cayley_terms: int | None = option(
        5, "oft: terms of the series for the rotation, as PEFT's; null: the exact transform.", gt=0
    )
    vera_key: int = option(0, "vera: the seed of its random projections, PEFT's for the same.", ge=0)
    vera_d_initial: float = option(0.1, "vera: initial value of the trained vector d.")

    def resolved(self) -> LoraConfig:
        return LoraConfig(**vars(self))

    @property
    def adapters(self) -> LoraConfig:
        return self.resolved()

    @property
    def trains_base(self) -> bool:
        return False

    @property
    def trains_token_rows(self) -> bool:
        return True

    @property
    def draws(self) -> bool:
        return self.dropout > 0

    @property
    def changes_base(self) -> bool:
        return self.adapter == "loftq" and self.loftq_iterations > 1

    @property
    def calibration_rows(self) -> int:
        return self.loftq_calibration


@dataclasses.dataclass(frozen=True)
class LoraConfig(LoraOptions):
    """The options of a run's adapters, with what its base and the adapter it continues decide.

    `ranks` and `alphas` list single Hugging Face modules whose rank or alpha differs. `token_rows` are the rows of the
    embedding, and of an untied head, that are trained where the whole matrix is not. `continued` is the path of the
    adapter that training resumes from.
    Raises UserError for an invalid rank, alpha or dropout.
    """

    ranks: tuple[tuple[str, int], ...] = ()
    alphas: tuple[tuple[str, float], ...] = ()
    token_rows: tuple[int, ...] = ()
    continued: str | None = None

    def __post_init__(self):
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise UserError(
                f"the adapters' rank is {self.rank!r}", where="method.rank", fix="give a whole number from 1, such as 8"
            )
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise UserError(
                f"the adapters' alpha is {self.alpha!r}", where="method.alpha", fix="give a number above 0, such as 16"
            )
        if not 0 <= self.dropout < 1:
            raise UserError(
                f"the adapters' dropout is {self.dropout!r}", where="method.dropout", fix="give a number in [0, 1)"
            )
        if not isinstance(self.targets, str):
            object.__setattr__(self, "targets", tuple(self.targets))
        object.__setattr__(self, "train_modules", tuple(self.train_modules))

    def resolved(self) -> LoraConfig:
        return self

    def choose(self, modules: Modules) -> Selection:
        """Raises UserError for targets that cannot have adapters, and for modules that are chosen twice."""
        adapted = modules.adapted(self)
        trained = modules.with_score(modules.named(self.train_modules, "method.train_modules"))
        modules.check_disjoint(adapted, trained)
        return Selection({name: self.of(name) for name in adapted}, trained)

    def with_token_rows(self, rows: tuple[int, ...]) -> LoraConfig:
        return dataclasses.replace(self, token_rows=rows)

    @property
    def resumes(self) -> str | None:
        return self.continued

    @property
    def reference_obstacle(self) -> str | None:
        if self.continued is not None:
            return "the run goes on with an adapter"
        if self.token_rows:
            return "rows of the embedding are trained themselves"
        if self.train_modules:
            return f"{', '.join(self.train_modules)} are trained in full"
        return "loftq's adapters begin at what quantising lost" if self.adapter == "loftq" else None

    @property
    def description(self) -> str:
        """The type of adapter and its size, such as 'lora, rank 8, alpha 16'."""
        if self.adapter == "oft":
            return f"oft, blocks of {self.oft_block_size}"
        return f"{self.adapter}, rank {self.rank}" + (f", alpha {self.alpha:g}" if self.adapter != "vera" else "")

    def scale(self, rank: int | None = None, alpha: float | None = None) -> float:
        """The factor of B @ A: alpha / rank, or alpha / sqrt(rank) (https://arxiv.org/abs/2312.03732)."""
        rank, alpha = rank or self.rank, self.alpha if alpha is None else alpha
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def of(self, name: str) -> LoraConfig:
        """The config with the rank and alpha of one Hugging Face module."""
        ranks, alphas = dict(self.ranks), dict(self.alphas)
        if name not in ranks and name not in alphas:
            return self
        return dataclasses.replace(self, rank=ranks.get(name, self.rank), alpha=alphas.get(name, self.alpha))


@dataclasses.dataclass(frozen=True)
class FullConfig(Method):
    """Every weight is trained, but for the routers of experts."""

    kind: Literal["full"] = "full"
    train_router: bool = option(
        False, "Train the routers of a mixture of experts too, which otherwise stay as they are."
    )

    def choose(self, modules: Modules) -> Selection:
        return Selection({}, modules.every(routers=self.train_router))

    @property
    def trains_token_rows(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class FreezeConfig(Method):
    """Some layers or modules are trained in full, the rest is frozen. Routers of experts are frozen unless named."""

    kind: Literal["freeze"] = "freeze"
    last_layers: int | None = option(None, "Train the last n decoder layers.", gt=0)
    first_layers: int | None = option(None, "Train the first n decoder layers.", gt=0)
    modules: tuple[str, ...] = option(
        (),
        "Names or patterns: within the chosen layers if some are chosen, else in all; also embed_tokens, norm, "
        "lm_head.",
    )

    def __post_init__(self):
        object.__setattr__(self, "modules", tuple(self.modules))
        if self.last_layers is not None and self.first_layers is not None:
            raise UserError("freeze has both last_layers and first_layers", where="method", fix="give one of the two")
        for name, n in (("last_layers", self.last_layers), ("first_layers", self.first_layers)):
            if n is not None and n < 1:
                raise UserError(f"{name} is {n}", where=f"method.{name}", fix="give a whole number from 1")
        if not (self.last_layers or self.first_layers or self.modules):
            raise UserError(
                "freeze without last_layers, first_layers or modules trains nothing",
                where="method",
                fix="give at least one of the three, or use method: full",
            )

    def choose(self, modules: Modules) -> Selection:
        return Selection({}, modules.with_score(modules.of_layers(self.first_layers, self.last_layers, self.modules)))

    @property
    def trains_token_rows(self) -> bool:
        return any("embed_tokens" in name for name in self.modules)


@dataclasses.dataclass(frozen=True)
class ExpandConfig(Method):
    """New layers between those of the model, which stay frozen (https://arxiv.org/abs/2401.02415)."""

    kind: Literal["llama_pro"] = "llama_pro"
    blocks: int = option(
        8, "New layers, spread evenly; they begin as copies that add nothing, and they alone are trained.", gt=0
    )

    def choose(self, modules: Modules) -> Selection:
        return Selection({}, modules.with_score(modules.of_new_layers(self.blocks)))

    @property
    def trains_base(self) -> bool:
        return False

    @property
    def added_layers(self) -> int:
        return self.blocks
