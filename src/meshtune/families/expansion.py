"""A deeper model that computes the same: LLaMA-Pro's block expansion (https://arxiv.org/abs/2401.02415).

The layers are divided into as many groups as there are new ones; after each group comes a copy of its last layer whose
output projections are zero, so that it adds nothing until it is trained.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.errors import UserError
from meshtune.families import model_spec, module_names
from meshtune.model.layer import LayerSpec
from meshtune.model.spec import ModelSpec, Stack, stacks_of

SILENT = ("attn/o", "mlp/down")  # sites whose weights and biases are zero in a new layer


def origins(layers: int, blocks: int) -> list[tuple[int, bool]]:
    """For each layer of the deeper model, the layer it is made from and whether it is a new one.

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
    """The numbers of the new layers in a model of `layers`, these included."""
    return [number for number, (_, new) in enumerate(origins(layers - blocks, blocks)) if new]


def expanded_config(config: dict[str, Any], blocks: int) -> dict[str, Any]:
    """The Hugging Face config of the deeper model. Raises UserError where it cannot say which of its layers slide."""
    old = model_spec(config)
    made = origins(old.layers, blocks)
    kinds = [layer for stack in old.stacks for _ in range(stack.repeats) for layer in stack.pattern]
    new = config | {"num_hidden_layers": len(made)}
    if isinstance(config.get("layer_types"), list):
        new["layer_types"] = [config["layer_types"][source] for source, _ in made]
    elif len(set(kinds)) > 1:
        new["layer_types"] = [
            "full_attention" if getattr(kinds[n].mixer, "window", None) is None else "sliding_attention"
            for n, _ in made
        ]
    found = model_spec(new)
    if [layer for stack in found.stacks for _ in range(stack.repeats) for layer in stack.pattern] != [
        kinds[source] for source, _ in made
    ]:
        raise UserError(
            "this model's layers differ in a way that its config cannot say of more layers",
            where="method.blocks",
            fix="use method: lora, full or freeze",
        )
    return new


def grouped(spec: ModelSpec, blocks: int) -> ModelSpec:
    """The deeper model's spec with its layers stacked group by group, the new layer of each last: all new layers are
    then arrays of their own. As it is where the groups differ in more than their weights."""
    flat: list[LayerSpec] = [layer for stack in spec.stacks for _ in range(stack.repeats) for layer in stack.pattern]
    size = len(flat) // blocks
    if blocks > 1 and flat == flat[:size] * blocks:
        return dataclasses.replace(spec, stacks=(Stack(tuple(flat[:size]), blocks),))
    return dataclasses.replace(spec, stacks=stacks_of(flat))


def silent_modules(spec: ModelSpec, blocks: int) -> set[str]:
    """HF names of the modules of a deeper model that are zero to begin with."""
    numbers = {key: numbers for key, _, _, numbers in spec.positions()}
    new = set(new_layers(spec.layers, blocks))
    found = set()
    for node, names in module_names(spec).items():
        if node.startswith("layers/") and node.split("/", 2)[2] in SILENT:
            found |= {name for name, number in zip(names, numbers[node.split("/")[1]], strict=True) if number in new}
    return found
