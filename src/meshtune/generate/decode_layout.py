"""Weights as decoding on a CPU reads them fastest: every layer's by itself, matrices in tiles.

A decode step of few rows reads every weight once, so the memory's bandwidth bounds it. Two things keep XLA for CPUs
away from that bound. A scan over stacked layers copies each layer's slice before it computes with it, so each layer's
arrays are arrays of their own and the layers are unrolled. And a product with a large matrix reads short pieces of its
rows, so matrices lie in tiles that are each read from end to end (model.tiled); see benchmarks/cpu_serving.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp

from meshtune.adapters.lora import LoRA
from meshtune.adapters.multi_lora import MultiLoRA
from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree, flatten, unflatten
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec, abstract_params
from meshtune.model.tiled import TiledWeight
from meshtune.quantize.weight import QuantisedWeight

LEAST_BYTES = 64 << 20  # of weights: smaller ones stay in the processor's caches, where neither matters
MEMORY_SHARE = 0.25  # of the machine's memory, which the second copy of the weights may take
PRODUCTS = (LoRA, MultiLoRA)  # adapters that add to the weight's product, and do not read the weight themselves


def decodes_from_copy(params: Tree, compute: Compute) -> bool:
    """Whether decoding is worth a second copy of these weights: float32 ones of some size on a CPU device."""
    leaves = jax.tree.leaves(params)
    if compute.layout is not None or (compute.platform or jax.default_backend()) != "cpu":
        return False
    if any(leaf.dtype != jnp.float32 for leaf in flatten(params).values() if isinstance(leaf, jax.Array)):
        return False
    if any(isinstance(leaf, QuantisedWeight) for leaf in flatten(params).values()):
        return False
    size = sum(leaf.nbytes for leaf in leaves)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return LEAST_BYTES <= size <= MEMORY_SHARE * memory


def decode_layout(params: Tree, spec: ModelSpec) -> Tree:
    """The parameters with every stacked node of layers as a tuple of each layer's, and matrices as TiledWeight.

    What is no matrix of a linear layer, or has an adapter that reads the weight itself, is not tiled. A tied head
    becomes a weight of its own, tiled; the embedding stays, for its rows are looked up.
    """
    layers = {
        key: _layers(node, flatten(abstract_params(spec)["layers"][key])) for key, node in params["layers"].items()
    }
    return params | {"layers": layers} | _head(params, spec)


def _layers(node: Tree, specs: dict[str, ArraySpec]) -> tuple[Tree, ...]:
    """Each layer's node of a stacked one."""
    flat = flatten(node)
    repeats = jax.tree.leaves(node)[0].shape[0]

    def tiled(path: str) -> bool:
        owner, _, last = path.rpartition("/")
        adapter = flat.get(f"{owner}/adapter")
        matrix = last == "weight" and path in specs and specs[path].role == "matrix" and len(specs[path].shape) == 3
        return matrix and (adapter is None or isinstance(adapter, PRODUCTS))

    def leaf(path: str, value: Any, number: int) -> Any:
        one = jax.tree.map(lambda array: array[number], value)
        return TiledWeight.of(one) if tiled(path) else one

    return tuple(unflatten({path: leaf(path, value, n) for path, value in flat.items()}) for n in range(repeats))


def _head(params: Tree, spec: ModelSpec) -> Tree:
    head = params.get("head", {})
    adapter = head.get("adapter")
    if (
        spec.scored
        or (spec.norm_head and "scale" not in head)
        or not (adapter is None or isinstance(adapter, PRODUCTS))
    ):
        return {}
    weight = params["embed"]["weight"] if spec.tied and "weight" not in head else head["weight"]
    return {"head": head | {"weight": TiledWeight.of(weight)}}
