"""The modules that get adapters: what the lists of names and switches of other tools come to for a model."""

from __future__ import annotations

import re

from meshtune.config.foreign.draft import Draft
from meshtune.config.foreign.model_layers import EXPERTS, Targets, every_linear, layers_of_model, named

PAIRED = "gate and up of an expert have adapters of their own here, one for both there"


def put_targets(
    draft: Draft, chosen: list[str] | None, *keys: str, by_class: bool, converts: bool, experts: bool = False
) -> None:
    """Writes the modules to adapt, once the model is in the draft: `chosen` names, or every linear layer for None, and
    with `experts` the routed experts, which the file asks for by their parameters.

    `by_class`: the tool looks for linear layers by their class, not by peft's all-linear. `converts`: its peft reads
    names of experts' matrices as the routed experts.
    """
    expressions = [name for name in chosen or [] if re.search(r"[^\w.*-]", name)]
    if expressions:
        why = f"{', '.join(expressions)}: among several names an expression is compared as a name, there too"
        draft.refuse(keys[0], why, "list the modules' names")
        return
    model = draft.settings.get("model.path")
    layers = layers_of_model(str(model.value)) if model else None
    if layers is None or (chosen is None and not layers.is_mixture):
        selected = Targets(tuple(chosen or ()))
    elif chosen is None:
        selected = every_linear(layers, by_class=by_class, converts=converts)
    else:
        selected = named(chosen, layers, converts=converts)
    names = [name for name in selected.names if name != EXPERTS]
    routed = experts or EXPERTS in selected.names
    if chosen is None and not names:
        draft.put("method.targets", "all-linear", *keys)
        routed = False
    elif not names and not routed:
        draft.refuse(keys[0], f"{model.value if model else 'the model'}: {selected.note}", "name other modules")
        return
    else:
        note = "; ".join(filter(None, (selected.note, PAIRED if routed else "")))
        draft.put("method.targets", [*names, *([EXPERTS] * routed)], *keys, note=note, differs=bool(note))
    dropout = draft.settings.get("method.dropout")
    if routed and dropout is not None and dropout.value:
        note = "adapters on experts have none, there or here, and here all of a run have one rate"
        draft.put("method.dropout", 0.0, "lora_dropout", note=note, differs=True)
