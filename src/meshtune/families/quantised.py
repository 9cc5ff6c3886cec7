"""Which weights of a model are quantised, and in which format, chosen by Hugging Face module names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from meshtune.arrays.spec import ArraySpec, unknown_role
from meshtune.arrays.tree import flatten, layer_site, stack_path
from meshtune.errors import UserError, nearest
from meshtune.families import module_names, tensors
from meshtune.model.spec import ModelSpec, abstract_params
from meshtune.quantize.config import BLOCK_SIZES, UNQUANTISED, QuantizeConfig, check_format
from meshtune.quantize.formats import FORMATS
from meshtune.quantize.published.scheme import Form
from meshtune.quantize.weight import QuantisedWeight


def quantised_leaves(leaves: Mapping[str, ArraySpec], config: QuantizeConfig | None, spec: ModelSpec) -> dict[str, Any]:
    """Leaves of a model by path, with a QuantisedWeight of ArraySpecs for every linear layer in a stack, experts
    included; without a config those whose published codes can be computed with directly.

    Embeddings, the head, norms, biases, routers and short convolutions are not quantised, nor are modules that the
    config excludes. Raises UserError for an unknown format or role, for a module in the config that is not quantised
    anyway, for a block size that does not divide the rows of some weight, and for a checkpoint that is published
    quantised and was not asked to be quantised again.
    """
    if config is None:
        forms = {} if spec.published is None else published_forms(spec)
        return {
            path: QuantisedWeight.published(array, forms[path]) if path in forms else array
            for path, array in leaves.items()
        }
    _check_again(config, spec)
    formats = _formats(config, spec)
    chosen = {path: array for path, array in leaves.items() if formats.get(path, UNQUANTISED) != UNQUANTISED}
    _check_rows(chosen, config)
    return {
        path: QuantisedWeight.abstract(array, config.within(formats[path])) if path in chosen else array
        for path, array in leaves.items()
    }


def _formats(config: QuantizeConfig, spec: ModelSpec) -> dict[str, str]:
    """The format of each linear layer in a stack, by path."""
    named = module_names(spec)
    linear = {
        path: [f".{name}." for name in named[path.rpartition("/")[0]]]
        for path, array in flatten(abstract_params(spec)).items()
        if is_quantised(path, array)
    }
    check_format(config.format, (*FORMATS, UNQUANTISED))
    formats = dict.fromkeys(linear, config.format)
    for module, format in config.modules.items():
        check_format(format, (*FORMATS, UNQUANTISED), f"quantize.modules.{module}")
        matches = {path: sum(f".{module}." in name for name in names) for path, names in linear.items()}
        if not any(matches.values()):
            within = [re.split(r"\.\d+\.", name, maxsplit=1)[1] for names in linear.values() for name in names]
            known = {part for name in within for part in name.strip(".").split(".")}
            raise UserError(
                f"'{module}' is no module that is quantised",
                where="quantize.modules",
                fix=f"{nearest(module, known)}modules: {', '.join(sorted(known))}",
            )
        if single := [path for path, count in matches.items() if 0 < count < len(linear[path])]:
            raise UserError(
                f"'{module}' is a part of the {len(linear[single[0]])} layers that are stored together",
                where="quantize.modules",
                fix="name a module without its layer, such as down_proj: all layers have the same format",
            )
        formats |= {path: format for path, count in matches.items() if count}
    return formats


def published_forms(spec: ModelSpec) -> dict[str, Form]:
    """The weights of a checkpoint that is published quantised whose codes can be computed with, by path: those with
    every layer quantised."""
    scheme, forms, plain = spec.published, dict[str, Form](), set[str]()
    assert scheme is not None
    for entry in tensors(spec):
        path, array = entry.path, entry.array
        if not is_quantised(path, array) or path in plain:
            continue
        converted = scheme.converts(entry.name.removesuffix(".weight"), array) and entry.view.columns is not None
        form = scheme.form(array) if converted else None
        if form is None:
            plain.add(path)
        else:
            forms[path] = form
    return {path: form for path, form in forms.items() if path not in plain}


def _check_again(config: QuantizeConfig, spec: ModelSpec) -> None:
    if config.quantises and spec.published is not None and not config.requantise:
        raise UserError(
            f"this checkpoint is quantised already ({spec.published.method}), and quantising its weights again would "
            "add a second rounding",
            where="quantize",
            fix="leave quantize out to train over the codes as they are where they can be computed with; set quantize: "
            "none to read them wide, or quantize.requantise: true to quantise them again",
        )


def is_quantised(path: str, array: ArraySpec) -> bool:
    """Whether quantisation applies to an array, by its role: to matrices and experts in a stack of the language model,
    not to a tower's. Raises UserError for an unknown role."""
    match array.role:
        case "matrix" | "experts":
            place = stack_path(path)
            return place is not None and place.root == "" and array.is_stacked
        case "router" | "vector" | "table" | "head" | "conv" | "buffer":
            return False
        case _:
            raise unknown_role("quantize", path, array, where="quantize", fix="leave quantize out for this model")


def _check_rows(chosen: Mapping[str, ArraySpec], config: QuantizeConfig) -> None:
    for path, array in chosen.items():
        row = array.shape[-1]
        if row % config.block_size:
            common = math.gcd(*(array.shape[-1] for array in chosen.values()))
            fitting = [size for size in BLOCK_SIZES if common % size == 0]
            site = layer_site(path.removesuffix("/weight"))
            raise UserError(
                f"blocks of {config.block_size} do not divide the rows of {site}, which have {row} numbers",
                where="quantize.block_size",
                fix=f"give {fitting[-1]}, the largest that divides all rows of this model"
                if fitting
                else "leave quantize out: no block divides all rows of this model",
            )
