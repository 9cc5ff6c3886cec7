"""Exports a model or an adapter merged into its base as a GGUF file."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from meshtune.adapters.merge import merge_adapters
from meshtune.adapters.peft_format import LoadedAdapter, attach, check_base, load_adapter
from meshtune.arrays.tree import Leaves, flatten, layer_site, stack_path, unflatten
from meshtune.data.chat import template_end
from meshtune.data.tokenizer import chat_templates, load_tokenizer
from meshtune.errors import UserError
from meshtune.families.gguf import gguf_layout
from meshtune.families.quantised import quantised_leaves
from meshtune.model.spec import ModelSpec, abstract_params
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.gguf.mixture import FILE_TYPES, Mixture, check_file_type
from meshtune.quantize.weight import QuantisedWeight
from meshtune.runs.export import merged_into
from meshtune.runs.modelfile import modelfile
from meshtune.runs.sources import Source
from meshtune.weights.ends import read_ends
from meshtune.weights.gguf.file import read_gguf
from meshtune.weights.gguf.tokenizer import SpecialTokens, tokenizer_metadata
from meshtune.weights.gguf.writer import FileNumbers, Numbers, Written, write_gguf
from meshtune.weights.inspect import base_hash
from meshtune.weights.load import load_spec, load_weight
from meshtune.weights.publish import disk_errors, new_file
from meshtune.weights.tensor_reader import TensorReader
from meshtune.weights.verify import ExportError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

OUTSIDE = "outside the layers"


class MergedNumbers:
    """The parameters of a base with an adapter merged. The weights of one kind of module, of all layers, are in memory
    at a time; weights that are neither adapted nor quantised in training are read from the base's files."""

    def __init__(
        self, source: Source, spec: ModelSpec, adapter: LoadedAdapter, base: Numbers, quantised: QuantizeConfig | None
    ):
        self._source, self._spec, self._adapter, self._base = source, spec, adapter, base
        self._group, self._leaves = "", Leaves()
        self._quantised = {} if quantised is None else dict.fromkeys(_quantised_paths(spec, quantised), quantised)
        self._adapted = {_group(path) for path in (*flatten(adapter.trainable), *self._quantised)}
        if spec.tied and not adapter.spec.tied:
            self._adapted.add(OUTSIDE)
        rows = {n: (key, row) for key, _, _, numbers in spec.positions() for row, n in enumerate(numbers)}
        self._base_rows = {
            (key, row): rows[n] for key, _, _, numbers in adapter.spec.positions() for row, n in enumerate(numbers)
        }

    def rows(self, path: str, index: tuple[int, ...], start: int, stop: int) -> Float[np.ndarray, "rows ..."]:
        """Rows start..stop of `params[path][index]`, in the stacks of the adapter's spec."""
        group = _group(path)
        if group in self._adapted:
            if group != self._group:
                self._leaves.clear()
                self._group, self._leaves = group, self._merge(group)
            return np.asarray(self._leaves[path][index][start:stop], np.float32)
        if (place := stack_path(path)) is not None:
            base_key, row = self._base_rows[place.key, index[0]]
            path, index = f"layers/{base_key}/{place.site}", (row, *index[1:])
        return self._base.rows(path, index, start, stop)

    def group(self, path: str) -> str:
        """The kind of module, where it is adapted."""
        group = _group(path)
        return group if group in self._adapted else ""

    def _merge(self, group: str) -> Leaves:
        paths = [path for path in flatten(abstract_params(self._spec)) if _group(path) == group]
        leaves = {
            path: load_weight(self._source.base, self._spec, path, quantize=self._quantised.get(path)) for path in paths
        }
        trainable = {path: leaf for path, leaf in flatten(self._adapter.trainable).items() if _group(path) == group}
        part = dataclasses.replace(self._adapter, trainable=unflatten(trainable))
        spec = self._spec
        if group != OUTSIDE:
            part = dataclasses.replace(part, copies={})
            spec = dataclasses.replace(spec, tied=part.spec.tied)
        _, tree = attach({"layers": {}} | unflatten(leaves), spec, part)
        return flatten(merge_adapters(tree))


def merged_numbers(source: Source, base: Numbers, into: str | None, any_base: bool) -> tuple[ModelSpec, MergedNumbers]:
    """(the spec, the numbers) of a base with its adapter merged; `into` as `runs.export.export` has it.

    Raises UserError for a base that is not the adapter's.
    """
    assert source.adapter is not None
    spec, _ = load_spec(source.base, "float32")
    adapter = load_adapter(source.adapter, spec).mergeable
    if not any_base:
        check_base(adapter, str(source.base), base_hash(source.base))
    return adapter.spec, MergedNumbers(source, spec, adapter, base, merged_into(adapter.base, into))


def _quantised_paths(spec: ModelSpec, config: QuantizeConfig) -> list[str]:
    arrays = quantised_leaves(flatten(abstract_params(spec)), config, spec)
    return [path for path, array in arrays.items() if isinstance(array, QuantisedWeight)]


def _group(path: str) -> str:
    if stack_path(path) is None:
        node = path.rpartition("/")[0]
        return f"{OUTSIDE}, {node}" if "/" in node else OUTSIDE  # a table of per-layer embeddings is large
    return layer_site(path).rpartition("/")[0]


SUFFIX = ".gguf"
QUANTIZATION_VERSION = 2
SHOWN = 4  # names in a message


def export_gguf(
    source: Source,
    dest: Path,
    file_type: str,
    *,
    into: str | None = None,
    any_base: bool = False,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[str, str]:
    """Writes a whole model, an adapter merged into its base, as the GGUF file `dest`, and a Modelfile next to it.

    Tensors are read from their files, and adapters merged, while writing; the model is never whole in memory.
    Returns (the written file's facts, how it was verified). Raises UserError for a model that llama.cpp does not
    compute, a tokenizer that it has not, and a `dest` that exists.
    """
    file_type = check_file_type(file_type)
    check_file(dest, overwrite)
    spec, _ = load_spec(source.base)
    with TensorReader() as reader:
        numbers: Numbers = FileNumbers(source.base, spec, reader)
        if source.adapter is not None:
            spec, numbers = merged_numbers(source, numbers, into, any_base)
        layout = gguf_layout(spec)
        metadata = general_metadata(layout.architecture.name, dest, FILE_TYPES[file_type][0])
        tokenizer = load_tokenizer(source.tokenizer, source.chat_template)
        ends = read_ends(source.base, source.adapter)
        metadata |= _tokenizer_metadata(tokenizer, ends, spec)
        tied = all(part.name != "output.weight" for part in layout.parts)
        mixture = Mixture(file_type, spec.layers, tied, _experts(layout.metadata))
        partial = dest.with_name(f".{dest.name}.partial-{os.getpid()}")
        try:
            with disk_errors(dest), new_file(partial, dest):
                written = write_gguf(partial, layout, numbers, mixture, metadata, progress)
                _verify(partial, len(layout.shapes) + len(layout.computed))
                partial.rename(dest)
                text = modelfile([f"FROM ./{dest.name}"], tokenizer, end_texts(tokenizer, ends))
                modelfile_of(dest).write_text(text, encoding="utf-8")
        finally:
            partial.unlink(missing_ok=True)
    return f"a GGUF model, {file_type}, {written.nbytes / 1e6:,.1f} MB,", _describe_check(written)


def modelfile_of(dest: Path) -> Path:
    """Path of Ollama's description of a GGUF file, next to it."""
    return dest.with_suffix(".Modelfile")


def end_texts(tokenizer: PreTrainedTokenizerFast, ends: Sequence[int]) -> list[str]:
    """The texts at which the model ends an answer: those of `ends`, and that of the chat template."""
    ids = ends or (_id(tokenizer.eos_token_id),)
    texts = [str(tokenizer.decode([id_])) for id_ in ids if id_ is not None]
    return list(dict.fromkeys([*texts, *template_end(tokenizer)]))


def check_file(dest: Path, overwrite: bool) -> None:
    """Raises UserError for a destination that is not to be written."""
    if dest.is_dir():
        raise UserError(
            "--to is a folder, and a GGUF model is one file",
            where=str(dest),
            fix=f"give the file's name too: --to {dest / f'model{SUFFIX}'}",
        )
    if dest.suffix != SUFFIX:
        raise UserError(
            f"'{dest.name}' does not end in {SUFFIX}", where="--to", fix=f"name the file {dest.name}{SUFFIX}"
        )
    for file in (dest, modelfile_of(dest)):
        if file.exists() and not overwrite:
            raise UserError(f"{file.name} exists already", where=str(file), fix="give another name, or add --overwrite")


def general_metadata(architecture: str, dest: Path, file_type: int) -> dict[str, Any]:
    """The keys that every file of a model has."""
    return {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": dest.stem,
        "general.file_type": file_type,
        "general.quantization_version": QUANTIZATION_VERSION,
    }


def _experts(metadata: Any) -> int:
    return next((value for key, value in metadata.items() if key.endswith(".expert_count")), 0)


def _id(token_id: Any) -> int | None:
    return token_id if isinstance(token_id, int) else None


def _tokenizer_metadata(tokenizer: PreTrainedTokenizerFast, ends: tuple[int, ...], spec: ModelSpec) -> dict[str, Any]:
    plain = tokenizer.encode("a", add_special_tokens=False)
    with_specials = tokenizer.encode("a")
    special = SpecialTokens(
        bos=_id(tokenizer.bos_token_id),
        eos=_id(tokenizer.eos_token_id),
        unknown=_id(tokenizer.unk_token_id),
        padding=_id(tokenizer.pad_token_id),
        adds_bos=len(with_specials) > len(plain) and with_specials[0] == tokenizer.bos_token_id,
        adds_eos=len(with_specials) > len(plain) and with_specials[-1] == tokenizer.eos_token_id,
        ends=ends,
        chat_templates=chat_templates(tokenizer),
    )
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    return tokenizer_metadata(content, special, spec.vocab, str(tokenizer.name_or_path))


def _verify(file: Path, tensors: int) -> None:
    if len(read_gguf(file).tensors) != tensors:
        raise ExportError("the file that was written lacks tensors", where=str(file), fix="try again")


def _describe_check(written: Written) -> str:
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(written.types.items()))
    error = f"numbers within {written.error:.2%} of the model's (root mean square; {written.worst} is the worst)"
    text = f"{kinds} tensors, {error if written.error else 'numbers exactly those of the model'}"
    if written.lost:
        names = ", ".join(f"{name} in {kind}" for name, kind in written.lost[:SHOWN])
        extra = f" and {len(written.lost) - SHOWN} more" * (len(written.lost) > SHOWN)
        text += (
            f"; but the numbers of {names}{extra} are too small for their type, and the file has zeros in their place: "
            "--gguf BF16 keeps them"
        )
    return text
