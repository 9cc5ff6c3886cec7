"""The layers of a model as the analytic models see them: what every position of a stack costs, and its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from meshtune.arrays.spec import LAYERS, ArraySpec
from meshtune.model.block import Activation, Block, Cost
from meshtune.model.config import ExchangeName
from meshtune.model.expert_exchange import HEADROOM, choose_exchange
from meshtune.model.layer_extras import AltUpSpec
from meshtune.model.spec import ModelSpec

# The roles of weights by which tokens are multiplied in layers. Vectors and filters are too small to count.
MATRICES = ("matrix", "router")


@dataclasses.dataclass(frozen=True)
class BlockCost:
    """The cost of a block in one layer, and the elements of its weights.

    `dense` elements multiply every token. Of those of `experts`, every token is multiplied by the share
    `active_experts`. The paths of its parameters begin with `prefix`.
    """

    cost: Cost
    prefix: str
    dense: int
    experts: int

    @property
    def active_experts(self) -> float:
        return (self.cost.weights - self.dense) / self.experts if self.experts else 1.0

    def local_weights(self, tp: int, ep: int) -> float:
        """Elements of its weights on one device when they are gathered over all mesh axes but tp and ep."""
        return (self.dense + self.experts / ep) / tp

    def exchange(self, ep: int, requested: ExchangeName) -> str | None:
        """How tokens reach their experts over ep; None where they stay where they are."""
        return choose_exchange(requested, ep, self.cost.chosen).exchange if ep > 1 and self.cost.dispatched else None

    def routed_rows(self, ep: int, requested: ExchangeName) -> float:
        """Rows of a routed array on one device, for each that its own tokens fill: there is room for all that could be
        sent by a gather, and for somewhat more than an even share in a round of an all-to-all."""
        rows = {None: 1.0, "gather": float(ep), "all_to_all": HEADROOM}
        return rows[self.exchange(ep, requested)]

    def widest(self, tp: int, routed_rows: float = 1.0) -> float:
        """The width on one device of the widest array that exists for one chunk of a row at a time."""
        arrays = [a for a in self.cost.activations if not a.whole_rows]
        return max((_width(a, tp, routed_rows) for a in arrays), default=0.0)

    def whole_rows(self, tp: int) -> float:
        """The summed width on one device of the arrays that exist for whole rows: keys and values."""
        return sum(a.width / min(tp, a.units) for a in self.cost.activations if a.whole_rows)

    def saved_bytes(self, tp: int, itemsize: int, routed_rows: float = 1.0) -> float:
        """Bytes per token, on one device, of the arrays that the remat policy `selective` saves."""
        arrays = [a for a in self.cost.activations if a.kept]
        return sum(_width(a, tp, routed_rows) * (a.itemsize or itemsize) for a in arrays)

    def product_width(self, tp: int) -> float:
        """Elements per token that its matrix products read or write, beside the block's input and output."""
        return sum(a.products * a.width / min(tp, a.units) for a in self.cost.activations)

    def elementwise_width(self, tp: int, routed_rows: float = 1.0) -> float:
        """Elements per token that the operations between its matrix products read or write."""
        return sum(a.elementwise * _width(a, tp, routed_rows) for a in self.cost.activations)


def _width(array: Activation, tp: int, routed_rows: float) -> float:
    """Elements of an array per token on one device."""
    return array.width / min(tp, array.units) * (routed_rows if array.routed else 1.0)


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """A position of a stack: `repeats` layers of a mixer and a feed-forward network, either of which may be absent, and
    of what stands `beside` them.

    The paths of its parameters begin with `prefix`.
    """

    prefix: str
    repeats: int
    mixer: BlockCost | None
    ffn: BlockCost | None
    beside: tuple[BlockCost, ...] = ()

    @property
    def blocks(self) -> tuple[BlockCost, ...]:
        return (*(block for block in (self.mixer, self.ffn) if block is not None), *self.beside)

    @property
    def active_weights(self) -> int:
        """Multiplications of one token by the weights of one layer, forward."""
        return sum(block.cost.weights for block in self.blocks)


def layer_costs(spec: ModelSpec, parameters: Mapping[str, ArraySpec]) -> tuple[LayerCost, ...]:
    """The cost of every position of a model's stacks. `parameters` are the model's arrays by path."""

    def block_cost(block: Block | AltUpSpec, layer: str, repeats: int) -> BlockCost:
        prefix = f"{layer}{block.name}/"
        arrays = [array for path, array in parameters.items() if path.startswith(prefix)]
        dense = sum(array.size for array in arrays if array.role in MATRICES) // repeats
        experts = sum(array.size for array in arrays if array.role == "experts") // repeats
        return BlockCost(block.cost(spec.embed), prefix, dense, experts)

    costs = []
    for key, repeats, layer, _ in spec.positions():
        prefix = f"{LAYERS}/{key}/"
        mixer, ffn, *beside = (
            None if block is None else block_cost(block, prefix, repeats)
            for block in (layer.mixer, layer.ffn, *(() if layer.extras is None else layer.extras.parts))
        )
        costs.append(LayerCost(prefix, repeats, mixer, ffn, tuple(block for block in beside if block is not None)))
    return tuple(costs)
