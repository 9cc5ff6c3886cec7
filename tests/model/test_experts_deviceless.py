"""The compiled program of a layer of experts, by the real compilers for chips that are not attached.

Forward and backward pass with LoRA on every expert, at 8,192 tokens: 64 experts, 8 for each token. The ideal is
the work of each token's own experts. Counted are the tiles of rows that the kernels visit, the last of each group
included, and every product outside of the kernels.
"""

from __future__ import annotations

import json
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest

from deviceless import compiled_for
from meshtune.costs.hardware import find_target
from meshtune.kernels import grouped, grouped_triton
from meshtune.kernels.chips import chip_of
from meshtune.kernels.grouped_triton import row_tiles

TOKENS, EXPERTS, CHOSEN, EMBED, WIDTH, RANK = 8192, 64, 8, 2048, 1024, 16
ROWS = TOKENS * CHOSEN
NAMES = {"TOKENS": TOKENS, "EXPERTS": EXPERTS, "CHOSEN": CHOSEN, "EMBED": EMBED, "WIDTH": WIDTH, "RANK": RANK}

SNIPPET = """
import dataclasses
from meshtune.arrays.tree import flatten, unflatten
from meshtune.adapters.config import LoraConfig
from meshtune.adapters.lora import LoRA
from meshtune.kernels.chips import chip_of
from meshtune.model.dispatch import through_experts
from meshtune.model.experts import ExpertsSpec
from meshtune.model.experts import RouterSpec

spec = ExpertsSpec(RouterSpec(EXPERTS, CHOSEN), WIDTH, layers=1)
experts = spec.params(EMBED)["experts"]
chip = chip_of(target.device.platform, target.device.arch)
frozen = {name: {"weight": array(node["weight"].shape, "bfloat16")} for name, node in experts.items()}
adapters = {
    name: jax.tree.map(lambda leaf: array(leaf.shape, "float32"), LoRA.abstract(node["weight"], LoraConfig(rank=RANK)))
    for name, node in experts.items()
}

def loss(adapters, x, frozen, chosen, weights, cotangent):
    node = {name: {**frozen[name], "adapter": adapters[name]} for name in frozen}
    compute = lambda rows, factors, groups, node: spec._compute(rows, factors, groups, node, chip=chip, layout=None)
    y = through_experts(compute, x, chosen, weights, node, EXPERTS)
    return jnp.sum(y * cotangent, dtype="float32")

f = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
x = array((TOKENS, EMBED), "bfloat16")
args = (adapters, x, frozen, array((TOKENS, CHOSEN), "int32"), array((TOKENS, CHOSEN), "float32"), x)
"""


def products() -> list[tuple[int, int, bool]]:
    """(columns, terms, False) of each grouped product of rows, and (o, i, True) of each gradient of a matrix."""
    calls = []
    for out, into in ((WIDTH, EMBED), (WIDTH, EMBED), (EMBED, WIDTH)):
        calls += [(out, into, False), (into, out, False)]  # forward, and the gradient of its rows
        calls += [(RANK, into, False), (into, RANK, False), (out, RANK, False), (RANK, out, False)]
        calls += [(RANK, into, True), (out, RANK, True)]
    return calls


def group_sizes() -> np.ndarray:
    """Rows of each group, uneven as a router makes them."""
    rng = np.random.default_rng(0)
    return rng.multinomial(ROWS, rng.dirichlet(np.full(EXPERTS, 4.0)))


def operations(target: str) -> dict[str, float]:
    """Multiplications and additions of the compiled program: in kernels, outside of them, and ideally."""
    device = find_target(target).device
    chip = chip_of(device.platform, device.arch)
    program = compiled_for(target, SNIPPET, text=True, **NAMES)
    sizes = group_sizes()
    counted = ideal = 0.0
    for columns, terms, of_matrix in products():
        ideal += 2.0 * ROWS * columns * terms
        if grouped.backend_for(chip) == "triton":
            counted += _in_triton(chip, sizes, columns, terms, of_matrix)
        else:
            counted += _on_tpu(sizes, columns, terms, program["text"])
    return {
        "in_kernels": counted,
        "outside": outside(program["text"]),
        "ideal": ideal,
        "kernels": kernels(program["text"]),
        "temp_bytes": program["temp_bytes"],
    }


def _in_triton(chip, sizes, columns: int, terms: int, of_matrix: bool) -> float:
    if of_matrix:
        tile = grouped_triton.tile_for(chip, "bfloat16", columns, terms, ROWS // EXPERTS)
        rows = (-(-sizes // tile.terms) * tile.terms).sum()
        return 2.0 * rows * _round_up(columns, tile.rows) * _round_up(terms, tile.columns)
    tile = grouped_triton.tile_for(chip, "bfloat16", ROWS // EXPERTS, columns, terms)
    tiles = int(row_tiles(jnp.asarray(sizes), ROWS, tile.rows).count)
    return 2.0 * tiles * tile.rows * _round_up(columns, tile.columns) * _round_up(terms, tile.terms)


def _on_tpu(sizes, columns: int, terms: int, text: str) -> float:
    """Tiles are aligned there: one with rows of several groups is visited for each."""
    size = max([grouped.TPU_TILE[0], *(int(tile) for tile in re.findall(r'ragged_dot_tiling="(\d+),', text))])
    ends = np.cumsum(sizes)
    visits = (-(-ends // size) - (ends - sizes) // size)[sizes > 0].sum()
    return 2.0 * visits * size * columns * terms


def _round_up(n: int, size: int) -> int:
    return -(-n // size) * size


def kernels(text: str) -> int:
    """Calls of kernels for grouped products."""
    return len(re.findall(r'custom_call_target="(?:__gpu\$xla\.gpu\.triton|tpu_custom_call)"', text))


def outside(text: str) -> float:
    """Multiplications and additions of the products in a program's text that are no kernel's."""
    shapes = {
        name: [int(size) for size in dims.split(",") if size]
        for name, dims in re.findall(r"(%[\w.\-]+)\s*(?:=|:)\s*\w+\[([\d,]*)\]", text)
    }
    total = 0.0
    for name, left, contracted in re.findall(
        r"(%[\w.\-]+) = [^\n]*? dot\((%[\w.\-]+),[^\n]*?lhs_contracting_dims=\{([\d,]*)\}", text
    ):
        terms = math.prod(shapes[left][int(axis)] for axis in contracted.split(",") if axis)
        total += 2.0 * math.prod(shapes[name]) * terms
    # A product that a library or a TPU's convolution computes would not be counted: none may be there.
    assert not re.search(r"__cublas|__rocblas| convolution\(", text)
    return total


@pytest.mark.deviceless
@pytest.mark.parametrize("target", ["H100", "RTX4090", "MI300X", "RX7900XTX", "RX9070XT", "StrixHalo-128", "TPUv5p"])
def test_a_layer_of_experts_does_the_work_of_each_tokens_own(target):
    facts = operations(target)
    assert facts["kernels"] >= len(products())
    assert facts["in_kernels"] + facts["outside"] <= 1.15 * facts["ideal"]
    # A product of every row with every matrix would need a copy of the rows for each expert.
    assert facts["temp_bytes"] < 8 * ROWS * max(EMBED, WIDTH) * 2


@pytest.mark.deviceless
def test_a_chip_without_kernels_multiplies_tiles_by_its_library():
    """sm_75: a loop for each product, over tiles of 128 rows, each with one product of cuBLAS. What tiles have beyond
    the rows of their group is computed in vain, below a quarter of the work here."""
    assert grouped.backend_for(chip_of("cuda", find_target("T4").device.arch)) == "tiles"
    program = compiled_for("T4", SNIPPET.replace('"bfloat16"', '"float16"'), text=True, **NAMES)
    text = program["text"]
    factors = re.findall(r"= \(\w+\[(\d+),(\d+)\][^\n]* custom-call\([^\n]*__cublas", text)
    assert len(re.findall(r" while\(", text)) == len(factors) == len(products())
    assert " dot(" not in text
    of_rows = [shape for *shape, of_matrix in products() if not of_matrix]
    assert sorted(int(columns) for rows, columns in factors if int(rows) == grouped.LARGEST) == sorted(
        columns for columns, _ in of_rows
    )
    tiles = int(grouped.row_tiles(jnp.asarray(group_sizes()), ROWS, grouped.LARGEST).count)
    assert tiles * grouped.LARGEST <= 1.25 * ROWS
    assert program["temp_bytes"] < 8 * ROWS * max(EMBED, WIDTH) * 2


def test_products_outside_of_kernels_are_counted():
    text = "%p.1 = bf16[8,16]{1,0} parameter(0)\n%q = bf16[16,32] parameter(1)\n"
    text += "%dot.2 = bf16[8,32]{1,0} dot(%p.1, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
    assert outside(text) == 2 * 8 * 32 * 16


if __name__ == "__main__":
    for name in ("H100", "RTX4090", "MI300X", "TPUv5p"):
        facts = operations(name)
        print(json.dumps({"target": name, "ratio": (facts["in_kernels"] + facts["outside"]) / facts["ideal"], **facts}))
