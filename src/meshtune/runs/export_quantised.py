"""Exports a model in the codes that it was trained over, or an adapter merged and quantised again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from meshtune.adapters.merge import merge_adapters
from meshtune.adapters.method import SHARED
from meshtune.adapters.peft_format import LoadedAdapter, attach, check_base, load_adapter
from meshtune.arrays.tree import Leaves, flatten, unflatten
from meshtune.errors import UserError
from meshtune.families import tensors
from meshtune.model.spec import ModelSpec
from meshtune.quantize.config import UNQUANTISED, QuantizeConfig
from meshtune.quantize.published.write import WRITERS, Writer
from meshtune.quantize.weight import QuantisedWeight
from meshtune.runs.progress import StageProgress, of_stage
from meshtune.runs.sources import Source
from meshtune.weights.export import Publication
from meshtune.weights.export_codes import WrittenCodes, export_codes
from meshtune.weights.hub import TOKENIZER, locate
from meshtune.weights.inspect import base_hash
from meshtune.weights.load import load_params, load_spec
from meshtune.weights.verify import probe_logits


@dataclasses.dataclass(frozen=True)
class QuantisedExport:
    """The written codes, their quantisation, and whether they are of an adapter's base without the adapter."""

    written: WrittenCodes
    config: QuantizeConfig
    base_alone: bool


def export_quantised(
    resolved: Source,
    dest: Path,
    format: str,
    *,
    merge: bool,
    any_base: bool,
    overwrite: bool,
    max_shard_bytes: int,
    chat_template: str | None,
    progress: StageProgress | None = None,
) -> QuantisedExport:
    """Writes a model, or the base of an adapter, as a checkpoint of `format`, one of WRITERS.

    An adapter's base has the codes that the adapter was trained over. With `merge` the adapter is merged first, and the
    weights that it changes are quantised again. Raises UserError for a base that is kept or published in other codes.
    """
    writer = WRITERS[format]
    spec, _ = load_spec(resolved.base)
    if spec.published is not None:
        raise UserError(
            f"this base is published quantised by {spec.published.method}: its own codes are what is trained over",
            where="--format",
            fix="serve the base as it is published, or --format published",
        )
    adapter, hash = None, base_hash(resolved.base)
    if resolved.adapter is not None:
        adapter = load_adapter(resolved.adapter, spec)
        adapter = adapter.mergeable if merge else adapter
        if not any_base:
            check_base(adapter, str(resolved.base), hash)
    config = _config(adapter, writer)
    params = load_params(resolved.base, spec, quantize=config, progress=of_stage(progress, "reading"))
    record: dict[str, object] = {"quantised": {"base": str(resolved.base), "hash": hash, "quantize": str(config)}}
    changed: frozenset[str] = frozenset()
    if merge and adapter is not None:
        tied = spec.tied
        spec, params = attach(params, spec, adapter)
        if spec.tied != tied:
            raise UserError(
                "the adapter gives the model a head of its own, which its base's files do not have",
                where="--format",
                fix="leave --format out",
            )
        expected = probe_logits(params, spec)
        leaves, changed = _merge(flatten(params), spec, adapter)
        record = {"merged": {"base": str(resolved.base), "hash": hash, "into": str(config)}}
    else:
        expected, leaves = probe_logits(params, spec), flatten(params)
    written = export_codes(
        leaves,
        changed,
        spec,
        config,
        resolved.base,
        Publication(
            dest,
            locate(resolved.tokenizer, allow=TOKENIZER),
            chat_template,
            record,
            overwrite,
            max_shard_bytes,
            resolved.ends,
        ),
        writer,
        expected,
        of_stage(progress, "writing"),
    )
    return QuantisedExport(written, config, adapter is not None and not merge)


def _config(adapter: LoadedAdapter | None, writer: Writer) -> QuantizeConfig:
    """How the weights are quantised: as the adapter was trained, or in the format that the writer writes."""
    config = None if adapter is None else adapter.base.quantised
    if config is None:
        return QuantizeConfig(writer.source)
    formats = {config.format, *config.modules.values()} - {UNQUANTISED}
    if formats != {writer.source}:
        raise UserError(
            f"the adapter was trained over a base in {', '.join(sorted(formats)) or 'full precision'}, and "
            f"{writer.name} holds {writer.source}",
            where="--format",
            fix=next((f"--format {w.name}" for w in WRITERS.values() if {w.source} == formats), "leave --format out"),
        )
    return config


def _merge(leaves: Leaves, spec: ModelSpec, adapter: LoadedAdapter) -> tuple[Leaves, frozenset[str]]:
    """The leaves without adapters, quantised again where they were, and the paths of other leaves that changed."""
    nodes = nodes_to_write(spec, {path.rpartition("/")[0] for path in flatten(adapter.trainable)})
    part = {path: leaf for path, leaf in leaves.items() if path.rpartition("/")[0] in nodes or path == SHARED}
    result = {path: leaf for path, leaf in leaves.items() if path not in part}
    changed = set()
    for path, numbers in flatten(merge_adapters(unflatten(dict(part)))).items():
        before = part.get(path)
        if isinstance(before, QuantisedWeight):
            result[path] = QuantisedWeight.quantise(numbers, before.config)
        else:
            result[path] = numbers
            changed.add(path)
    return result, frozenset(changed)


def nodes_to_write(spec: ModelSpec, nodes: set[str]) -> set[str]:
    """Returns some nodes of a model, and those that share a tensor of its files with them."""
    table = tensors(spec)
    names = {entry.name for entry in table if entry.path.rpartition("/")[0] in nodes}
    return {entry.path.rpartition("/")[0] for entry in table if entry.name in names}
