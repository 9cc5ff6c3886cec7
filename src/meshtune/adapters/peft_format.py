"""Adapters on disk, as peft reads and writes them: adapter_config.json and adapter_model.safetensors.

Facts beyond peft's fields (the base's hash, the version that wrote it) are in the safetensors metadata.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import os
import pathlib
from collections.abc import Callable, Hashable
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
from jaxtyping import PyTree

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.kind import Adapter, AdapterType
from meshtune.adapters.method import SHARED, arrange_model, held_weight, restack, uniform, used_up
from meshtune.adapters.peft_config import PeftConfig, read_config, write_config
from meshtune.adapters.peft_experts import PREFIX
from meshtune.adapters.peft_tensors import Content, collect, names_of_nodes, read, read_shared, sort
from meshtune.adapters.registry import ADAPTERS
from meshtune.adapters.targets import modules, partial_layers
from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree, flatten, merge, unflatten
from meshtune.errors import UserError
from meshtune.families import scored_spec
from meshtune.json_text import parse_json, read_json
from meshtune.mesh.layout import Layout
from meshtune.mesh.processes import SINGLE_PROCESS, Job, raise_collectively
from meshtune.model.spec import ModelSpec
from meshtune.quantize.config import QuantizeConfig
from meshtune.weights.publish import disk_errors, publish_directory
from meshtune.weights.writer import write_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclasses.dataclass(frozen=True)
class BaseRecord:
    """The base that an adapter was trained against. `hash` is weights.fingerprint's, or None where the writer recorded
    none.

    `quantize` are the fields of the QuantizeConfig that the base was quantised with, or None.
    """

    path: str
    hash: str | None = None
    quantize: dict[str, Any] | None = None

    @property
    def quantised(self) -> QuantizeConfig | None:
        """How the base was quantised. Raises UserError for what this version does not know."""
        return None if self.quantize is None else QuantizeConfig(**self.quantize)


def quantize_record(config: QuantizeConfig | None) -> dict[str, object] | None:
    """Returns the fields for `BaseRecord.quantize`."""
    if config is None:
        return None
    left_out = [name for name, value in (("modules", config.modules), ("requantise", config.requantise)) if not value]
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in left_out}


@dataclasses.dataclass(frozen=True)
class LoadedAdapter:
    """An adapter read from disk: adapters, and modules trained in full, as `trainable` for `spec`.

    `spec` differs from the base's where layers are adapted differently (its stacks are split) and where the adapter
    unties the head from the embedding. `copies` are weights of the base, by HF module, that peft wrote along with an
    adapted head; `frozen` is what the adapters share.
    """

    config: LoraConfig
    spec: ModelSpec
    trainable: Tree
    base: BaseRecord
    copies: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    frozen: Tree = dataclasses.field(default_factory=dict)

    @property
    def mergeable(self) -> LoadedAdapter:
        """The adapter for a model to merge it into: a tied head that it adapts gets a separate weight."""
        if not (self.spec.tied and "head/adapter" in flatten(self.trainable)):
            return self
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, tied=False))


def save_adapter(
    dest: str | os.PathLike[str],
    trainable: Tree,
    spec: ModelSpec,
    config: LoraConfig,
    base: BaseRecord,
    *,
    shared: PyTree = None,
    check: Callable[[pathlib.Path], None] | None = None,
    job: Job = SINGLE_PROCESS,
) -> pathlib.Path:
    """Writes the adapter directory `dest`, whole or not at all; an adapter already there is replaced.

    `check` is called with the directory before it gets its name, and may raise: `verify.export_adapter` reloads there.
    In a tied model a trained embedding is written as embed_tokens and as lm_head, which every peft keeps equal.
    Where `trainable` is spread over processes all of `job` call this; process 0 writes, a block of a tensor at a time.
    `shared` is what the adapters read in common.
    Raises UserError where `dest` holds something else than an adapter, and what `check` raises.
    """
    dest = pathlib.Path(dest)
    written = collect(trainable, spec, config, shared)
    among = modules(spec)
    fields = write_config(
        config,
        base.path,
        written.adapted,
        written.ranks,
        written.alphas,
        written.trained,
        [name for name, module in among.items() if module.role != "experts"],
        scored=spec.scored,
        rows=written.rows,
        parameters=written.parameters,
        transposed=any(among[name].transposed for name in written.adapted),
        composite=spec.composite is not None,
        partial=partial_layers(spec, among),
    )
    record = {
        "base": {field: value for field, value in dataclasses.asdict(base).items() if value is not None},
        "rank": config.rank,
        "alpha": config.alpha,
        "targets": fields["target_modules"],
        "version": importlib.metadata.version("meshtune"),
    }
    if written.expert_parts:
        record["experts"] = written.expert_parts
    with publish_directory(dest, CONFIG, job) as partial:
        with raise_collectively(job, "adapter: files"), disk_errors(dest):
            metadata = {"format": "pt", "meshtune": json.dumps(record)}
            for _ in write_file(partial / WEIGHTS, written.tensors, metadata, writes=job.is_main_process):
                pass
            if job.is_main_process:
                (partial / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        if check is not None:
            check(partial)
    return dest


def load_adapter(source: str | os.PathLike[str], spec: ModelSpec, layout: Layout | None = None) -> LoadedAdapter:
    """Reads an adapter that Meshtune or peft wrote for a base of this spec.

    Adapters come as float32, modules trained in full in the dtype they have on disk; on the default device, or as
    `layout` says, each process reading what its devices hold.
    Raises UserError, naming file, field or tensor, for whatever is missing, does not fit the base or is unsupported.
    """
    source = pathlib.Path(source)
    peft = read_config(read_fields(source), str(source / CONFIG))
    if peft.scored and not spec.scored:
        spec = scored_spec(spec)
    with open_tensors(source / WEIGHTS) as file:
        peft = dataclasses.replace(peft, expert_parts=_expert_parts(file, source / WEIGHTS))
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        content = sort(shapes, spec, peft, str(source / WEIGHTS))
        if spec.tied and _unties(content, peft, spec, file):
            spec = dataclasses.replace(spec, tied=False)
        among = modules(spec)
        full = [name for name in content.full if not (spec.tied and among[name].node == "head")]
        choice: dict[str, Hashable] = dict.fromkeys(full, "full")
        makers: dict[str, Callable[[ArraySpec], Adapter]] = {}
        for name in content.adapted:
            module_config = peft.config_of(among[name], content.views.get(name))
            choice[name] = (choice.get(name), module_config.rank, module_config.alpha)
            makers[name] = functools.partial(_abstract, ADAPTERS[peft.kind], module_config)
        spec = uniform(spec, choice)
        rows = {among[name].node: ids for name, ids in peft.rows(list(content.rows)).items()}
        trainable = read(arrange_model(spec, full, makers, "float32", rows).trainable, spec, file, content, layout)
        copies = {module: file.get_tensor(name) for name, module in content.copies.items()}
        shared = read_shared(spec, file, content, peft, layout) if content.adapted else None
        frozen = {} if shared is None else {SHARED: shared}
        return LoadedAdapter(peft.config, spec, trainable, record_of(file.metadata() or {}, peft), copies, frozen)


def _abstract(kind: type[AdapterType], config: LoraConfig, weight: ArraySpec) -> Adapter:
    return kind.abstract(weight, config)


def adapts_tower(source: pathlib.Path, spec: ModelSpec) -> bool:
    """Whether an adapter has tensors of the tower or the projector of its base, which `spec` may lack."""
    if spec.composite is None:
        return False
    pairs = spec.composite.modules
    towers = tuple(f"{PREFIX}{own}" for own, in_memory in pairs if own == in_memory and own != "lm_head")
    with open_tensors(source / WEIGHTS) as file:
        return any(name.startswith(towers) for name in file.keys())  # noqa: SIM118


def attach(params: Tree, spec: ModelSpec, adapter: LoadedAdapter) -> tuple[ModelSpec, Tree]:
    """The base with the adapter: the spec and the whole tree for the model functions. `params` is used up.

    Raises UserError where the adapter carries weights of its base that are not this base's.
    """
    check_copies(params, spec, adapter)
    base_spec = dataclasses.replace(spec, tied=adapter.spec.tied, scored=adapter.spec.scored)
    weights = used_up(restack(params, base_spec, adapter.spec))
    if adapter.spec.scored:
        weights.pop("head/weight", None)
    elif spec.tied and not adapter.spec.tied:
        weights["head/weight"] = jnp.copy(weights["embed/weight"])  # merging uses weights up
    for path in flatten(adapter.trainable):
        weights.pop(path, None)
    kind = ADAPTERS[adapter.config.adapter]
    for path, leaf in flatten(adapter.trainable).items():
        node, _, last = path.rpartition("/")
        if last == "adapter":
            fixed = kind.derived(leaf, adapter.config, weights[held_weight(node, adapter.spec)])
            weights |= {} if fixed is None else {f"{node}/fixed": fixed}
    return adapter.spec, merge(merge(unflatten(weights), adapter.trainable), adapter.frozen)


def check_copies(params: Tree, spec: ModelSpec, adapter: LoadedAdapter) -> None:
    """Raises UserError where the adapter carries weights of its base that are not this base's."""
    names = {name: node for node, owners in names_of_nodes(spec).items() for name in owners}
    for name, copy in adapter.copies.items():
        weight = params["embed" if names[name] == "head" and spec.tied else names[name]]["weight"]
        if not np.array_equal(np.asarray(weight, np.float32), np.asarray(copy, np.float32)):
            raise UserError(
                f"the adapter carries a {name} that is not this base's",
                where=f"{WEIGHTS}, {name}.base_layer.weight",
                fix="give the base this adapter was trained on (a resized vocabulary is a change of the base too)",
            )


def check_base(adapter: LoadedAdapter, path: str, hash: str) -> None:
    """Raises UserError where the adapter records another base than the one at `path` with this hash."""
    if adapter.base.hash is not None and adapter.base.hash != hash:
        raise UserError(
            f"the adapter was trained on another base: {adapter.base.path} ({adapter.base.hash}), not {path} ({hash})",
            where=f"{WEIGHTS}, metadata",
            fix=f"give the base it was trained on: {adapter.base.path}",
        )


def _unties(content: Content, peft: PeftConfig, spec: ModelSpec, file: safetensors.safe_open) -> bool:
    """Whether peft, with this adapter, would use a head that differs from the embedding."""
    names = names_of_nodes(spec)
    if names["head"][0] in content.rows:
        return True
    table, head = (content.full.get(names[node][0]) for node in ("embed", "head"))
    if table and head:
        return not np.array_equal(file.get_tensor(table["weight"]), file.get_tensor(head["weight"]))
    return bool(head or table) and not peft.fields.get("ensure_weight_tying")


def record_of(metadata: dict[str, str], peft: PeftConfig) -> BaseRecord:
    """Reads the record of an adapter's base, from the metadata of its tensors and its config."""
    if "meshtune" in metadata:
        try:
            return BaseRecord(**parse_json(metadata["meshtune"], WEIGHTS)["base"])
        except (KeyError, TypeError) as error:
            raise UserError(
                "the metadata do not say what the adapter's base is", where=f"{WEIGHTS}, metadata", fix=SAVE_AGAIN
            ) from error
    return BaseRecord(peft.fields.get("base_model_name_or_path") or "unknown")


def _expert_parts(file: safetensors.safe_open, path: pathlib.Path) -> dict[str, list[str]]:
    metadata = parse_json((file.metadata() or {}).get("meshtune", "{}"), f"{path}, metadata")
    parts = metadata.get("experts", {}) if isinstance(metadata, dict) else None
    if not isinstance(parts, dict) or not all(isinstance(names, list) for names in parts.values()):
        raise UserError("the metadata of experts are malformed", where=f"{path}, metadata", fix=SAVE_AGAIN)
    return parts


SAVE_AGAIN = "save the adapter again"


def read_fields(source: pathlib.Path) -> dict[str, object]:
    """The fields of an adapter directory's adapter_config.json. Raises UserError if they are not there."""
    path = source / CONFIG
    if not path.exists():
        message = f"no adapter at {source}: " + (
            "the directory does not exist" if not source.exists() else f"no {CONFIG}"
        )
        raise UserError(message, where=str(path), fix="give a directory with a PEFT adapter")
    try:
        return read_json(path)
    except UserError as error:
        raise UserError(
            f"{CONFIG} is not JSON: {error.what}", where=error.where, fix="save the adapter again"
        ) from error


def open_tensors(path: pathlib.Path) -> safetensors.safe_open:
    """An adapter's tensors, to read one by one. Raises UserError if they are not there, or not whole."""
    if not path.is_file():
        pickled = (path.parent / "adapter_model.bin").exists()
        raise UserError(
            f"{WEIGHTS} is missing" + (", and adapter_model.bin is a pickle, which Meshtune never opens" * pickled),
            where=str(path),
            fix="save it with peft's save_pretrained(..., safe_serialization=True)" if pickled else "copy it whole",
        )
    try:
        return safetensors.safe_open(str(path), framework="np")
    except safetensors.SafetensorError as error:
        raise UserError(
            f"{WEIGHTS} is damaged or only half written: {error}", where=str(path), fix="copy or save it again"
        ) from error
