"""Exports a run, adapter or model to a directory that other tools load, verified by reading it back."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshtune.adapters.merge import merge_adapters
from meshtune.adapters.method import SHARED
from meshtune.adapters.peft_format import (
    CONFIG,
    BaseRecord,
    LoadedAdapter,
    adapts_tower,
    attach,
    check_base,
    load_adapter,
)
from meshtune.arrays.tree import Tree, flatten, unflatten
from meshtune.data.tokenizer import load_tokenizer, padding_id
from meshtune.digests import write_digests
from meshtune.errors import UserError, nearest
from meshtune.model.spec import ModelSpec
from meshtune.quantize.config import UNQUANTISED, QuantizeConfig
from meshtune.quantize.published.write import WRITERS
from meshtune.runs.export_quantised import export_quantised, nodes_to_write
from meshtune.runs.progress import StageProgress, of_stage
from meshtune.runs.sources import Source, find
from meshtune.weights.export import Publication, export_model
from meshtune.weights.export_codes import republish
from meshtune.weights.hub import TOKENIZER, locate
from meshtune.weights.inspect import base_hash
from meshtune.weights.load import load_params, load_spec
from meshtune.weights.publish import publish_directory
from meshtune.weights.safetensors_files import LINK, headers
from meshtune.weights.verify import ExportError, probe_logits

FORMATS = ("published", *WRITERS)


INTO = ("dequantised", "full")


def merged_into(base: BaseRecord, into: str | None) -> QuantizeConfig | None:
    """Returns the quantisation of the base that an adapter is merged into, or None for full precision."""
    if into not in (None, *INTO):
        raise UserError(
            f"an adapter cannot be merged into '{into}'", where="--into", fix=f"{nearest(into, INTO)}one of {INTO}"
        )
    if into == "dequantised" and base.quantize is None:
        raise UserError(
            "the adapter was not trained on a quantised base, so there is nothing to dequantise",
            where="--into",
            fix="leave --into out",
        )
    return None if into == "full" else base.quantised


@dataclasses.dataclass(frozen=True)
class ExportResult:
    """The result of an export.

    `what` names its kind ("a PEFT adapter", "a model in float32"), `verified` describes the check of the written files.
    """

    what: str
    path: Path
    verified: str


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """Options of an export.

    An adapter is copied unless `merge` is set: then it is merged into its base and written as a full model in `dtype`
    (default: the base's), in files of at most `max_shard_bytes`. `into` selects the base of an adapter that was trained
    on a quantised base: "dequantised", the quantised weights that it was trained on (default), or "full", the original
    weights; every written file records it.

    With `format` "bitsandbytes" or "compressed-tensors" (without `merge`: a model, or the base that the adapter was
    trained over) linear layers are written as codes of nf4 or int4. With `format` "published" a base that is published
    quantised is written in its format again: weights without adapters are copied, the others are quantised again. With
    `gguf`, a type such as "Q4_K_M", the destination is a GGUF file for llama.cpp (see runs.export_gguf).

    `any_base` accepts another base than the adapter's. `progress(stage, done, total)` is called as each stage advances.
    """

    merge: bool = False
    into: str | None = None
    format: str | None = None
    dtype: str | None = None
    gguf: str | None = None
    max_shard_bytes: int = 5_000_000_000
    overwrite: bool = False
    any_base: bool = False
    progress: StageProgress | None = None

    def stage(self, name: str) -> Callable[[int, int], None] | None:
        """Returns the progress function of one stage."""
        return of_stage(self.progress, name)


def export(
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    **options: Any,
) -> ExportResult:
    """Exports `source` (a run, an adapter directory or a model) to the directory or GGUF file `dest`.

    `base` overrides the path of an adapter's base; `options` are the fields of ExportOptions. `dest` appears complete
    and verified, or not at all.

    Raises: UserError for a source without a result, for a base that is not the adapter's, and for a `dest` that is not
    empty.
    """
    resolved = find(source) if base is None else find(base, source)
    dest, chosen = Path(dest).expanduser(), ExportOptions(**options)
    _check_names(dest, chosen)
    write = next(write for applies, write in EXPORTS.values() if applies(resolved, chosen))
    return write(resolved, dest, chosen)


def _check_names(dest: Path, options: ExportOptions) -> None:
    """Raises UserError for an unknown format, and for a folder that is named like a GGUF file."""
    if options.gguf is not None:
        return
    if dest.suffix == ".gguf":
        raise UserError(
            f"'{dest.name}' is the name of a GGUF file, and this writes a folder",
            where="--to",
            fix="add --gguf Q4_K_M (or another type) for a GGUF file, or name a folder",
        )
    format = options.format
    if format is not None and format not in FORMATS:
        raise UserError(
            f"there is no format '{format}'", where="--format", fix=f"{nearest(format, FORMATS)}one of {FORMATS}"
        )


def _write_gguf(source: Source, dest: Path, options: ExportOptions) -> ExportResult:
    """Writes a GGUF file: of the adapter only, if it is not to be merged."""
    from meshtune.runs.export_gguf import export_gguf
    from meshtune.runs.export_lora_gguf import export_lora_gguf

    assert options.gguf is not None
    if options.format is not None or options.dtype is not None:
        raise UserError(
            "a GGUF file has types of its own, not a format or a dtype",
            where="--format" if options.format is not None else "--dtype",
            fix=f"leave it out: --gguf {options.gguf} says how numbers are stored",
        )
    if source.adapter is None and options.merge:
        raise _nothing_to_merge(source)
    common = {"any_base": options.any_base, "overwrite": options.overwrite, "progress": options.stage("writing")}
    if source.adapter is not None and not options.merge:
        kind, verified = export_lora_gguf(source, dest, options.gguf, **common)
    else:
        kind, verified = export_gguf(source, dest, options.gguf, into=options.into, **common)
    return ExportResult(kind, dest, verified)


def _write_codes(source: Source, dest: Path, options: ExportOptions) -> ExportResult:
    """Writes a quantised checkpoint for other programs: of a model, an adapter's base, or both merged."""
    format, merge = options.format, options.merge
    assert format is not None
    if options.into is not None or options.dtype is not None or (merge and source.adapter is None):
        raise UserError(
            f"--format {format} writes codes of {WRITERS[format].source}, of a model as it is or of an adapter merged",
            where="--format",
            fix="leave --into and --dtype out, and --merge where there is no adapter",
        )
    done = export_quantised(
        source,
        dest,
        format,
        merge=merge,
        any_base=options.any_base,
        overwrite=options.overwrite,
        max_shard_bytes=options.max_shard_bytes,
        chat_template=_template(source),
        progress=options.progress,
    )
    write_digests(dest)
    kind = f"a {format} checkpoint ({done.config})"
    if done.base_alone:
        kind += " of the base that the adapter was trained over, without the adapter,"
    of = "trained" if merge or done.base_alone else "read and quantised"
    written = done.written
    how = f"{written.quantised} weights in codes, logits within {written.difference:.1e} (relative) of what was {of}"
    if written.experts_note:
        how += f"; {written.experts_note}"
    return ExportResult(kind, dest, how)


def _write_adapter(source: Source, dest: Path, options: ExportOptions) -> ExportResult:
    """Copies an adapter after checking its base, and compares every array of the copy with the original."""
    adapter = source.adapter
    assert adapter is not None
    if options.dtype is not None:
        raise UserError("dtype is for whole models", where="dtype", fix="add --merge, or leave dtype out")
    if dest.resolve() == adapter.resolve():
        raise UserError("source and destination are the same directory", where=str(dest), fix="give another --to")
    if dest.is_dir() and any(dest.iterdir()) and not options.overwrite:
        raise UserError(f"{dest} is not empty", where=str(dest), fix="give another directory, or add --overwrite")
    spec = _spec_of(source)
    original = load_adapter(adapter, spec)
    check_base(original, str(source.base), base_hash(source.base))
    with publish_directory(dest, CONFIG) as folder:
        _copy_tree(adapter, folder, options.stage("writing"))
        write_digests(folder)
        copy = load_adapter(folder, spec)
        ours, theirs = (jax.tree.leaves(flatten(loaded.trainable)) for loaded in (original, copy))
        if copy.config != original.config or not all(map(np.array_equal, ours, theirs)):
            raise ExportError("the copy of the adapter differs from the original", where=str(dest), fix="try again")
    return ExportResult("a PEFT adapter", dest, "all of its weights are equal")


def _write_published(source: Source, dest: Path, options: ExportOptions) -> ExportResult:
    """Merges an adapter into its base and writes the result in the format that the base is published in."""
    if source.adapter is None or options.into == "dequantised" or options.dtype is not None:
        raise UserError(
            "--format published writes an adapter and its base in the base's own format",
            where="--format",
            fix="give a run with an adapter, or an adapter, and leave --into and --dtype out",
        )
    spec = _spec_of(source, "float32")
    adapter, fingerprint = _load_mergeable(source, spec, options)
    tied = spec.tied
    spec, params = attach(load_params(source.base, spec, progress=options.stage("reading")), spec, adapter)
    if spec.tied != tied:
        raise UserError(
            "the adapter gives the model a head of its own, which its base's files do not have",
            where="--format",
            fix="leave --format out",
        )
    expected = probe_logits(params, spec)
    nodes = nodes_to_write(spec, {path.rpartition("/")[0] for path in flatten(adapter.trainable)})
    flat = flatten(params)
    changed = {path: leaf for path, leaf in flat.items() if path.rpartition("/")[0] in nodes or path == SHARED}
    publication = Publication(
        dest,
        locate(source.tokenizer, allow=TOKENIZER),
        _template(source),
        merge_record(adapter.base, fingerprint, None),
        options.overwrite,
        options.max_shard_bytes,
        source.ends,
    )
    leaves = flatten(merge_adapters(unflatten(changed)))
    done = republish(leaves, spec, source.base, publication, expected, options.stage("writing"))
    write_digests(done.path)
    assert spec.published is not None
    lost = f"{done.quantised} weights quantised again, which moved their numbers by up to {done.moved:.1%}, "
    how = f"{lost if done.quantised else ''}logits within {done.difference:.1e} (relative) of what was trained"
    return ExportResult(f"a model in {spec.published.method}, as its base is published,", done.path, how)


@dataclasses.dataclass(frozen=True)
class _Weights:
    """The weights to write as a model. For a merged adapter: the logits that they must reproduce, the record of the
    merge, and how the result names its base and the weights it is compared with."""

    spec: ModelSpec
    params: Tree
    expected: np.ndarray | None = None
    record: dict[str, object] | None = None
    base_note: str = ""
    compared_with: str = "trained"


def _write_model(source: Source, dest: Path, options: ExportOptions) -> ExportResult:
    """Writes a full model in one dtype: the source's, or an adapter merged into its base."""
    spec = _spec_of(source)
    if options.dtype not in (None, spec.dtype) and (source.adapter is not None or _has_float32(source.base)):
        spec = _spec_of(source, "float32")  # round once, to `dtype`, and add adapters in float32
    if source.adapter is not None:
        weights = _merge(source, spec, options)
    elif options.merge:
        raise _nothing_to_merge(source)
    else:
        reading = options.stage("reading")
        unquantised = QuantizeConfig(UNQUANTISED)
        weights = _Weights(spec, load_params(source.base, spec, quantize=unquantised, progress=reading))
    done = export_model(
        weights.params,
        weights.spec,
        source.base,
        dest,
        dtype=options.dtype,
        max_shard_bytes=options.max_shard_bytes,
        overwrite=options.overwrite,
        expected=weights.expected,
        tokenizer=locate(source.tokenizer, allow=TOKENIZER),
        chat_template=_template(source),
        record=weights.record,
        progress=options.stage("writing"),
        checking=options.stage("checking"),
        pad=padding_id(load_tokenizer(source.tokenizer)) if weights.spec.scored else None,
        ends=source.ends,
    )
    write_digests(done.path)
    compared = f"{done.verified.tensors} tensors equal, logits within {done.verified.difference:.1e} (relative)"
    kind = f"a model in {done.dtype}{weights.base_note}, {len(done.files)} file(s),"
    return ExportResult(kind, done.path, f"{compared} of what was {weights.compared_with}")


def _merge(source: Source, spec: ModelSpec, options: ExportOptions) -> _Weights:
    """Merges the source's adapter into the base that `options.into` selects."""
    adapter, fingerprint = _load_mergeable(source, spec, options)
    quantised, trained_on = merged_into(adapter.base, options.into), adapter.base.quantize
    reading = options.stage("reading")
    spec, params = attach(load_params(source.base, spec, quantize=quantised, progress=reading), spec, adapter)
    expected = probe_logits(params, spec)
    base_note, compared_with = "", "trained"
    if trained_on is not None:
        base_note = f", merged into the {'full-precision' if quantised is None else 'dequantised'} base"
        compared_with = "trained" if quantised else "merged; the adapter was trained on the quantised base"
    elif spec.published is not None:
        base_note = f", merged into the numbers that its base's {spec.published.method} codes stand for"
    record = merge_record(adapter.base, fingerprint, quantised)
    return _Weights(spec, merge_adapters(params), expected, record, base_note, compared_with)


def _load_mergeable(source: Source, spec: ModelSpec, options: ExportOptions) -> tuple[LoadedAdapter, str]:
    """Loads the source's adapter to merge it; returns it with the hash of its base, which is checked."""
    assert source.adapter is not None
    adapter, fingerprint = load_adapter(source.adapter, spec).mergeable, base_hash(source.base)
    if not options.any_base:
        check_base(adapter, str(source.base), fingerprint)
    return adapter, fingerprint


def _spec_of(source: Source, dtype: str | None = None) -> ModelSpec:
    """The spec of the base, with its tower where the adapter changes that; else the tower passes through."""
    spec, _ = load_spec(source.base, dtype)
    if source.adapter is None or not adapts_tower(source.adapter, spec):
        return spec
    return load_spec(source.base, dtype, vision=True)[0]


def _has_float32(model: Path) -> bool:
    """Whether a model's files hold float32, whatever its config says."""
    return (model / LINK).exists() or any(info.dtype == "F32" for info in headers(model).values())


def _nothing_to_merge(resolved: Source) -> UserError:
    return UserError(
        "there is no adapter to merge: this is a whole model already",
        where=str(resolved.base),
        fix="leave --merge out to write it in another dtype or other file sizes",
    )


def _template(resolved: Source) -> str | None:
    """Returns the chat template of a run; None for that of the tokenizer's own files, where several are named."""
    if resolved.chat_template is None:
        return None
    chat_template = load_tokenizer(resolved.tokenizer, resolved.chat_template).chat_template
    return chat_template if isinstance(chat_template, str) else None


def merge_record(base: BaseRecord, hash: str, quantised: QuantizeConfig | None) -> dict[str, object]:
    """Returns the provenance of a merged model, stored under "meshtune" in the metadata of its files."""
    fields: dict[str, object] = {"base": base.path, "hash": hash}
    if base.quantize is not None:
        fields |= {"trained_on": base.quantize, "into": "full" if quantised is None else "dequantised"}
    return {"merged": fields}


def _copy_tree(source: Path, dest: Path, progress: Callable[[int, int], None] | None) -> None:
    total = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
    done = 0

    def copy_file(file: str, to: str) -> None:
        nonlocal done
        shutil.copy2(file, to)
        done += os.path.getsize(file)
        if progress:
            progress(done, total)

    shutil.copytree(source, dest, dirs_exist_ok=True, copy_function=copy_file)


# What writes an export: the first whose condition holds.
EXPORTS: dict[
    str, tuple[Callable[[Source, ExportOptions], bool], Callable[[Source, Path, ExportOptions], ExportResult]]
] = {
    "GGUF": (lambda source, options: options.gguf is not None, _write_gguf),
    "codes": (lambda source, options: options.format in WRITERS, _write_codes),
    "adapter": (lambda source, options: source.adapter is not None and not options.merge, _write_adapter),
    "published": (lambda source, options: options.format is not None, _write_published),
    "model": (lambda source, options: True, _write_model),
}
