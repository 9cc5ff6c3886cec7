"""Resumes training of an adapter on the base it was trained on."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib

import jax
from jaxtyping import PyTree

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.method import FIELD, PreparedModel
from meshtune.adapters.peft_config import PeftConfig, read_config
from meshtune.adapters.peft_format import (
    CONFIG,
    WEIGHTS,
    BaseRecord,
    attach,
    check_base,
    load_adapter,
    open_tensors,
    read_fields,
)
from meshtune.adapters.peft_tensors import sort
from meshtune.adapters.placement import cast
from meshtune.arrays.tree import Tree, flatten, unflatten
from meshtune.errors import UserError
from meshtune.mesh.layout import Layout
from meshtune.model.spec import ModelSpec

# Options that an adapter records: a recipe may repeat them, but not change them.
RECORDED = ("adapter", "rank", "alpha", "targets", "rslora", "train_modules")


def resumed_config(source: str | os.PathLike[str], spec: ModelSpec, requested: LoraConfig) -> LoraConfig:
    """The method that resumes training of the adapter in `source`: its type, ranks, alphas and modules are the
    adapter's, dropout is the requested one.

    Reads only the adapter's config and the names of its tensors. Raises UserError where it is no adapter of a base of
    this spec, and where an option is requested that differs from the adapter's.
    """
    source = pathlib.Path(source)
    peft = read_config(read_fields(source), str(source / CONFIG))
    with open_tensors(source / WEIGHTS) as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    content = sort(shapes, spec, peft, str(source / WEIGHTS))
    defaults = {field.name: field.default for field in dataclasses.fields(LoraConfig)}
    for field in RECORDED:
        value, recorded = getattr(requested, field), getattr(peft.config, field)
        if value not in (defaults[field], recorded):
            raise UserError(
                f"{field} is {value!r}, and the adapter to go on with has {recorded!r}",
                where=f"method.{field}, model.adapter",
                fix="leave it out: it is read from the adapter",
            )
    sizes = {name: (peft.rank(name), peft.alpha(name)) for name in content.adapted}
    return dataclasses.replace(
        peft.config,
        dropout=requested.dropout,
        targets=tuple(content.adapted),
        train_modules=tuple(content.full),
        ranks=tuple((name, rank) for name, (rank, _) in sizes.items() if rank != peft.config.rank),
        alphas=tuple((name, alpha) for name, (_, alpha) in sizes.items() if alpha != peft.config.alpha),
        token_rows=_rows(peft, list(content.rows), str(source)),
        continued=str(source),
    )


def _rows(peft: PeftConfig, modules: list[str], where: str) -> tuple[int, ...]:
    choices = set(peft.rows(modules).values())
    if len(choices) > 1:
        raise UserError(
            "the adapter has rows of other tokens in the embedding than in the head, which cannot be trained further",
            where=f"{where}, {FIELD}",
            fix="fold it in (model.merge_adapters) and begin a new adapter",
        )
    return choices.pop() if choices else ()


def resume_adapter(
    source: str | os.PathLike[str], abstract: PreparedModel, spec: ModelSpec, params: Tree, layout: Layout | None = None
) -> PreparedModel:
    """The model with the adapter in `source`, split like `abstract`, which is that of the method `resumed_config`.

    `params`, loaded with `abstract.spec`, is consumed. All processes of a mesh call this. Raises UserError where the
    adapter changes the spec of its base.
    """
    adapted, tree = attach(params, abstract.spec, load_adapter(source, spec, layout))
    if adapted != abstract.spec:
        raise UserError(
            "the adapter to go on with makes another model of its base (its head is not the embedding any more)",
            where=str(source),
            fix="fold it in instead: meshtune export --merge, and give the result as model.path",
        )
    flat = flatten(tree)
    del tree
    trainable = {path: _as(leaf, flat.pop(path), layout) for path, leaf in flatten(abstract.trainable).items()}
    return PreparedModel(abstract.spec, unflatten(trainable), unflatten(flat))


def _as(like: PyTree, leaf: PyTree, layout: Layout | None) -> PyTree:
    """A leaf in its abstract form: an adapter's options, such as dropout, are the run's."""
    adapter = jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(leaf))
    return cast(adapter, like, layout)


def check_continued(source: str | os.PathLike[str], spec: ModelSpec, base: BaseRecord) -> None:
    """Raises UserError where the adapter records a base other than `base`, or one quantised in another way."""
    assert base.hash is not None
    loaded = load_adapter(source, spec)
    try:
        check_base(loaded, base.path, base.hash)
    except UserError as error:
        raise UserError(error.what, where=error.where, fix=f"{error.fix}; or set model.any_base=true") from error
    if loaded.base.hash is not None and loaded.base.quantize != base.quantize:
        ours, theirs = (record.quantize or "a base as it is" for record in (base, loaded.base))
        raise UserError(
            f"the adapter was trained on {theirs}, and this run has {ours}",
            where=f"{source}, quantize",
            fix="quantize the base in the same way, or set model.any_base=true to begin where the numbers differ",
        )


def content_hash(source: str | os.PathLike[str]) -> str:
    """'sha256:...' of an adapter's config and tensors."""
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        with (pathlib.Path(source) / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return f"sha256:{digest.hexdigest()}"
