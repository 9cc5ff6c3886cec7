"""Going on with an adapter that was trained before, on the base it was trained on."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
from typing import Any

import jax

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.method import Prepared, cast
from meshtune.adapters.peft_config import PeftConfig, read_config
from meshtune.adapters.peft_format import (
    CONFIG,
    WEIGHTS,
    BaseRecord,
    attach,
    check_base,
    load_adapter,
    opened,
    read_fields,
)
from meshtune.adapters.peft_tensors import sort
from meshtune.adapters.rows import FIELD
from meshtune.arrays.tree import Tree, flatten, unflatten
from meshtune.errors import UserError
from meshtune.mesh.layout import Layout
from meshtune.model.spec import ModelSpec

# What an adapter says itself, and a recipe may only repeat.
TOLD = ("adapter", "rank", "alpha", "targets", "rslora", "train_modules")


def continued(source: str | os.PathLike[str], spec: ModelSpec, asked: LoraConfig) -> LoraConfig:
    """The method that goes on with the adapter in `source`, of a base of this spec: its kind, ranks, alphas and modules
    are the adapter's, dropout is as `asked`.

    Read from the config and the names of the tensors alone. Raises UserError where it is no adapter of this base, and
    where something else is asked for than it is.
    """
    source = pathlib.Path(source)
    peft = read_config(read_fields(source), str(source / CONFIG))
    with opened(source / WEIGHTS) as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    content = sort(shapes, spec, peft, str(source / WEIGHTS))
    defaults = {field.name: field.default for field in dataclasses.fields(LoraConfig)}
    for field in TOLD:
        wanted, there = getattr(asked, field), getattr(peft.config, field)
        if wanted not in (defaults[field], there):
            raise UserError(
                f"{field} is {wanted!r}, and the adapter to go on with has {there!r}",
                where=f"method.{field}, model.adapter",
                fix="leave it out: it is read from the adapter",
            )
    own = {name: (peft.rank(name), peft.alpha(name)) for name in content.adapted}
    return dataclasses.replace(
        peft.config,
        dropout=asked.dropout,
        targets=tuple(content.adapted),
        train_modules=tuple(content.full),
        ranks=tuple((name, rank) for name, (rank, _) in own.items() if rank != peft.config.rank),
        alphas=tuple((name, alpha) for name, (_, alpha) in own.items() if alpha != peft.config.alpha),
        token_rows=_rows(peft, list(content.rows), str(source)),
        continued=str(source),
    )


def _rows(peft: PeftConfig, modules: list[str], where: str) -> tuple[int, ...]:
    found = set(peft.rows(modules).values())
    if len(found) > 1:
        raise UserError(
            "the adapter has rows of other tokens in the embedding than in the head, which cannot be trained further",
            where=f"{where}, {FIELD}",
            fix="fold it in (model.merge_adapters) and begin a new adapter",
        )
    return found.pop() if found else ()


def begun(
    source: str | os.PathLike[str], made: Prepared, spec: ModelSpec, params: Tree, layout: Layout | None = None
) -> Prepared:
    """The model with the adapter in `source` on it, split as `made` (the abstract of the method `continued`) says.

    `params`, loaded with `made.spec`, is used up. All processes of a mesh call this. Raises UserError where the adapter
    makes another model of its base.
    """
    found, whole = attach(params, made.spec, load_adapter(source, spec, layout))
    if found != made.spec:
        raise UserError(
            "the adapter to go on with makes another model of its base (its head is not the embedding any more)",
            where=str(source),
            fix="fold it in instead: meshtune export --merge, and give the result as model.path",
        )
    flat = flatten(whole)
    del whole
    trainable = {path: _as(leaf, flat.pop(path), layout) for path, leaf in flatten(made.trainable).items()}
    return Prepared(made.spec, unflatten(trainable), unflatten(flat))


def _as(like: Any, leaf: Any, layout: Layout | None) -> Any:
    """A leaf as its abstract form is: what is no array of an adapter, such as dropout, is as the run has it."""
    same = jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(leaf))
    return cast(same, like, layout)


def check_continued(source: str | os.PathLike[str], spec: ModelSpec, base: BaseRecord) -> None:
    """Raises UserError where the adapter records another base than `base`, or one that was quantised otherwise."""
    assert base.hash is not None
    loaded = load_adapter(source, spec)
    try:
        check_base(loaded, base.path, base.hash)
    except UserError as error:
        raise UserError(error.what, where=error.where, fix=f"{error.fix}; or set model.any_base=true") from error
    if loaded.base.hash is not None and loaded.base.quantize != base.quantize:
        ours, theirs = (one.quantize or "a base as it is" for one in (base, loaded.base))
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
