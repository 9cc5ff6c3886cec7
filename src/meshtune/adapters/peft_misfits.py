"""Errors for the tensors of an adapter's file that do not fit the base or the config beside them."""

from __future__ import annotations

from collections.abc import Mapping

from meshtune.adapters.registry import ADAPTERS
from meshtune.errors import UserError

OF_EMBEDDINGS = (".lora_embedding_A", ".lora_embedding_B")  # ends of the names that peft gives a LoRA of an embedding


def check_shape(
    name: str, shapes: Mapping[str, tuple[int, ...]], expected: tuple[int, ...], where: str, note: str = ""
) -> None:
    if tuple(shapes[name]) != expected:
        raise UserError(
            f"tensor {name} is {_by(shapes[name])}, but the base needs {_by(expected)}{note}",
            where=where,
            fix="give the base this adapter was trained on (base_model_name_or_path), and its own adapter_config.json",
        )


def misfit(name: str, where: str, why: str) -> UserError:
    return UserError(
        f"tensor {name} does not fit: {why}",
        where=where,
        fix="give the base this adapter was trained on; of peft's kinds, "
        + f"{', '.join(sorted(ADAPTERS))} on linear layers is supported",
    )


def missing(name: str, where: str) -> UserError:
    return UserError(
        f"tensor {name} is missing, which the adapter_config.json beside it promises",
        where=where,
        fix="the adapter is only half there: copy or save it again",
    )


def on_embedding(module: str, where: str, *, tied: bool) -> UserError:
    """Says that `module`, an embedding, has a LoRA, and what can be done instead."""
    untied = ", after giving the head a weight of its own" if tied else ""
    return UserError(
        f"the adapter has a LoRA on {module}, and LoRA on an embedding is not supported here",
        where=where,
        fix=f"merge it into its base with peft{untied} and give the result as the model (docs/adapters.md, 'LoRA on "
        "embeddings', has the lines), or train again with the matrices in full: method.train_modules: [embed_tokens, "
        "lm_head]",
    )


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(str(n) for n in shape)
