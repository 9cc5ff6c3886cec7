"""The messages of a layer of experts over ep, in programs that the real compilers made for chips that are not attached.

Forward and backward pass of 64 experts, 8 a token, over eight devices with 1,024 tokens each, in bfloat16.
"""

from __future__ import annotations

import json
import re

import pytest

from deviceless import compiled_for
from meshtune.costs.collectives import collectives_of
from meshtune.model.dispatch import round_slots

TOKENS, EXPERTS, CHOSEN, EMBED, WIDTH, EP = 1024, 64, 8, 2048, 1024, 8

SNIPPET = """
from meshtune.kernels.chips import chip_of
from meshtune.mesh.layout import make_mesh
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.layout import Layout
from meshtune.model.dispatch import over_mesh
from meshtune.model.experts import ExpertsSpec
from meshtune.model.experts import RouterSpec
from meshtune.model.gather import layout_for
from jax.sharding import NamedSharding, PartitionSpec

spec = ExpertsSpec(RouterSpec(EXPERTS, CHOSEN), WIDTH, layers=1)
chip = chip_of(target.device.platform, target.device.arch)
layout = Layout(make_mesh(MeshConfig(ep=EP), devices))
experts = spec.params(EMBED)["experts"]
specs = {name: {"weight": PartitionSpec("ep")} for name in experts}
on_mesh = lambda axes: NamedSharding(layout.mesh, axes)
frozen = {
    name: {"weight": array(node["weight"].shape, "bfloat16", on_mesh(specs[name]["weight"]))}
    for name, node in experts.items()
}
compute = lambda rows, factors, groups, node: spec._compute(rows, factors, groups, node, chip=chip, layout=layout)

def loss(x, weights, frozen, chosen, cotangent):
    y = over_mesh(compute, layout, x, chosen, weights, frozen, specs, EXPERTS, exchange)
    return jnp.sum(y * cotangent, dtype="float32")

f = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
rows = on_mesh(PartitionSpec("ep"))
x = array((EP, TOKENS, EMBED), "bfloat16", rows)
choices = [array((EP, TOKENS, CHOSEN), dtype, rows) for dtype in ("float32", "int32")]
args = (x, choices[0], frozen, choices[1], x)
"""


ROW_BYTES = 2 * EMBED
SLOTS, ROUNDS = round_slots(TOKENS, CHOSEN, EP, EXPERTS // EP)
# A conditional's branches: without these words nothing that they compute is part of the program.
BRANCHES = re.compile(r"branch_computations=\{[^}]*\}|(true|false)_computation=%?[\w.\-]+")


def messages(target: str, exchange: str) -> dict:
    """The messages with rows of tokens that a step always sends, (kind, bytes of the whole, times), and those in
    conditionals, and the bytes of temporaries of a device."""
    names = {"TOKENS": TOKENS, "EXPERTS": EXPERTS, "CHOSEN": CHOSEN, "EMBED": EMBED, "WIDTH": WIDTH, "EP": EP}
    program = compiled_for(f"{EP}x{target}", SNIPPET, text=True, exchange=exchange, **names)

    def of(text: str) -> list[tuple[str, int, int]]:
        collectives = [c for c in collectives_of(text, EP) if c.group_size > 1 and c.bytes >= TOKENS * ROW_BYTES]
        return sorted((c.kind, c.bytes, c.count) for c in collectives)

    always, everything = of(BRANCHES.sub("", program["text"])), of(program["text"])
    return {
        "always": always,
        "everything": everything,
        "temp_bytes": program["temp_bytes"],
        "seconds": program["seconds"],
    }


@pytest.mark.deviceless
@pytest.mark.parametrize("target", ["H100", "MI300X", "TPUv5p"])
def test_tokens_go_to_the_devices_of_their_experts_and_back(target):
    """Four messages of a round's slots, there and back, forward and backward; further rounds are in conditionals. The
    other exchange gathers all tokens and adds all sums, and its arrays of experts have room for all of them."""
    split, gathered = messages(target, "all_to_all"), messages(target, "gather")
    slots, tokens = EP * SLOTS * ROW_BYTES, EP * TOKENS * ROW_BYTES
    assert ROUNDS > 1
    assert split["always"] == [("all-to-all", slots, 4)]
    assert {message[:2] for message in split["everything"]} == {("all-to-all", slots)}
    assert sum(count for *_, count in split["everything"]) > 4
    kinds = {"all-gather": 0, "reduced": 0}
    for kind, size, count in gathered["everything"]:
        assert kind in ("all-gather", "reduce-scatter", "all-reduce")
        kinds["all-gather" if kind == "all-gather" else "reduced"] += size * count
    assert kinds == {"all-gather": 2 * tokens, "reduced": 2 * tokens}
    assert gathered["always"] == gathered["everything"]
    assert split["temp_bytes"] < 0.75 * gathered["temp_bytes"]


if __name__ == "__main__":
    import sys

    for target in sys.argv[1:]:
        for exchange in ("all_to_all", "gather"):
            print(json.dumps({"target": target, "exchange": exchange, **messages(target, exchange)}), flush=True)
