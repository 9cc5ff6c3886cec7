"""Rematerialisation: what a layer keeps for its backward pass, and what is computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from meshtune.arrays.tree import Tree
from meshtune.kernels.attention import LOG_SUM_EXP, OUTPUT
from meshtune.kernels.row_order import ORDER
from meshtune.model.attention import ROTATED
from meshtune.model.compute import Compute
from meshtune.model.gather import GATHERED, is_offloaded
from meshtune.model.linear import NARROW, PRODUCT
from meshtune.model.router import CHOICE

RESIDUAL = "residual"  # the stream that enters a layer

# The results of matrix products (with LoRA the sum, not its parts) and of attention, and which experts compute a token.
SAVED = (PRODUCT, NARROW, ROTATED, OUTPUT, LOG_SUM_EXP, CHOICE, ORDER)


def rematerialised(layer: Callable[..., Any], compute: Compute, nodes: Tree) -> Callable[..., Any]:
    """`layer`, which keeps what compute.remat says; `nodes` are the parameters of the layers of a scan's body.

    Full saves only the residual stream between layers; selective also what `SAVED` names, each needed one once.

    None leaves it to JAX, which keeps whatever any derivative reads: between two products several arrays as wide as
    either. Computing those again from the products costs less than storing and loading them. Weights that are fetched
    for a layer, from other devices or from the host, are fetched again in the backward pass.
    """
    policies = jax.checkpoint_policies
    if compute.remat == "none":
        if compute.layout is None and not any(is_offloaded(leaf) for leaf in jax.tree.leaves(nodes)):
            return layer
        policy = policies.save_anything_except_these_names(GATHERED)
    elif RESIDUAL in compute.offload:
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=SAVED if compute.remat == "selective" else (),
            names_which_can_be_offloaded=(RESIDUAL,),
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        policy = policies.nothing_saveable if compute.remat == "full" else policies.save_only_these_names(*SAVED)
    # A barrier makes a layer wait for its cotangent: those of one body would otherwise all be computed again at once.
    return jax.checkpoint(layer, policy=policy, prevent_cse=not compute.scan or len(nodes) > 1)
