"""Combines several LoRA adapters of one base, with weights, into one adapter."""

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
from safetensors.numpy import save_file

from meshtune.adapters.peft_config import PeftConfig, read_config
from meshtune.adapters.peft_format import CONFIG, WEIGHTS, BaseRecord, open_tensors, read_fields, record_of
from meshtune.adapters.peft_tensors import PREFIX
from meshtune.adapters.weighted import METHODS, Factors, combine_factors, keeps_factors, prunes
from meshtune.errors import UserError, nearest
from meshtune.weights.ends import GENERATION, read_ends
from meshtune.weights.export import write_generation
from meshtune.weights.publish import disk_errors, publish_directory

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
