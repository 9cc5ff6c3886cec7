"""From a run, an adapter or a model to a directory that other tools load, verified by reading it back."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from meshtune.adapters.merge import merged
from meshtune.adapters.peft_format import CONFIG, attach, check_base, load_adapter
from meshtune.adapters.publish import published
from meshtune.data.tokenizer import load_tokenizer
from meshtune.errors import UserError
from meshtune.generate.sources import Source, find
from meshtune.model.tree import flatten
from meshtune.weights.export import export_model
from meshtune.weights.fingerprint import base_hash
from meshtune.weights.hub import TOKENIZER, locate
from meshtune.weights.load import load_params, load_spec
from meshtune.weights.verify import ExportError, probe_logits


@dataclasses.dataclass(frozen=True)
class Exported:
    """`what` ("a PEFT adapter", "a model in float32") is at `path`; `verified` says how it was compared."""

    what: str
    path: Path
    verified: str


def export(
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    merge: bool = False,
    base: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """Writes what `source` (a run, an adapter directory, a model) holds to the directory `dest`.

    An adapter stays an adapter unless `merge` is set: then it is folded into its base and written as a whole model, in
    `dtype` (default: the base's), in files of at most `max_shard_bytes`. `base` says where an adapter's base lies if it
    was moved. `progress(done, total)` is called in bytes. `dest` appears whole and verified or not at all.
    Raises UserError for a source without a result, another base than the adapter's, a `dest` that holds something.
    """
    found = find(source) if base is None else find(base, source)
    dest = Path(dest).expanduser()
    if found.adapter is not None and not merge:
        if dtype is not None:
            raise UserError("dtype is for whole models", where="dtype", fix="add --merge, or leave dtype out")
        return _adapter(found, found.adapter, dest, overwrite)
    spec, _ = load_spec(found.base)
    params = load_params(found.base, spec)
    expected = None
    if found.adapter is not None:
        added = load_adapter(found.adapter, spec)
        check_base(added, str(found.base), base_hash(found.base))
        spec, params = attach(params, spec, added)
        expected = probe_logits(params, spec)
        params = merged(params)
    elif merge:
        raise UserError(
            "there is no adapter to merge: this is a whole model already",
            where=str(source),
            fix="leave --merge out to write it in another dtype or other file sizes",
        )
    template = None
    if found.chat_template is not None:
        own = load_tokenizer(found.tokenizer, found.chat_template).chat_template
        template = own if isinstance(own, str) else None  # several named ones stay in the tokenizer's own files
    done = export_model(
        params,
        spec,
        found.base,
        dest,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
        expected=expected,
        tokenizer=locate(found.tokenizer, allow=TOKENIZER),
        chat_template=template,
        progress=progress,
    )
    found = done.verified
    how = f"{found.tensors} tensors equal, logits within {found.difference:.1e} (relative) of what was trained"
    return Exported(f"a model in {done.dtype}, {len(done.files)} file(s),", done.path, how)


def _adapter(found: Source, adapter: Path, dest: Path, overwrite: bool) -> Exported:
    """Copies an adapter whose base is the right one, and compares every number of the copy with the original's."""
    if dest.resolve() == adapter.resolve():
        raise UserError("source and destination are the same directory", where=str(dest), fix="give another --to")
    if dest.is_dir() and any(dest.iterdir()) and not overwrite:
        raise UserError(f"{dest} is not empty", where=str(dest), fix="give another directory, or add --overwrite")
    spec, _ = load_spec(found.base)
    original = load_adapter(adapter, spec)
    check_base(original, str(found.base), base_hash(found.base))
    with published(dest, CONFIG) as folder:
        shutil.copytree(adapter, folder, dirs_exist_ok=True)
        copy = load_adapter(folder, spec)
        ours, theirs = (jax.tree.leaves(flatten(one.trainable)) for one in (original, copy))
        if copy.config != original.config or not all(map(np.array_equal, ours, theirs)):
            raise ExportError("the copy of the adapter differs from the original", where=str(dest), fix="try again")
    return Exported("a PEFT adapter", dest, f"its {len(ours)} arrays are equal")
