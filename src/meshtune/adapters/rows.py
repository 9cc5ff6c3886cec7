"""Which rows of the embedding and of the head a method trains while the others stay unchanged."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.registry import ADAPTERS
from meshtune.arrays.spec import ArraySpec
from meshtune.errors import UserError
from meshtune.mesh.layout import Layout
from meshtune.model.inputs import ROWS, TokenRows
from meshtune.model.spec import ModelSpec

# In PEFT: the tensor of a module's rows, and the field of an adapter_config.json that says which they are.
TENSOR, FIELD = "token_adapter.trainable_tokens_delta", "trainable_token_indices"


def rows_by_node(
    adapters: LoraConfig | None, spec: ModelSpec, nodes_in_full: set[str], adapted: set[str]
) -> dict[str, tuple[int, ...]]:
    """The rows that are trained by themselves, by node: of the embedding, and of an untied head.

    Raises UserError where an adapter on the same matrix, or its kind, does not go with them.
    """
    if adapters is None or not adapters.token_rows:
        return {}
    fix = "train the whole matrices instead: method.train_modules: [embed_tokens, lm_head]"
    tables = [node for node in ("embed", "head") if not (node == "head" and (spec.tied or spec.scored))]
    tables = [node for node in tables if node not in nodes_in_full]
    if tables and "head" in adapted:
        raise UserError(
            "the head is to have an adapter and the rows of new tokens",
            where="method.targets, model.new_tokens",
            fix=fix,
        )
    if tables and ADAPTERS[adapters.adapter].PEFT_FIELDS["peft_type"] != "LORA":
        raise UserError(
            f"peft's format of {adapters.adapter} adapters has no place for the rows of new tokens",
            where="method.adapter, model.new_tokens",
            fix=fix,
        )
    return dict.fromkeys(tables, adapters.token_rows)


def abstract_rows(
    rows: Mapping[str, tuple[int, ...]], leaves: Mapping[str, ArraySpec], dtype: str
) -> dict[str, TokenRows]:
    """By path, with ArraySpecs for arrays; `leaves` are the model's."""
    return {f"{node}/{ROWS}": TokenRows.abstract(leaves[f"{node}/weight"], ids, dtype) for node, ids in rows.items()}


def begun_rows(abstract: TokenRows, weight: jax.Array, layout: Layout | None) -> TokenRows:
    """The rows as the weight has them; on a mesh where the layout says."""
    where = None if layout is None else layout.of(abstract.values)
    return dataclasses.replace(abstract, values=jax.jit(abstract.of, out_shardings=where)(weight))
