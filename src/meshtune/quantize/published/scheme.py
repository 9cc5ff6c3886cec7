"""The interface of a format in which checkpoints are published: which tensors make up a weight, and their numbers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from meshtune.arrays.spec import ArraySpec
from meshtune.errors import UserError
from meshtune.patterns import pattern_problem
from meshtune.quantize.config import BlockSize, StoredFormatName

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]  # [start, stop) of each dimension


class Parts(Protocol):
    """The tensors in files that one weight is made of, by role ("codes", "scales")."""

    def __contains__(self, role: str) -> bool: ...

    def shape(self, role: str) -> Shape: ...

    def dtype(self, role: str) -> str:
        """The dtype as safetensors names it."""
        ...

    def box(self, role: str, box: Box) -> np.ndarray:
        """A box of a tensor, read from its file."""
        ...

    def whole(self, role: str) -> np.ndarray:
        """A whole tensor, read from its file: for small ones."""
        ...


@dataclasses.dataclass(frozen=True)
class Form:
    """The quantised weight that the codes in files are without a change: a format of `quantize.formats` and its block
    size."""

    format: StoredFormatName
    block_size: BlockSize


class Scheme(Protocol):
    """How the weights of one checkpoint are quantised in its files: a frozen, hashable dataclass, a field of ModelSpec.

    The tensor that a family's table names `stem + ending` is made of the tensors `stem + endings[role]`. Those in
    `required` must be there; tensors `stem + ignored` are no part of a weight and change nothing.
    """

    @property
    def method(self) -> str:
        """The quant_method."""
        ...

    @property
    def ending(self) -> str: ...

    @property
    def endings(self) -> Mapping[str, str]: ...

    @property
    def required(self) -> tuple[str, ...]: ...

    @property
    def ignored(self) -> tuple[str, ...]: ...

    @property
    def skip(self) -> tuple[str, ...]:
        """Patterns of modules that are not quantised (see `is_skipped`)."""
        ...

    def converts(self, module: str, array: ArraySpec) -> bool:
        """Whether the weight of a Hugging Face module, a matrix or experts in a stack of layers, is quantised."""
        ...

    def shape(self, parts: Parts) -> Shape:
        """The shape of the weight. Raises ValueError where the shapes or dtypes of its parts do not fit together."""
        ...

    def decode(self, parts: Parts, box: Box) -> Float[np.ndarray, "..."]:
        """A box of the weight in float32, before any rounding to the dtype of the run."""
        ...

    def form(self, weight: ArraySpec) -> Form | None:
        """The quantised weight that holds the published codes of a weight [.., out, in]; None where there is none, and
        the weight is read wide."""
        ...

    def codes(self, parts: Parts, box: Box) -> np.ndarray:
        """A box of the codes of the form, whose last dimension is as long as a row of codes. Of a weight whose tensor
        is transposed in the family's table, the tensor is that of the codes transposed likewise."""
        ...

    def scales(self, parts: Parts, box: Box) -> np.ndarray:
        """A box of the scales of the form, with one number for each block of a row."""
        ...


@runtime_checkable
class Rewritable(Scheme, Protocol):
    """A scheme in which weights can be quantised again."""

    @property
    def largest_error(self) -> float:
        """An upper bound of the root mean square error of quantising, relative to theirs."""
        ...

    def encode(self, numbers: Float[np.ndarray, "..."], dtypes: Mapping[str, np.dtype]) -> dict[str, np.ndarray]:
        """The parts of a weight, by role, in some dtypes; the inverse of `decode`, with each number rounded once."""
        ...


def is_skipped(module: str, patterns: Iterable[str]) -> bool:
    """Whether a module is among those not to convert, as transformers (should_convert_module) matches its name: from
    its beginning, up to a dot, by a regular expression; or its end."""
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    return any(re.match(rf"(?:{pattern}){boundary}", module) or module.endswith(pattern) for pattern in patterns)


def skip_list(fields: Mapping[str, Any], where: str, *names: str) -> tuple[str, ...]:
    """The list of module names in the first of some fields that is there. Raises UserError where it is no list of
    names."""
    value = next((fields[name] for name in names if fields.get(name) is not None), ())
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise UserError(f"{names[0]} is {value!r}, not a list of module names", where=where)
    check_patterns(value, where)
    return tuple(value)


def check_patterns(patterns: Iterable[str], where: str) -> None:
    """Raises UserError for names of modules that are no regular expressions, or may take for ever to match."""
    for pattern in patterns:
        if problem := pattern_problem(pattern):
            raise UserError(f"'{pattern}' {problem}", where=where, fix="give the checkpoint as it was published")


def check_known(fields: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Raises UserError for a field that is not known and not null, and might change the numbers."""
    for name, value in fields.items():
        if name not in (*known, "quant_method") and value is not None:
            raise UserError(
                f"{name} = {value!r} of quantization_config is not known, so it might change the numbers",
                where=where,
                fix="give the full-precision checkpoint, or remove the field where it changes nothing",
            )
