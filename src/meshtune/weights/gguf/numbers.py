"""The numbers of a model's parameters, part by part, from the files of a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from jaxtyping import Float

from meshtune.families import tensors
from meshtune.families.tensors import TensorMap
from meshtune.model.spec import ModelSpec
from meshtune.weights.packed import model_tensors
from meshtune.weights.tensor_reader import TensorReader
from meshtune.weights.writer import read_box


class Numbers(Protocol):
    """Gives rows of parameters in float32."""

    def rows(self, path: str, index: tuple[int, ...], start: int, stop: int) -> Float[np.ndarray, "rows ..."]:
        """Rows start..stop of `params[path][index]`."""
        ...

    def group(self, path: str) -> str:
        """The group of parameters that are computed together with this one: those of one group are best asked for one
        after another."""
        ...


class FileNumbers:
    """The parameters of a model directory, read when they are asked for, a box of a tensor at a time."""

    def __init__(self, directory: Path, spec: ModelSpec, reader: TensorReader):
        self._infos, self._reader = model_tensors(directory, spec.published), reader
        self._entries: dict[str, dict[tuple[int, ...], TensorMap]] = {}
        for entry in tensors(spec):
            self._entries.setdefault(entry.path, {})[entry.index] = entry

    def rows(self, path: str, index: tuple[int, ...], start: int, stop: int) -> Float[np.ndarray, "rows ..."]:
        """Rows start..stop of `params[path][index]`."""
        entries = self._entries[path]
        if index in entries:
            return self._box(entries[index], start, stop)
        parts = (entries[(*index, row)] for row in range(start, stop))  # the experts of a layer, one by one
        return np.stack([self._box(entry, 0, entry.shape[0]) for entry in parts])

    def group(self, path: str) -> str:
        """Every parameter is read by itself."""
        return ""

    def _box(self, entry: TensorMap, start: int, stop: int) -> np.ndarray:
        box = ((start, stop), *((0, n) for n in entry.shape[1:]))
        return read_box(self._reader, self._infos[entry.name], entry.view, box).astype(np.float32)
