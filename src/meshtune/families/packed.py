"""How files lay out the rows of fused projections, as views of them.

In memory the rows of a fused projection form groups that belong together, so that whatever splits the rows over
devices gives each device whole groups: all queries, keys and values of a key-value head (AttentionSpec.packed), the
gate and up of one number (MlpSpec.packed).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshtune.arrays.spec import ArraySpec
from meshtune.families.tensors import TensorMap, View, with_view
from meshtune.model.attention import AttentionSpec
from meshtune.model.spec import ModelSpec


def with_qkv_in_blocks(table: Sequence[TensorMap], spec: ModelSpec) -> list[TensorMap]:
    """The table for files in which a packed projection has all rows of queries, then of keys, then of values."""
    attention = next(block for block in spec.blocks if isinstance(block, AttentionSpec))
    return with_rows_in_blocks(table, attention)


def with_rows_in_blocks(table: Sequence[TensorMap], attention: AttentionSpec) -> list[TensorMap]:
    """`with_qkv_in_blocks` for the packed projections of this attention."""
    view = _in_blocks(attention.heads, attention.kv_heads)
    for leaf in ("weight", "bias"):
        table = with_view(table, f"attn/qkv/{leaf}", view)
    return list(table)


def with_gate_up_in_halves(table: Sequence[TensorMap], node: str = "mlp/gate_up") -> list[TensorMap]:
    """The table for files in which a packed projection, `node`, has all rows of the gate, then all rows of up."""
    for leaf in ("weight", "bias"):
        table = with_view(table, f"{node}/{leaf}", _in_halves)
    return list(table)


def _in_blocks(heads: int, kv_heads: int) -> Callable[[ArraySpec], View]:
    group = heads // kv_heads
    order = [n for k in range(kv_heads) for n in (*range(k * group, (k + 1) * group), heads + k, heads + kv_heads + k)]

    def view(array: ArraySpec) -> View:
        rows, *columns = array.shape[1:]
        in_file = View.identity((rows, *columns)).split(len(order), rows // len(order), *columns)
        return in_file.permute(*order).merge(rows, *columns)

    return view


def _in_halves(array: ArraySpec) -> View:
    rows, *columns = array.shape[1:]
    in_file = View.identity((rows, *columns)).split(2, rows // 2, *columns)
    return in_file.transpose(1, 0, *range(2, 2 + len(columns))).merge(rows, *columns)
