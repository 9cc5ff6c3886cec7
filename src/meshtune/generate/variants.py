"""The choices that variants of one base share when they are loaded: its mesh, how it is quantised, how a tokenizer is
read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import jax

from meshtune.data.tokenizer import check_vocabulary, load_tokenizer
from meshtune.errors import UserError
from meshtune.mesh.axes import make_mesh
from meshtune.mesh.config import AXES, MeshConfig, resolve_mesh
from meshtune.mesh.layout import Layout
from meshtune.model.sharding import check_experts, layout_for
from meshtune.model.spec import ModelSpec
from meshtune.quantize.config import UNQUANTISED, FormatName, QuantizeConfig, check_format
from meshtune.quantize.formats import FORMATS
from meshtune.runs.sources import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from meshtune.adapters.peft_format import LoadedAdapter


def tokenizer_on_disk(source: Source, vocab: int) -> PreTrainedTokenizerFast | None:
    """The tokenizer of a source that has its files; None where it may be one to download, which can wait."""
    if not (Path(source.tokenizer) / "tokenizer.json").is_file():
        return None
    tokenizer = load_tokenizer(source.tokenizer, source.chat_template)
    check_vocabulary(tokenizer, vocab)
    return tokenizer


def base_quantisation(
    quantize: QuantizeConfig | str | None, adapters: Mapping[str, LoadedAdapter]
) -> QuantizeConfig | None:
    """How the base of some adapters is to be quantised: with "auto" as they were trained on it. Raises UserError where
    they differ, and for an unknown format."""
    if quantize == "auto":
        trained_on = {name: adapter.base.quantised for name, adapter in adapters.items()}
        if len(set(trained_on.values())) > 1:
            listed = ", ".join(f"{name}: {config or 'none'}" for name, config in trained_on.items())
            raise UserError(
                f"the adapters were trained on bases that are quantised differently ({listed})",
                where="quantize",
                fix="say how the base is to be held (quantize: nf4, int8, fp8, int4 or none), or load them one by one",
            )
        return next(iter(trained_on.values()), None)
    if quantize is None or isinstance(quantize, QuantizeConfig):
        return quantize
    check_format(quantize, (*FORMATS, UNQUANTISED))
    return QuantizeConfig(cast(FormatName, quantize), requantise=quantize != UNQUANTISED)


def generation_layout(mesh: MeshConfig | Mapping[str, int] | None, spec: ModelSpec) -> Layout | None:
    """How a model that generates is sharded over all devices of the job; None on one device.

    Raises UserError for a mesh that the devices or the model do not allow, for cp, and for several processes without a
    mesh.
    """
    if mesh is None:
        if jax.process_count() > 1:
            raise UserError(
                f"{jax.process_count()} processes share one model only on a mesh",
                where="mesh",
                fix=f"give one, such as mesh.tp={jax.device_count()} (in Python mesh={{'tp': {jax.device_count()}}}), "
                "or mesh=run for that of a run",
            )
        return None
    config = mesh if isinstance(mesh, MeshConfig) else mesh_of(mesh)
    check_experts(config.ep, spec)
    if config.cp != 1:
        raise UserError(
            f"cp={config.cp} splits the sequences of training, and generation reads a token at a time",
            where="mesh.cp",
            fix="give its devices to mesh.tp or mesh.fsdp; a model that was tuned with cp can be used on any mesh",
        )
    if config.sizes == MeshConfig().sizes and jax.process_count() == 1:
        return None
    config = resolve_mesh(config, jax.device_count())
    return None if config.devices == 1 else layout_for(make_mesh(config), spec)[0]


def mesh_of(sizes: Mapping[str, int]) -> MeshConfig:
    """The mesh with these sizes of axes. Raises UserError for an unknown axis and an impossible size."""
    for axis in sizes:
        if axis not in AXES:
            raise UserError(f"a mesh has no axis '{axis}'", where=f"mesh.{axis}", fix=f"one of {', '.join(AXES)}")
    return MeshConfig(**sizes)


def read_adapters(
    sources: Mapping[str, Source], base: Path, spec: ModelSpec, *, rewards: bool
) -> dict[str, LoadedAdapter]:
    """The adapters of the sources that have one, on the default device.

    Raises UserError where a source is over another base than `base`, for adapters that do not fit it, and for reward
    models unless `rewards` allows them.
    """
    from meshtune.adapters.peft_format import check_base, load_adapter
    from meshtune.weights.fingerprint import base_hash

    adapters: dict[str, LoadedAdapter] = {}
    for name, source in sources.items():
        if source.base.resolve() != base.resolve():
            raise UserError(f"'{name}' is over another base, {source.base}", where=name, fix=f"give adapters of {base}")
        if source.adapter is not None:
            adapters[name] = load_adapter(source.adapter, spec)
            check_base(adapters[name], str(base), base_hash(base))
        if not rewards and (spec.scored or (name in adapters and adapters[name].spec.scored)):
            raise UserError(
                "this is a reward model: it gives a text a score, and writes none",
                where=str(source.adapter or base),
                fix="give the model it was made from, or load it with transformers' AutoModelForSequenceClassification",
            )
    return adapters
