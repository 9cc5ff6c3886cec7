"""Which weights of a model are quantised, and what a method must not ask of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from meshtune.errors import UserError
from meshtune.model.spec import ArraySpec, ModelSpec, abstract_params
from meshtune.model.tree import Tree, flatten, unflatten
from meshtune.quantize.config import BLOCK_SIZES, QuantizeConfig
from meshtune.quantize.weight import QuantisedWeight


def is_quantised(path: str, array: ArraySpec) -> bool:
    """Whether the weight at a path of `abstract_params` is quantised: every linear layer inside the decoder's layers.

    Embeddings, norms, biases and the head stay as they are.
    """
    return path.startswith("layers/") and path.endswith("/weight") and len(array.shape) >= 3


def quantised_params(spec: ModelSpec, config: QuantizeConfig | None) -> Tree:
    """`abstract_params`, with the form of a quantised weight where one will stand.

    Raises UserError for an unknown format, and for a block that does not divide the rows of some weight.
    """
    return unflatten(quantised_leaves(flatten(abstract_params(spec)), config))


def quantised_leaves(leaves: Mapping[str, ArraySpec], config: QuantizeConfig | None) -> dict[str, Any]:
    """The same for leaves by path."""
    if config is None:
        return dict(leaves)
    chosen = {path: array for path, array in leaves.items() if is_quantised(path, array)}
    _check_rows(chosen, config)
    return {
        path: QuantisedWeight.abstract(array, config) if path in chosen else array for path, array in leaves.items()
    }


def _check_rows(chosen: Mapping[str, ArraySpec], config: QuantizeConfig) -> None:
    for path, array in chosen.items():
        row = array.shape[-1]
        if row % config.block_size:
            common = math.gcd(*(array.shape[-1] for array in chosen.values()))
            fitting = [size for size in BLOCK_SIZES if common % size == 0]
            site = path.removesuffix("/weight").split("/", 2)[2]
            raise UserError(
                f"blocks of {config.block_size} do not divide the rows of {site}, which have {row} numbers",
                where="quantize.block_size",
                fix=f"give {fitting[-1]}, the largest that divides all rows of this model"
                if fitting
                else "leave quantize out: no block divides all rows of this model",
            )
