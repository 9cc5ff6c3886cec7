"""The buffers of a model that every update adjusts by the sums of its layers: correction biases of routers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshtune.arrays.tree import Leaves, Tree, flatten, unflatten
from meshtune.model.block import Adjusted, Sums
from meshtune.model.spec import ModelSpec


def adjusted_buffers(spec: ModelSpec) -> list[str]:
    """The paths of these buffers in the tree of parameters."""
    return [f"{node}/{path}" for node, block, _ in _blocks(spec) for path in sorted(block.adjusted_buffers())]


def adjust_buffers(spec: ModelSpec, buffers: Tree, sums: Sums) -> Tree:
    """The buffers after an update, from those before it and the sums of the layers over the whole update."""
    before, after = flatten(buffers), Leaves()
    for node, block, layers in _blocks(spec):
        of_block = {path: before[f"{node}/{path}"] for path in block.adjusted_buffers()}
        after |= {f"{node}/{path}": leaf for path, leaf in block.adjust(of_block, sums, layers).items()}
    return unflatten(after)


def _blocks(spec: ModelSpec) -> Iterator[tuple[str, Adjusted, Sequence[int]]]:
    """(path of its node, block, the layers of its stacked parameters) for each block with such buffers."""
    for key, _, kind, layers in spec.positions():
        for block in kind.blocks:
            if isinstance(block, Adjusted) and block.adjusted_buffers():
                yield f"layers/{key}/{block.name}", block, layers
