"""Checks adapters on a mixture of experts, where users rarely mean only a part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from meshtune.adapters.config import LoraConfig
from meshtune.errors import UserError

if TYPE_CHECKING:
    from meshtune.adapters.targets import Module


def check_experts(config: LoraConfig, chosen: Mapping[str, Module]) -> None:
    """Raises UserError where the shared expert is adapted and no routed one, for experts or a type of adapter that do
    not go together, and for dropout."""
    experts = [name for name, module in chosen.items() if module.role == "experts"]
    shared = [name for name, module in chosen.items() if "/shared/" in module.node]
    if shared and not experts:
        raise UserError(
            f"the targets match the shared expert alone ({shared[0]}), which is a small part of what computes a token",
            where="method.targets",
            fix="add 'experts', which are all routed experts, or take the shared expert's modules out",
        )
    if not experts:
        return
    if config.adapter != "lora":
        raise UserError(
            f"adapter {config.adapter} is not possible on experts, such as {experts[0]}",
            where="method.adapter, method.targets",
            fix="use method.adapter: lora, or name the linear layers outside the experts",
        )
    if config.dropout:
        raise UserError(
            "adapters on experts cannot have dropout: peft has none there, and would not read them",
            where="method.dropout",
            fix="set dropout to 0, or leave the experts out of method.targets",
        )
