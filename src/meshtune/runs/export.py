"""Exports a run, adapter or model to a directory that other tools load, verified by reading it back."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from meshtune.adapters.merge import merged
from meshtune.adapters.method import SHARED
from meshtune.adapters.peft_format import CONFIG, BaseRecord, attach, check_base, load_adapter
from meshtune.arrays.tree import flatten, unflatten
from meshtune.data.tokenizer import load_tokenizer, padding_id
from meshtune.digests import write_digests
from meshtune.errors import UserError, nearest
from meshtune.quantize.config import UNQUANTISED, QuantizeConfig
from meshtune.quantize.published.write import WRITERS
from meshtune.runs.export_quantised import export_quantised, nodes_to_write
from meshtune.runs.merged_into import merged_into
from meshtune.runs.progress import StageProgress, of_stage
from meshtune.runs.sources import Source, find
from meshtune.weights.export import export_model
from meshtune.weights.fingerprint import base_hash
from meshtune.weights.hub import TOKENIZER, locate
from meshtune.weights.load import load_params, load_spec
from meshtune.weights.publish import published
from meshtune.weights.republish import republish
from meshtune.weights.rewrite import Publication
from meshtune.weights.safetensors_files import LINK, headers
from meshtune.weights.verify import ExportError, probe_logits

FORMATS = ("published", *WRITERS)


@dataclasses.dataclass(frozen=True)
class ExportResult:
    """The result of an export.

    `what` names its kind ("a PEFT adapter", "a model in float32"), `verified` describes the check of the written files.
    """

    what: str
    path: Path
    verified: str


def export(
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    merge: bool = False,
    into: str | None = None,
    format: str | None = None,
    base: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    any_base: bool = False,
    gguf: str | None = None,
    progress: StageProgress | None = None,
) -> ExportResult:
    """Exports `source` (a run, an adapter directory or a model) to the directory `dest`.

    An adapter is copied unless `merge` is set: then it is merged into its base and written as a full model in `dtype`
    (default: the base's), in files of at most `max_shard_bytes`. `into` selects the base of an adapter that was trained
    on a quantised base: "dequantised", the quantised weights that it was trained on (default), or "full", the original
    weights; every written file records it. With `format` "bitsandbytes" or "compressed-tensors" (without `merge`: a
    model, or the base that the adapter was trained over) linear layers are written as codes of nf4 or int4. With
    `format` "published" a base that is published quantised is written in
    its format again: what was not adapted is copied, what was is quantised again. `base` overrides the path of an
    adapter's base, and `any_base` accepts a different base. With `gguf`, a type such as "Q4_K_M", `dest` is a GGUF file
    for llama.cpp (see runs.export_gguf). `progress(stage, done, total)` is told how far each stage is. `dest` appears
    complete and verified, or not at all.

    Raises: UserError for a source without a result, for a base that is not the adapter's, and for a `dest` that is not
    empty.
    """
    resolved = find(source) if base is None else find(base, source)
    dest = Path(dest).expanduser()
    if gguf is not None:
        return _as_gguf(resolved, dest, gguf, merge, format, dtype, into, any_base, overwrite, progress)
    if dest.suffix == ".gguf":
        raise UserError(
            f"'{dest.name}' is the name of a GGUF file, and this writes a folder",
            where="--to",
            fix="add --gguf Q4_K_M (or another type) for a GGUF file, or name a folder",
        )
    if format is not None and format not in FORMATS:
        raise UserError(
            f"there is no format '{format}'", where="--format", fix=f"{nearest(format, FORMATS)}one of {FORMATS}"
        )
    if format is not None and format in WRITERS:
        return _as_codes(resolved, dest, format, merge, into, dtype, any_base, overwrite, max_shard_bytes, progress)
    if resolved.adapter is not None and not merge:
        if dtype is not None:
            raise UserError("dtype is for whole models", where="dtype", fix="add --merge, or leave dtype out")
        return _adapter(resolved, resolved.adapter, dest, overwrite, progress)
    if format is not None:
        return _as_published(resolved, dest, format, into, dtype, any_base, overwrite, max_shard_bytes, progress)
    spec, _ = load_spec(resolved.base)
    if dtype not in (None, spec.dtype) and (resolved.adapter is not None or _has_float32(resolved.base)):
        spec, _ = load_spec(resolved.base, "float32")  # round once, to `dtype`, and add adapters in float32
    expected, record, base_note, of = None, None, "", "trained"
    reading = of_stage(progress, "reading")
    if resolved.adapter is not None:
        added = load_adapter(resolved.adapter, spec).mergeable
        fingerprint = base_hash(resolved.base)
        if not any_base:
            check_base(added, str(resolved.base), fingerprint)
        quantised = merged_into(added.base, into)
        record = merge_record(added.base, fingerprint, quantised)
        spec, params = attach(load_params(resolved.base, spec, quantize=quantised, progress=reading), spec, added)
        expected = probe_logits(params, spec)
        params = merged(params)
        if added.base.quantize is not None:
            base_note = f", merged into the {'full-precision' if quantised is None else 'dequantised'} base"
            of = "trained" if quantised else "merged; the adapter was trained on the quantised base"
        elif spec.published is not None:
            base_note = f", merged into the numbers that its base's {spec.published.method} codes stand for"
    elif merge:
        raise _nothing_to_merge(resolved)
    else:
        params = load_params(resolved.base, spec, quantize=QuantizeConfig(UNQUANTISED), progress=reading)
    done = export_model(
        params,
        spec,
        resolved.base,
        dest,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
        expected=expected,
        tokenizer=locate(resolved.tokenizer, allow=TOKENIZER),
        chat_template=_template(resolved),
        record=record,
        progress=of_stage(progress, "writing"),
        checking=of_stage(progress, "checking"),
        pad=padding_id(load_tokenizer(resolved.tokenizer)) if spec.scored else None,
        ends=resolved.ends,
    )
    write_digests(done.path)
    compared = done.verified
    how = f"{compared.tensors} tensors equal, logits within {compared.difference:.1e} (relative) of what was {of}"
    return ExportResult(f"a model in {done.dtype}{base_note}, {len(done.files)} file(s),", done.path, how)


def _as_gguf(
    resolved: Source,
    dest: Path,
    file_type: str,
    merge: bool,
    format: str | None,
    dtype: str | None,
    into: str | None,
    any_base: bool,
    overwrite: bool,
    progress: StageProgress | None,
) -> ExportResult:
    """Writes a GGUF file: of an adapter by itself only where it is not to be merged."""
    from meshtune.runs.export_gguf import export_gguf
    from meshtune.runs.export_lora_gguf import export_lora_gguf

    if format is not None or dtype is not None:
        raise UserError(
            "a GGUF file has types of its own, not a format or a dtype",
            where="--format" if format is not None else "--dtype",
            fix=f"leave it out: --gguf {file_type} says how numbers are stored",
        )
    if resolved.adapter is None and merge:
        raise _nothing_to_merge(resolved)
    if resolved.adapter is not None and not merge:
        kind, verified = export_lora_gguf(
            resolved, dest, file_type, any_base=any_base, overwrite=overwrite, progress=of_stage(progress, "writing")
        )
    else:
        kind, verified = export_gguf(
            resolved,
            dest,
            file_type,
            into=into,
            any_base=any_base,
            overwrite=overwrite,
            progress=of_stage(progress, "writing"),
        )
    return ExportResult(kind, dest, verified)


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


def _as_codes(
    resolved: Source,
    dest: Path,
    format: str,
    merge: bool,
    into: str | None,
    dtype: str | None,
    any_base: bool,
    overwrite: bool,
    max_shard_bytes: int,
    progress: StageProgress | None,
) -> ExportResult:
    """Writes a quantised checkpoint for other programs: of a model, an adapter's base, or both merged."""
    if into is not None or dtype is not None or (merge and resolved.adapter is None):
        raise UserError(
            f"--format {format} writes codes of {WRITERS[format].source}, of a model as it is or of an adapter merged",
            where="--format",
            fix="leave --into and --dtype out, and --merge where there is no adapter",
        )
    done = export_quantised(
        resolved,
        dest,
        format,
        merge=merge,
        any_base=any_base,
        overwrite=overwrite,
        max_shard_bytes=max_shard_bytes,
        chat_template=_template(resolved),
        progress=progress,
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


def _as_published(
    resolved: Source,
    dest: Path,
    format: str,
    into: str | None,
    dtype: str | None,
    any_base: bool,
    overwrite: bool,
    max_shard_bytes: int,
    progress: StageProgress | None,
) -> ExportResult:
    """Merges an adapter into its base and writes the result in the format that the base is published in."""
    if resolved.adapter is None or into == "dequantised" or dtype is not None:
        raise UserError(
            "--format published writes an adapter and its base in the base's own format",
            where="--format",
            fix="give a run with an adapter, or an adapter, and leave --into and --dtype out",
        )
    spec, _ = load_spec(resolved.base, "float32")
    added = load_adapter(resolved.adapter, spec).mergeable
    fingerprint = base_hash(resolved.base)
    if not any_base:
        check_base(added, str(resolved.base), fingerprint)
    tied = spec.tied
    spec, params = attach(load_params(resolved.base, spec, progress=of_stage(progress, "reading")), spec, added)
    if spec.tied != tied:
        raise UserError(
            "the adapter gives the model a head of its own, which its base's files do not have",
            where="--format",
            fix="leave --format out",
        )
    expected = probe_logits(params, spec)
    nodes = nodes_to_write(spec, {path.rpartition("/")[0] for path in flatten(added.trainable)})
    flat = flatten(params)
    changed = {path: leaf for path, leaf in flat.items() if path.rpartition("/")[0] in nodes or path == SHARED}
    done = republish(
        flatten(merged(unflatten(changed))),
        spec,
        resolved.base,
        Publication(
            dest,
            locate(resolved.tokenizer, allow=TOKENIZER),
            _template(resolved),
            merge_record(added.base, fingerprint, None),
            overwrite,
            max_shard_bytes,
            resolved.ends,
        ),
        expected,
        of_stage(progress, "writing"),
    )
    write_digests(done.path)
    assert spec.published is not None
    lost = f"{done.quantised} weights quantised again, which moved their numbers by up to {done.moved:.1%}, "
    how = f"{lost if done.quantised else ''}logits within {done.difference:.1e} (relative) of what was trained"
    return ExportResult(f"a model in {spec.published.method}, as its base is published,", done.path, how)


def merge_record(base: BaseRecord, hash: str, quantised: QuantizeConfig | None) -> dict[str, object]:
    """Returns the provenance of a merged model, stored under "meshtune" in the metadata of its files."""
    fields: dict[str, object] = {"base": base.path, "hash": hash}
    if base.quantize is not None:
        fields |= {"trained_on": base.quantize, "into": "full" if quantised is None else "dequantised"}
    return {"merged": fields}


def _adapter(
    resolved: Source, adapter: Path, dest: Path, overwrite: bool, progress: StageProgress | None
) -> ExportResult:
    """Copies an adapter after checking its base, and compares every array of the copy with the original."""
    if dest.resolve() == adapter.resolve():
        raise UserError("source and destination are the same directory", where=str(dest), fix="give another --to")
    if dest.is_dir() and any(dest.iterdir()) and not overwrite:
        raise UserError(f"{dest} is not empty", where=str(dest), fix="give another directory, or add --overwrite")
    spec, _ = load_spec(resolved.base)
    original = load_adapter(adapter, spec)
    check_base(original, str(resolved.base), base_hash(resolved.base))
    with published(dest, CONFIG) as folder:
        _copy_tree(adapter, folder, of_stage(progress, "writing"))
        write_digests(folder)
        copy = load_adapter(folder, spec)
        ours, theirs = (jax.tree.leaves(flatten(loaded.trainable)) for loaded in (original, copy))
        if copy.config != original.config or not all(map(np.array_equal, ours, theirs)):
            raise ExportError("the copy of the adapter differs from the original", where=str(dest), fix="try again")
    return ExportResult("a PEFT adapter", dest, "all of its weights are equal")


def _copy_tree(source: Path, dest: Path, progress: Callable[[int, int], None] | None) -> None:
    total = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
    done = 0

    def copied(file: str, to: str) -> None:
        nonlocal done
        shutil.copy2(file, to)
        done += os.path.getsize(file)
        if progress:
            progress(done, total)

    shutil.copytree(source, dest, dirs_exist_ok=True, copy_function=copied)
