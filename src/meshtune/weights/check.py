"""Checks weights against the config, from the headers of files, before anything is allocated."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from meshtune.errors import UserError, nearest
from meshtune.families import tensors
from meshtune.families.composite import HEAD, passed_through, tensor_name, tower_names
from meshtune.families.tensors import TensorMap
from meshtune.lazy import LazyFunction
from meshtune.model.spec import ModelSpec
from meshtune.weights.safetensors_files import FLOATS, TensorInfo
from meshtune.weights.shards import row_ranges
from meshtune.weights.tensor_reader import TensorReader

# Tensors that checkpoints carry and no model needs: buffers that are computed from the config.
HARMLESS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|self_attn\.rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias)$")
incomplete_parts = LazyFunction("meshtune.families.wrappers:incomplete_parts")
SCORE = "score/weight"
SHOWN = 6

# Which config field sets the size of each logical axis.
FIELDS = {
    "vocab": "vocab_size",
    "embed": "hidden_size",
    "ffn": "intermediate_size",
    "heads": "num_attention_heads x head_dim",
    "kv_heads": "num_key_value_heads x head_dim",
    "packed_heads": "3 x num_attention_heads x head_dim",
    "head_dim": "head_dim",
    "experts": "number of experts",
    "whole": "number of experts or of positions",
    "score": "size",
}


def check(directory: Path, spec: ModelSpec, infos: dict[str, TensorInfo], *, numbers: bool = True) -> None:
    """Raises UserError with every disagreement between config and weights: missing or unexpected tensors, wrong shapes,
    dtypes that are not floating point, and an lm_head that differs from the embedding it should be tied to (only its
    shape and dtype where not `numbers`; all else is in headers anyway).
    """
    expected = {entry.name: entry for entry in tensors(spec)}
    missing = [name for name, entry in expected.items() if name not in infos and not starts_anew(entry)]
    extra = [name for name in infos if name not in expected and not _harmless(name, spec)]
    extra += _beside_tower(spec, infos)
    problems = _missing_lines(missing, expected, infos) + _extra_lines(extra, infos)
    problems += [] if spec.composite is None else incomplete_parts(spec, infos)
    for name, entry in expected.items():
        if name in infos:
            problems += _tensor_lines(entry, infos[name])
    if problems:
        raise _disagreement(directory, problems, _hints(spec, missing, extra, infos))
    if spec.tied and tensor_name(spec, HEAD) in infos:
        _check_tied_copy(spec, infos, numbers)


def _harmless(name: str, spec: ModelSpec) -> bool:
    if HARMLESS.search(name) or passed_through(spec, name) is not None:
        return True
    return (spec.tied or spec.scored) and name == tensor_name(spec, HEAD)


def _beside_tower(spec: ModelSpec, names: Collection[str]) -> list[str]:
    """Tensors of a tower that the spec does not read, of modules that it reads or of one more layer like those: without
    them the tower computes something else."""
    if spec.vision is None:
        return []
    read = tower_names(spec)
    modules = {name.rpartition(".")[0] for name in read}
    layers = set[str]() if spec.vision.partial else {_any_layer(name) for name in read}
    return [
        name
        for name in names
        if name not in read
        and passed_through(spec, name) is not None
        and name.endswith((".weight", ".bias"))
        and (name.rpartition(".")[0] in modules or _any_layer(name) in layers)
    ]


def _any_layer(name: str) -> str:
    return re.sub(r"\.\d+\.", ".#.", name)


def starts_anew(entry: TensorMap) -> bool:
    """Whether a checkpoint may lack this tensor: a reward model's score, which is trained from zero."""
    return entry.path == SCORE


def _missing_lines(missing: list[str], expected: dict[str, TensorMap], infos: dict[str, TensorInfo]) -> list[str]:
    spare = [name for name in infos if name not in expected]
    return [f"tensor '{name}' is missing {nearest(name, spare)}".rstrip() for name in missing]


def _extra_lines(extra: list[str], infos: dict[str, TensorInfo]) -> list[str]:
    return [f"tensor '{name}' in {infos[name].file.name} belongs to nothing in the config" for name in extra]


def _tensor_lines(entry: TensorMap, info: TensorInfo) -> list[str]:
    if info.dtype not in FLOATS:
        return [
            f"tensor '{entry.name}' in {info.file.name} has dtype {info.dtype}; supported: {', '.join(FLOATS)} "
            "(weights that are already quantised cannot be loaded)"
        ]
    if info.shape == entry.view.tensor:
        return []
    line = f"tensor '{entry.name}' in {info.file.name} has shape {list(info.shape)}, expected {list(entry.view.tensor)}"
    fields_known = entry.shape == entry.view.tensor and FIELDS.keys() >= set(entry.axes)
    if len(info.shape) == len(entry.view.tensor) and fields_known:
        differing = [
            f"{FIELDS[axis]} is {want:,} in the config, {have:,} in the file"
            for axis, want, have in zip(entry.axes, entry.view.tensor, info.shape, strict=True)
            if want != have
        ]
        line += f" ({'; '.join(differing)})"
    return [line]


def _hints(spec: ModelSpec, missing: list[str], extra: list[str], infos: dict[str, TensorInfo]) -> str:
    """Guesses the cause from the pattern of the disagreements."""
    names = [name for name in infos if passed_through(spec, name) is None]
    layers = {int(match[1]) for name in names if (match := re.search(r"\.layers\.(\d+)\.", name))}
    if layers and len(layers) == max(layers) + 1 != spec.layers:
        return f"num_hidden_layers is {spec.layers} in the config, but the files hold {len(layers)} layers"
    if missing == [tensor_name(spec, HEAD)]:
        return "if the head shares the embedding, set tie_word_embeddings to true in config.json"
    if (
        missing
        and all(name.startswith("model.") for name in missing if name != HEAD)
        and "embed_tokens.weight" in infos
    ):
        return "the model was saved without its head: save the causal language model (AutoModelForCausalLM)"
    if any(re.search(r"(weight_scale|scale_inv|qweight|qzeros|absmax|quant_map)", name) for name in extra):
        return "weights that are already quantised cannot be loaded; use the full-precision checkpoint"
    if any(name.endswith((".bias", "_norm.weight")) for name in extra) and not missing:
        return "the weights have parts that the config switches off: compare config.json with the model's original"
    return "config.json and the weights are from different models, or a file is missing; download the model again"


def _disagreement(directory: Path, problems: list[str], hint: str) -> UserError:
    if len(problems) == 1:
        return UserError(problems[0], where=str(directory), fix=hint)
    lines = [f"  {line}" for line in problems[:SHOWN]]
    if len(problems) > SHOWN:
        lines.append(f"  ... and {len(problems) - SHOWN} more")
    summary = f"config.json and the weights disagree in {len(problems)} places:\n" + "\n".join(lines)
    return UserError(summary, where=str(directory), fix=hint)


def _check_tied_copy(spec: ModelSpec, infos: dict[str, TensorInfo], numbers: bool) -> None:
    """A tied model's lm_head.weight may be written out as a copy of the embedding, never as something else."""
    embedding, head = next(entry for entry in tensors(spec) if entry.path == "embed/weight"), tensor_name(spec, HEAD)
    first, second = infos[embedding.name], infos[head]
    equal = first.shape == second.shape and first.dtype == second.dtype
    if equal and numbers:
        with TensorReader() as reader:
            equal = all(
                bool((reader.rows(first, *rows).view("u1") == reader.rows(second, *rows).view("u1")).all())
                for rows in row_ranges(first.shape, first.nbytes // max(1, first.shape[0] * first.shape[1]), 16 << 20)
            )
    if not equal:
        raise UserError(
            f"the config ties the head to the embedding, but '{head}' in {second.file.name} is not equal to "
            f"'{embedding.name}' in {first.file.name}",
            where=str(second.file.parent),
            fix="set tie_word_embeddings to false in config.json if the head is a weight of its own; "
            f"otherwise save the model again without '{head}'",
        )
