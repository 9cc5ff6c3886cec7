"""Activations by their names in config.json."""

from __future__ import annotations

from meshtune.families.config_fields import ConfigFields
from meshtune.model.activations import ActivationName

ACTIVATIONS: dict[str, ActivationName] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_pytorch": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}


def read_activation(fields: ConfigFields, field: str = "hidden_act", default: str = "silu") -> ActivationName:
    """The activation that a field names. Raises: UserError where it is not implemented."""
    name = fields.get(field, default)
    if name not in ACTIVATIONS:
        raise fields.error(field, f"{field} {name!r} is not implemented", f"known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
