"""Combines adapters into one: sums, concatenations, singular values, and sparse merges.

The methods, and what each does to factors A [R, in] and B [out, R] of an update scale * B A, are those of peft's
add_weighted_adapter (https://huggingface.co/docs/peft/developer_guides/model_merging): TIES
(https://arxiv.org/abs/2306.01708), DARE (https://arxiv.org/abs/2311.03099).
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float
from safetensors.numpy import save_file

from meshtune.adapters.peft_config import PeftConfig, read_config
from meshtune.adapters.peft_format import CONFIG, WEIGHTS, BaseRecord, open_tensors, read_fields, record_of
from meshtune.adapters.peft_tensors import PREFIX
from meshtune.errors import UserError, nearest
from meshtune.weights.ends import GENERATION, read_ends
from meshtune.weights.export import write_generation
from meshtune.weights.publish import disk_errors, publish_directory

# What is kept of every adapter before they are added, and how they are added.
PARTS: dict[str, tuple[Literal["all", "largest", "random"], Literal["sum", "majority"]]] = {
    "linear": ("all", "sum"),
    "magnitude_prune": ("largest", "sum"),
    "ties": ("largest", "majority"),
    "dare_linear": ("random", "sum"),
    "dare_ties": ("random", "majority"),
}
METHODS = (
    "cat",
    "svd",
    "linear",
    *(name for name in PARTS if name != "linear"),
    *(f"{name}_svd" for name in PARTS if name != "linear"),
)


@dataclasses.dataclass(frozen=True)
class Factors:
    """An adapter's update of one weight: scale * b a."""

    a: Float[np.ndarray, "r i"]
    b: Float[np.ndarray, "o r"]
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def update(self) -> Float[np.ndarray, "o i"]:
        """The whole update, float32."""
        return (self.b.astype(np.float32) @ self.a.astype(np.float32)) * np.float32(self.scale)


def keeps_factors(method: str) -> bool:
    """Whether a method adds A to A and B to B, so that ranks must be equal."""
    return method in PARTS


def prunes(method: str) -> bool:
    """Whether a method keeps a part of every adapter only, and so needs a density."""
    return PARTS.get(method.removesuffix("_svd"), ("all",))[0] != "all"


def combine_factors(
    parts: Sequence[Factors],
    weights: Sequence[float],
    method: str,
    rank: int,
    *,
    density: float = 1.0,
    majority: Literal["total", "frequency"] = "total",
    draw: np.random.Generator | None = None,
) -> tuple[Float[np.ndarray, "r i"], Float[np.ndarray, "o r"]]:
    """(A, B) of rank `rank` whose product B A, with scale 1, is the weighted combination of some updates, in float32.

    cat is exact and its rank the sum of all; svd is the best approximation of the sum at `rank`; the others are rough:
    with `_svd` they work on whole updates, without on A and B by themselves.
    """
    if method == "cat":
        a = np.concatenate([_wide(part.a) * np.float32(w * part.scale) for part, w in zip(parts, weights, strict=True)])
        b = np.concatenate([_wide(part.b) for part in parts], axis=1)
        return _pad_rank(a, b, rank)
    if method == "svd":
        return _best(parts, weights, rank)
    if method.endswith("_svd"):
        update = _mix_arrays(
            [part.update for part in parts], weights, method.removesuffix("_svd"), density, majority, draw
        )
        return _split(np.linalg.svd(update.astype(np.float64), full_matrices=False), rank)
    # The root of each weight on either side; its sign on one.
    scales = [w * part.scale for part, w in zip(parts, weights, strict=True)]
    of_b = [math.sqrt(abs(w)) for w in scales]
    of_a = [math.copysign(root, w) for root, w in zip(of_b, scales, strict=True)]
    a = _mix_arrays([_wide(part.a) for part in parts], of_a, method, density, majority, draw)
    b = _mix_arrays([_wide(part.b) for part in parts], of_b, method, density, majority, draw)
    return _pad_rank(a, b, rank)


def _best(parts: Sequence[Factors], weights: Sequence[float], rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The sum's truncated singular value decomposition, from that of the small matrix between two orthonormal bases:
    the sum itself, [out, in], is never made."""
    a = np.concatenate([part.a.astype(np.float64) for part in parts])
    b = np.concatenate(
        [part.b.astype(np.float64) * (w * part.scale) for part, w in zip(parts, weights, strict=True)], axis=1
    )
    left, upper = np.linalg.qr(b)
    right, lower = np.linalg.qr(a.T)
    u, s, v = np.linalg.svd(upper @ lower.T)
    return _split((left @ u, s, v @ right.T), rank)


def _split(decomposed: tuple[np.ndarray, np.ndarray, np.ndarray], rank: int) -> tuple[np.ndarray, np.ndarray]:
    u, s, v = decomposed
    a, b = v[:rank].astype(np.float32), (u[:, :rank] * s[:rank]).astype(np.float32)
    return _pad_rank(a, b, rank)


def _pad_rank(a: np.ndarray, b: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    missing = rank - a.shape[0]
    return np.pad(a, ((0, missing), (0, 0))), np.pad(b, ((0, 0), (0, missing)))


def _mix_arrays(
    arrays: list[np.ndarray],
    weights: Sequence[float],
    method: str,
    density: float,
    majority: str,
    draw: np.random.Generator | None,
) -> np.ndarray:
    pruning, sum_rule = PARTS[method]
    if pruning == "largest" and density < 1:
        arrays = [_largest(array, density) for array in arrays]
    elif pruning == "random" and density < 1:
        assert draw is not None, "what is dropped at random needs a source of random numbers"
        arrays = [array * (draw.random(array.shape) < density) / np.float32(density) for array in arrays]
    stack = np.stack(arrays)
    scaled = stack * np.asarray(weights, np.float32)[:, None, None]
    if sum_rule == "sum":
        return scaled.sum(axis=0, dtype=np.float32)
    votes = stack.sum(axis=0) if majority == "total" else np.sign(stack).sum(axis=0)
    agreeing = np.sign(stack) == np.where(votes >= 0, 1, -1)
    return (scaled * agreeing).sum(axis=0, dtype=np.float32) / np.maximum(agreeing.sum(axis=0), 1).astype(np.float32)


def _largest(array: np.ndarray, density: float) -> np.ndarray:
    """The array with all but its largest numbers, the share `density` of them, set to zero."""
    count = int(density * array.size)
    pruned = np.zeros(array.size, array.dtype)
    chosen = np.argpartition(np.abs(array).ravel(), array.size - count)[array.size - count :] if count else []
    pruned[chosen] = array.ravel()[chosen]
    return pruned.reshape(array.shape)


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32)


A, B = ".lora_A.weight", ".lora_B.weight"


@dataclasses.dataclass(frozen=True)
class Combined:
    """The combined adapter: its directory, its rank and the number of modules it adapts."""

    path: pathlib.Path
    rank: int
    modules: int


@dataclasses.dataclass(frozen=True)
class _Adapter:
    path: pathlib.Path
    peft: PeftConfig
    base: BaseRecord
    factors: dict[str, Factors]
    hash: str


def combine(
    sources: Sequence[str | os.PathLike[str]],
    dest: str | os.PathLike[str],
    weights: Sequence[float],
    method: str = "svd",
    *,
    rank: int | None = None,
    density: float | None = None,
    majority: Literal["total", "frequency"] = "total",
    seed: int = 0,
    any_base: bool = False,
    finish: Callable[[pathlib.Path], object] = lambda directory: None,
) -> Combined:
    """Writes to `dest` the combination of adapter directories by one of `weighted.METHODS`.

    A module that only some adapters adapt is combined from those. The rank of the result is the sum of all ranks (cat),
    `rank` or the largest one (svd and methods ending in it), or the rank that all have; its file records its sources.
    `density` is the share of numbers kept by methods that prune; `seed` seeds dare's random choice. The base model is
    not needed. `finish` is called with the directory of the result before it gets its name.

    Raises UserError for adapters that are not LoRA, modules trained in full, different bases (unless `any_base`), ranks
    that a method cannot add, and options that the method does not use.
    """
    paths = [pathlib.Path(source).expanduser() for source in sources]
    dest = pathlib.Path(dest).expanduser()
    _check(paths, dest, weights, method, rank, density)
    adapters = [_read(path) for path in paths]
    if not any_base:
        _same_base(adapters)
    made_rank = _rank(adapters, method, rank)
    modules = list(dict.fromkeys(name for adapter in adapters for name in adapter.factors))
    draw = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for name in modules:
        adapting = [
            (adapter.factors[name], weight)
            for adapter, weight in zip(adapters, weights, strict=True)
            if name in adapter.factors
        ]
        parts, shares = zip(*adapting, strict=True)
        _same_shape(name, parts)
        options = {"density": 1.0 if density is None else density, "majority": majority, "draw": draw}
        a, b = combine_factors(parts, shares, method, made_rank, **options)
        dtype = parts[0].a.dtype
        tensors[f"{PREFIX}{name}{A}"], tensors[f"{PREFIX}{name}{B}"] = a.astype(dtype), b.astype(dtype)
    fields = _fields(adapters, modules, made_rank)
    how = {"method": method, "density": density, "majority": majority if "ties" in method else None}
    how |= {"seed": seed if method.startswith("dare") else None}
    record = {
        "base": {name: value for name, value in dataclasses.asdict(adapters[0].base).items() if value is not None},
        "rank": made_rank,
        "alpha": made_rank,
        "targets": fields["target_modules"],
        "version": importlib.metadata.version("meshtune"),
        "combined": {
            **{name: value for name, value in how.items() if value is not None},
            "of": [
                {"path": str(adapter.path), "hash": adapter.hash, "weight": weight}
                for adapter, weight in zip(adapters, weights, strict=True)
            ],
        },
    }
    with publish_directory(dest, CONFIG) as partial, disk_errors(dest):
        save_file(tensors, partial / WEIGHTS, {"format": "pt", "meshtune": json.dumps(record)})
        (partial / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        for pattern in ("tokenizer*", "chat_template*", "special_tokens*", GENERATION):
            for file in paths[0].glob(pattern):
                shutil.copyfile(file, partial / file.name)
        write_generation(partial, paths[0], read_ends(*paths))
        finish(partial)
    return Combined(dest, made_rank, len(modules))


def _check(
    paths: list[pathlib.Path],
    dest: pathlib.Path,
    weights: Sequence[float],
    method: str,
    rank: int | None,
    density: float | None,
) -> None:
    if method not in METHODS:
        raise UserError(
            f"there is no method '{method}' of combining adapters",
            where="--method",
            fix=f"{nearest(method, METHODS)}one of {', '.join(METHODS)}",
        )
    if len(weights) != len(paths):
        raise UserError(
            f"{len(paths)} adapters and {len(weights)} weights", where="--weights", fix="give a weight for each adapter"
        )
    if not all(map(math.isfinite, weights)):
        raise UserError("a weight is not a finite number", where="--weights", fix="give numbers such as 0.7,0.3")
    if any(dest.resolve() == path.resolve() for path in paths):
        raise UserError("the result would replace one of the adapters", where=str(dest), fix="give another --to")
    if prunes(method):
        if density is None or not 0 < density <= 1:
            raise UserError(
                f"{method} keeps a part of every adapter, and the density is {density}",
                where="--density",
                fix="give the share to keep, such as 0.5",
            )
    elif density is not None:
        raise UserError(
            f"{method} keeps all of every adapter and reads no density", where="--density", fix="leave it out"
        )
    if rank is not None and (not method.endswith("svd") or rank < 1):
        raise UserError(
            f"the rank of {method} follows from the adapters"
            if not method.endswith("svd")
            else f"a rank of {rank} holds nothing",
            where="--rank",
            fix="leave it out, or use --method svd with a rank from 1",
        )


def _read(path: pathlib.Path) -> _Adapter:
    peft = read_config(read_fields(path), str(path / CONFIG))
    if peft.kind != "lora":
        raise UserError(
            f"a {peft.kind} adapter is no sum of products that could be weighted: only LoRA adapters can be combined",
            where=str(path / CONFIG),
            fix="merge it into its base instead (meshtune export --merge)",
        )
    halves: dict[str, dict[str, np.ndarray]] = {}
    with open_tensors(path / WEIGHTS) as file:
        for name in file.keys():  # noqa: SIM118
            inner = name.removeprefix(PREFIX).replace(".default.", ".")
            half = next((half for half in (A, B) if inner.endswith(half)), None)
            if half is None:
                raise UserError(
                    f"the adapter holds {inner}, no part of a LoRA: what is trained in full cannot be weighted",
                    where=str(path / WEIGHTS),
                    fix="train without train_modules and new tokens, or merge the adapters into models instead",
                )
            halves.setdefault(inner.removesuffix(half), {})[half] = file.get_tensor(name)
        base = record_of(file.metadata() or {}, peft)
    factors = {}
    for name, pair in halves.items():
        if len(pair) != 2 or pair[A].shape[0] != pair[B].shape[1]:
            raise UserError(
                f"the two matrices of {name} do not fit", where=str(path / WEIGHTS), fix="copy or save it again"
            )
        rank = pair[A].shape[0]
        factors[name] = Factors(pair[A], pair[B], peft.config.scale(rank, peft.alpha(name)))
    digest = hashlib.sha256((path / WEIGHTS).read_bytes()).hexdigest()
    return _Adapter(path, peft, base, factors, f"sha256:{digest}")


def _same_base(adapters: list[_Adapter]) -> None:
    first = adapters[0]
    for second in adapters[1:]:
        known = first.base.hash is not None and second.base.hash is not None
        equal = first.base.hash == second.base.hash if known else first.base.path == second.base.path
        if not equal or first.base.quantize != second.base.quantize:
            ours, theirs = (
                f"{adapter.base.path} ({adapter.base.quantize or adapter.base.hash})" for adapter in (first, second)
            )
            raise UserError(
                f"the adapters were trained on different bases: {ours} and {theirs}",
                where=str(second.path),
                fix="combine adapters of one base; with --any-base the result is said to be for the first one's",
            )


def _rank(adapters: list[_Adapter], method: str, requested: int | None) -> int:
    ranks = [max(factor.rank for factor in adapter.factors.values()) for adapter in adapters]
    if method == "cat":
        return sum(ranks)
    if not keeps_factors(method):
        return requested or max(ranks)
    distinct = {factor.rank for adapter in adapters for factor in adapter.factors.values()}
    if len(distinct) > 1:
        raise UserError(
            f"{method} adds A to A and B to B, and the adapters have ranks {', '.join(map(str, sorted(distinct)))}",
            where="--method",
            fix="use cat (exact; the ranks add up) or svd, which take different ranks",
        )
    return ranks[0]


def _same_shape(name: str, parts: Sequence[Factors]) -> None:
    shapes = {(part.b.shape[0], part.a.shape[1]) for part in parts}
    if len(shapes) > 1:
        raise UserError(
            f"the adapters are for weights of different shapes: {name} is {' and '.join(map(str, sorted(shapes)))}",
            fix="combine adapters of one base",
        )


def _fields(adapters: list[_Adapter], modules: list[str], rank: int) -> dict[str, object]:
    """The fields of adapter_config.json: those of the first adapter, updated for the result."""
    lists = [adapter.peft.fields.get("target_modules") for adapter in adapters]
    plain = all(isinstance(names, list) for names in lists)
    limited = any(
        adapter.peft.fields.get(field) for adapter in adapters for field in ("layers_to_transform", "exclude_modules")
    )
    short = sorted({name for names in lists for name in names or ()}) if plain and not limited else sorted(modules)
    fields = dict(adapters[0].peft.fields)
    for field in ("layers_to_transform", "layers_pattern", "exclude_modules", "modules_to_save"):
        if field in fields:
            fields[field] = None
    return fields | {
        "r": rank,
        "lora_alpha": rank,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": short,
        "lora_dropout": 0.0,
        "inference_mode": True,
        "init_lora_weights": True,
    }
