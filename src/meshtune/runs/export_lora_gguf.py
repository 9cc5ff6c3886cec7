"""Exports a LoRA adapter as a GGUF file that llama.cpp applies to the GGUF file of its base."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from meshtune.adapters.lora import LoRA
from meshtune.adapters.peft_format import LoadedAdapter, check_base, load_adapter
from meshtune.arrays.tree import flatten, stack_path
from meshtune.data.tokenizer import load_tokenizer
from meshtune.errors import UserError
from meshtune.families import module_names
from meshtune.families.gguf import GgufLayout, GgufPart, gguf_layout
from meshtune.families.gguf.layout import STACKED
from meshtune.quantize.gguf import TYPES
from meshtune.quantize.gguf.mixture import FLOATS, check_file_type
from meshtune.runs.export_gguf import check_file, end_texts, modelfile_of
from meshtune.runs.modelfile import modelfile
from meshtune.runs.sources import Source
from meshtune.weights.ends import read_ends
from meshtune.weights.gguf.file import read_gguf
from meshtune.weights.gguf.writer import encode_rows, start_file
from meshtune.weights.inspect import base_hash
from meshtune.weights.load import load_spec
from meshtune.weights.publish import disk_errors, new_file
from meshtune.weights.safetensors_files import LINK

# Tensors that llama.cpp multiplies without adapters: it loads those of them, and does not apply them.
UNADAPTED = frozenset({"per_layer_model_proj", *STACKED.values()})


def export_lora_gguf(
    source: Source,
    dest: Path,
    file_type: str,
    *,
    any_base: bool = False,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[str, str]:
    """Writes the adapter of `source` as `dest`, and a Modelfile next to it. Returns (the written file's facts, how
    verified).

    Raises UserError for an adapter that is more than low-rank products (modules trained in full, new tokens, other
    methods), for a quantised type, and as `export_gguf` does.
    """
    file_type = check_file_type(file_type)
    if file_type not in FLOATS:
        raise UserError(
            f"an adapter by itself is written in {', '.join(FLOATS)}, not in {file_type}",
            where="--gguf",
            fix=f"add --merge to write the merged model in {file_type}, or give --gguf F16",
        )
    check_file(dest, overwrite)
    assert source.adapter is not None
    spec, _ = load_spec(source.base)
    adapter = load_adapter(source.adapter, spec)
    if not any_base:
        check_base(adapter, str(source.base), base_hash(source.base))
    layout = gguf_layout(adapter.spec)
    tensors, alpha = _tensors(adapter, layout)
    metadata: dict[str, Any] = {
        "general.architecture": layout.architecture.name,
        "general.type": "adapter",
        "general.name": dest.stem,
        "adapter.type": "lora",
        "adapter.lora.alpha": alpha,
    }
    chosen = {name: (TYPES[file_type], array.shape) for name, array in tensors.items()}
    partial = dest.with_name(f".{dest.name}.partial-{os.getpid()}")
    tokenizer = load_tokenizer(source.tokenizer, source.chat_template)
    try:
        with disk_errors(dest), new_file(partial, dest):
            stream, offsets = start_file(partial, metadata, chosen)
            with stream:
                for number, (name, array) in enumerate(tensors.items(), 1):
                    stream.seek(offsets[name])
                    stream.write(encode_rows(name, file_type, array.reshape(-1, array.shape[-1]))[0].tobytes())
                    if progress:
                        progress(number, len(tensors))
                stream.flush()
                os.fsync(stream.fileno())
            read_gguf(partial)
            partial.rename(dest)
            lines = [*_from(source.base), f"ADAPTER ./{dest.name}"]
            ends = read_ends(source.base, source.adapter)
            text = modelfile(lines, tokenizer, end_texts(tokenizer, ends))
            modelfile_of(dest).write_text(text, encoding="utf-8")
    finally:
        partial.unlink(missing_ok=True)
    return f"a LoRA GGUF, {file_type},", f"{len(tensors) // 2} adapted matrices, alpha {alpha:g}"


def _from(base: Path) -> list[str]:
    """The lines of a Modelfile that name the base."""
    if (base / LINK).is_symlink():
        name = (base / LINK).resolve().name
        return [f"# FROM is the GGUF file that the adapter was trained over, {name}, put beside it", f"FROM ./{name}"]
    return ["# FROM is the GGUF file of the base: meshtune export BASE --to base.gguf --gguf Q8_0", "FROM ./base.gguf"]


def _tensors(adapter: LoadedAdapter, layout: GgufLayout) -> tuple[dict[str, np.ndarray], float]:
    """The factors by name, with A as peft has it and B in the order of the base's rows; and the alpha that llama.cpp
    divides by a product's rank. Scales that differ from it are multiplied into B."""
    parts: dict[tuple[str, tuple[int, ...]], list[GgufPart]] = {}
    for part in layout.parts:
        parts.setdefault((part.path, part.index[:1]), []).append(part)
    tensors: dict[str, np.ndarray] = {}
    alpha: float | None = None
    for path, leaf in flatten(adapter.trainable).items():
        node, _, last = path.rpartition("/")
        if last != "adapter" or type(leaf) is not LoRA or adapter.config.adapter != "lora" or adapter.frozen:
            kind = f"an adapter of the kind '{adapter.config.adapter}'"
            raise UserError(
                f"{kind if last == 'adapter' else 'a module that was trained in full'} cannot be said in a LoRA GGUF, "
                "which has low-rank products alone",
                where=module_names(adapter.spec).get(node, [node])[0],
                fix="add --merge to write the merged model",
            )
        alpha = leaf.scale * leaf.rank if alpha is None else alpha
        a, b = np.asarray(leaf.a, np.float32), np.asarray(leaf.b, np.float32)
        b = b * np.float32(leaf.scale * leaf.rank / alpha)
        stacked = stack_path(path) is not None
        for row in range(a.shape[0] if stacked else 1):
            row_a, row_b = (a[row], b[row]) if stacked else (a, b)
            for part in parts[f"{node}/weight", (row,) if stacked else ()]:
                tensors |= _factors(part, row_a, row_b)
    if alpha is None:
        raise UserError("the adapter adapts nothing", fix="give another adapter")
    return tensors, alpha


def _factors(part: GgufPart, a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    """The factors of a tensor: B has its rows, in its order."""
    name, rank = part.name, b.shape[-1]
    if name.removesuffix(".weight").rpartition(".")[2] in UNADAPTED:
        raise UserError(
            f"llama.cpp multiplies '{name}' without adapters, and would not apply that of {part.path}",
            where=part.path,
            fix="add --merge to write the merged model, or leave the module out of method.targets",
        )
    if not all(view.only_rows for view in (part.view, part.source) if view is not None):
        raise UserError(
            f"'{name}' has the columns of {part.path} in another order, or transposed, and its product of low rank "
            "cannot be said for it",
            where=part.path,
            fix="add --merge to write the merged model",
        )
    if part.source is not None:
        b = part.source.of_rows(rank).read(b)
    if not part.view.is_identity:
        b = dataclasses.replace(part, view=part.view.of_rows(rank), source=None, offset=0.0).to_tensor(b)
    if name == "token_embd.weight":
        a = np.ascontiguousarray(a.T)
    return {f"{name}.lora_a": a, f"{name}.lora_b": b}
