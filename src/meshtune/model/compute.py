"""How the model's numbers are computed: choices that change speed and memory, never the mathematics."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax

from meshtune.mesh.layout import Layout


@dataclasses.dataclass(frozen=True)
class Compute:
    """Resolved choices ('auto' is settled before this exists, but for attention, which settles by shape).

    `dtype` is that of activations and matrix products; `loss_chunk` is in tokens of one row.
    `layout` says how activations lie on a mesh; None: on one device.
    """

    dtype: str = "float32"
    remat: Literal["none", "selective", "full"] = "none"
    attention: Literal["auto", "direct", "blockwise"] = "auto"
    loss_chunk: int = 256
    scan: bool = True
    layout: Layout | None = None


def compiler_options() -> dict[str, str] | None:
    """For a program that meets bf16 weights, or None where this backend needs nothing.

    XLA multiplies in float32 on a CPU. Left to itself it widens the weights of all layers before the loop over them,
    and holds twice the model once more; this way each layer is widened when its turn comes.
    """
    if jax.default_backend() != "cpu":
        return None
    return {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}
