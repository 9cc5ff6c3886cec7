"""Tables of tensors that no family has yet, with arrays to read them from: `arrays()`, `LEAVES`, `table()`."""

from __future__ import annotations

import numpy as np

from meshtune.arrays.spec import ArraySpec
from meshtune.families.tensors import TensorMap, View

L, H, K, h, D, E, F = 2, 8, 4, 4, 32, 8, 24


def stacked_spec(*dims: tuple[int, str]) -> ArraySpec:
    sizes, axes = zip(*((L, "layers"), *dims), strict=True)
    return ArraySpec(sizes, "float32", axes, role="matrix" if len(dims) == 2 else "experts")


d, f, experts = (D, "embed"), (F, "ffn"), (E, "experts")
LEAVES = {
    "q": stacked_spec((H * h, "heads"), d),
    "k": stacked_spec((K * h, "kv_heads"), d),
    "v": stacked_spec((K * h, "kv_heads"), d),
    "grouped": stacked_spec(((H + 2 * K) * h, "packed_heads"), d),
    "packed": stacked_spec((3 * H * h, "packed_heads"), d),
    "gate": stacked_spec(f, d),
    "up": stacked_spec(f, d),
    "conv1d": stacked_spec(f, d),
    "each/up": stacked_spec(experts, f, d),
    "fused/gate": stacked_spec(experts, f, d),
    "fused/up": stacked_spec(experts, f, d),
    "interleaved/gate": stacked_spec(experts, f, d),
    "interleaved/up": stacked_spec(experts, f, d),
}


def table() -> list[TensorMap]:
    """Fused projections in both orders, transposed ones, experts one by one, fused, and fused with gate and up in
    turn."""
    G = H // K
    qkv = View.identity((K * (G + 2) * h, D)).split(K, G + 2, h, D)
    packed = View.identity((3 * H * h, D)).split(3, H, h, D).transpose(1, 0, 2, 3).merge(3 * H * h, D)
    order = [n for k in range(K) for n in (*range(k * G, (k + 1) * G), H + k, H + K + k)]
    grouped = View.identity(((H + 2 * K) * h, D)).split(H + 2 * K, h, D).permute(*order).merge((H + 2 * K) * h, D)
    gate_up = View.identity((2 * F, D))
    fused = View.identity((E, 2 * F, D)).split(E, 2, F, D)
    interleaved = View.identity((E, D, 2 * F)).split(E, D, F, 2)

    def turn_view(view: View) -> View:
        return view.transpose(0, 2, 3, 1).merge(E, F, D)

    views = [
        ("qkv", "q", qkv.slice(1, 0, G).merge(H * h, D)),
        ("qkv", "k", qkv.slice(1, G, G + 1).merge(K * h, D)),
        ("qkv", "v", qkv.slice(1, G + 1, G + 2).merge(K * h, D)),
        ("packed", "packed", packed),
        ("grouped", "grouped", grouped),
        ("gate_up", "gate", gate_up.slice(0, 0, F)),
        ("gate_up", "up", gate_up.slice(0, F, 2 * F)),
        ("conv1d", "conv1d", View.identity((D, F)).transpose(1, 0)),
        ("fused", "fused/gate", fused.slice(1, 0, 1).merge(E, F, D)),
        ("fused", "fused/up", fused.slice(1, 1, 2).merge(E, F, D)),
        ("interleaved", "interleaved/gate", turn_view(interleaved.slice(3, 0, 1))),
        ("interleaved", "interleaved/up", turn_view(interleaved.slice(3, 1, 2))),
    ]
    entries = [TensorMap(f"{row}.{name}", path, (row,), LEAVES[path], v) for row in range(L) for name, path, v in views]
    full_view = View.identity((F, D))
    for row in range(L):
        entries += [TensorMap(f"{row}.{e}.up", "each/up", (row, e), LEAVES["each/up"], full_view) for e in range(E)]
    return entries


def tensors() -> dict[str, np.ndarray]:
    """Random numbers for every tensor of the table."""
    rng = np.random.default_rng(0)
    return {entry.name: rng.standard_normal(entry.view.tensor, np.float32) for entry in table()}


def expected_leaves(stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The leaves, made with numpy from whole tensors."""
    leaves = {path: np.full(array.shape, np.nan, np.float32) for path, array in LEAVES.items()}
    for entry in table():
        leaves[entry.path][entry.index] = entry.view.read(stored[entry.name])
    return leaves
