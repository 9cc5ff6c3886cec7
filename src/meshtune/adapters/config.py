"""The training methods, as plain data: which parameters a run trains."""

from __future__ import annotations

import dataclasses
import math

from meshtune.errors import UserError

ALL_LINEAR = "all-linear"


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters beside frozen weights (https://arxiv.org/abs/2106.09685).

    `targets` is 'all-linear' (every matrix of the layers), or module names and patterns, as are `train_modules`, the
    modules trained in full beside the adapters. `adapter` is a key of `meshtune.adapters.ADAPTERS`; options that start
    with a type's name are for that type, `svd_iterations` (None: an exact decomposition) for pissa and loftq. `ranks`
    and `alphas` list single Hugging Face modules whose rank or alpha differs. `token_rows` are the rows of the
    embedding, and of an untied head, that are trained where the whole matrix is not. `continued` is the path of the
    adapter that training resumes from.
    Raises UserError for an invalid rank, alpha or dropout.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: str | tuple[str, ...] = ALL_LINEAR
    rslora: bool = False
    train_modules: tuple[str, ...] = ()
    adapter: str = "lora"
    svd_iterations: int | None = 16
    pissa_convert: bool = True
    loftq_iterations: int = 1
    loftq_calibration: int = 0
    oft_block_size: int = 32
    oft_cayley_terms: int | None = 5
    vera_key: int = 0
    vera_d_initial: float = 0.1
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
class FullConfig:
    """Every weight is trained, but for the routers of experts, which `train_router` adds."""

    train_router: bool = False


@dataclasses.dataclass(frozen=True)
class FreezeConfig:
    """Trains the last or first n layers in full, or named modules, or named modules within those layers.

    The routers of experts stay as they are, unless they are named.
    """

    last_layers: int | None = None
    first_layers: int | None = None
    modules: tuple[str, ...] = ()

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


@dataclasses.dataclass(frozen=True)
class ExpandConfig:
    """Trains the `blocks` new layers of an expanded model (families.expansion) in full."""

    blocks: int


Method = LoraConfig | FullConfig | FreezeConfig | ExpandConfig
