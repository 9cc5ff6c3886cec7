"""A deeper model that computes the same function: LLaMA-Pro's block expansion (https://arxiv.org/abs/2401.02415).

The layers are divided into as many groups as there are new layers; each group is followed by a copy of its last layer
whose output projections are zero, so that the copy adds nothing before it is trained.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import flatten, stack_path
from meshtune.errors import UserError
from meshtune.families import model_spec, tensors
from meshtune.families.composite import text_config, with_text_fields
from meshtune.model.layer import LayerSpec
from meshtune.model.spec import ModelSpec, Stack, abstract_params, stacks_of

BY_LAYER = ("layer_types", "layers_block_type", "no_rope_layers")  # fields that list something for every layer


def origins(layers: int, blocks: int) -> list[tuple[int, bool]]:
    """(source layer, whether it is new) of each layer of the deeper model.

    Raises UserError where the new layers cannot be spread evenly.
    """
    if blocks > layers or layers % blocks:
        fitting = [n for n in range(1, layers + 1) if layers % n == 0]
        raise UserError(
            f"{layers} layers cannot be divided into {blocks} groups of equally many, with a new layer after each",
            where="method.blocks",
            fix=f"give one of {', '.join(map(str, fitting))}",
        )
    size = layers // blocks
    return [(n, new) for n in range(layers) for new in ((False, True) if (n + 1) % size == 0 else (False,))]


def new_layers(layers: int, blocks: int) -> list[int]:
    """The indices of the new layers in a model of `layers`, new ones included."""
    return [index for index, (_, new) in enumerate(origins(layers - blocks, blocks)) if new]


def expanded_config(config: dict[str, Any], blocks: int) -> dict[str, Any]:
    """The Hugging Face config of the deeper model. Raises UserError where the config format cannot express it."""
    old = model_spec(config)
    if old.mtp_layers:
        raise UserError(
            "new layers cannot be added to a model whose checkpoint has layers that predict further tokens: they are "
            "numbered behind its own",
            where="method.blocks",
            fix="use method: lora, full or freeze",
        )
    if old.side is not None or any(kind.stores for kind in old.layer_kinds):
        raise UserError(
            "new layers cannot be added to a model with per-layer embeddings, or whose last layers read the keys and "
            "values of earlier ones",
            where="method.blocks",
            fix="use method: lora, full or freeze",
        )
    text = text_config(config)
    sources = [source for source, _ in origins(old.layers, blocks)]
    kinds = [layer for stack in old.stacks for _ in range(stack.repeats) for layer in stack.pattern]
    fields: dict[str, Any] = {"n_layer" if "n_layer" in text else "num_hidden_layers": len(sources)}  # GPT-2's name
    listed = [name for name in BY_LAYER if isinstance(text.get(name), list)]
    fields |= {name: [text[name][source] for source in sources] for name in listed}
    if not listed and len(set(kinds)) > 1:
        fields["layer_types"] = [
            "full_attention" if getattr(kinds[n].mixer, "window", None) is None else "sliding_attention"
            for n in sources
        ]
    new = with_text_fields(config, fields)
    deeper = model_spec(new)
    if [layer for stack in deeper.stacks for _ in range(stack.repeats) for layer in stack.pattern] != [
        kinds[source] for source in sources
    ]:
        raise UserError(
            "this model's layers differ in a way that its config cannot express for more layers",
            where="method.blocks",
            fix="use method: lora, full or freeze",
        )
    return new


def group_layers(spec: ModelSpec, blocks: int) -> ModelSpec:
    """The deeper model's spec with its layers stacked group by group, each with its new layer last, so that all new
    layers are arrays of their own. Unchanged stacks where the groups differ in more than their weights."""
    flat: list[LayerSpec] = [layer for stack in spec.stacks for _ in range(stack.repeats) for layer in stack.pattern]
    size = len(flat) // blocks
    if blocks > 1 and flat == flat[:size] * blocks:
        return dataclasses.replace(spec, stacks=(Stack(tuple(flat[:size]), blocks),))
    return dataclasses.replace(spec, stacks=stacks_of(flat))


def silent_modules(spec: ModelSpec, blocks: int) -> set[str]:
    """Names, as in files, of the modules of a deeper model whose weights and biases start at zero: those of its new
    layers that add to the residual stream. Raises UserError for experts."""
    layers = {key: numbers for (root, key), numbers in spec.layer_numbers().items() if root == ""}
    new = set(new_layers(spec.layers, blocks))
    leaves = flatten(abstract_params(spec))
    silent: set[str] = set()
    for entry in tensors(spec):
        node, _, leaf = entry.path.rpartition("/")
        adds, place = leaf == "weight" and _adds_to_residual(node, leaves[entry.path]), stack_path(node)
        if adds and place is not None and place.root == "" and layers[place.key][entry.index[0]] in new:
            silent.add(entry.module)
    return silent


def _adds_to_residual(node: str, weight: ArraySpec) -> bool:
    """Whether it is the output projection of a mixer or a feed-forward: a stacked matrix [embed, in]."""
    output = weight.is_stacked and weight.axes[-2] == "embed"
    if output and weight.role == "experts":
        raise UserError(
            f"{node} are the weights of experts, and layers with experts cannot be added yet",
            where="method",
            fix="use method: lora, full or freeze",
        )
    return output and weight.role == "matrix"
