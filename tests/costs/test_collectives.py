"""Collectives read from HLO text, in every form that XLA prints, and from a program compiled on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

from compiling import FASTER
from meshtune.costs.collectives import Collective, collectives_of, shape_bytes

MODULE = """
%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

%inner_body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {{
  %p = (s32[], f32[8,4]) parameter(0)
  {inner}
  ROOT %t = (s32[], f32[8,4]) tuple(%i, %x)
}}

%condition (p: (s32[], f32[8,4])) -> pred[] {{
  %p = (s32[], f32[8,4]) parameter(0)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}}

%outer_body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {{
  %p = (s32[], f32[8,4]) parameter(0)
  ROOT %loop = (s32[], f32[8,4]) while(%p), condition=%condition, body=%inner_body{inner_trips}
}}

ENTRY %main (x: f32[8,4]) -> f32[8,4] {{
  %x = f32[8,4]{{1,0}} parameter(0)
  {main}
  %loop.1 = (s32[], f32[8,4]) while(%t), condition=%condition, body=%outer_body{outer_trips}
  ROOT %out = f32[8,4]{{1,0}} get-tuple-element(%loop.1), index=1
}}
"""
OUTER_TRIPS = ', backend_config={"known_trip_count":{"n":"32"}}'
TRIPS = ', backend_config={"known_trip_count":{"n":"3"},"known_init_step":{"init":"0","step":"1"}}'


def collectives(main: str = "", inner: str = "", trips: str = TRIPS) -> list[Collective]:
    return collectives_of(MODULE.format(main=main, inner=inner, inner_trips=trips, outer_trips=OUTER_TRIPS), 8)


def test_a_line_that_begins_with_a_brace_inside_an_operation_does_not_end_the_computation():
    kernel = (
        '%k = f32[8,4] custom-call(%x), frontend_attributes={kernel_metadata={\n"a":"{}"\n}}, metadata={op_name="b"}'
    )
    gather = "%g = bf16[64]{0} all-gather(%x), replica_groups={{0,2},{1,3}}, dimensions={0}"
    assert collectives(inner=f"{kernel}\n  {gather}") == [Collective("all-gather", 128, (0, 2), 96)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "%g = bf16[64,32]{1,0} all-gather(%x), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}",
            Collective("all-gather", 64 * 32 * 2, (0, 1, 2, 3), 1),
        ),
        (
            "%g = bf16[64]{0} all-gather(%x), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}",
            Collective("all-gather", 128, (0, 4), 1),
        ),
        (
            "%g = bf16[64]{0} all-gather(%x), replica_groups={{0,2},{1,3}}, dimensions={0}",
            Collective("all-gather", 128, (0, 2), 1),
        ),
        (
            "%g = f32[64]{0} all-reduce(%x), replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, to_apply=%add",
            Collective("all-reduce", 256, (0, 1, 2, 3), 1),
        ),
        (
            "%g = f32[64]{0} all-reduce(%x), replica_groups=mesh['a'=2,'b'=4] {'a'}, to_apply=%add",
            Collective("all-reduce", 256, (0, 4), 1),
        ),
        (
            "%g = f32[64]{0} all-reduce(%x), replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}, to_apply=%add",
            Collective("all-reduce", 256, (0, 1), 1),
        ),
        (
            "%g = f32[64]{0} all-reduce(%x), replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}, to_apply=%add",
            Collective("all-reduce", 256, (0, 2), 1),
        ),
        (
            "%g = f32[64]{0} all-reduce(%x), replica_groups={}, to_apply=%add",
            Collective("all-reduce", 256, tuple(range(8)), 1),
        ),
        (
            "%g = f32[8]{0} reduce-scatter(%x), replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add",
            Collective("reduce-scatter", 32 * 4, (0, 1, 2, 3), 1),
        ),
        (
            "%g = f32[64]{0} collective-permute(%x), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}",
            Collective("collective-permute", 256, (0, 1, 2, 3), 1),
        ),
        (
            "%g = (s8[16]{0}, s4[16]{0}) all-to-all(%x, %y), replica_groups=[1,8]<=[8]",
            Collective("all-to-all", 16 + 8, tuple(range(8)), 1),
        ),
    ],
)
def test_every_notation_of_a_group_is_read(line, expected):
    assert collectives(main=line) == [expected]


def test_start_and_done_are_one_operation_with_the_bytes_of_its_result():
    lines = (
        "%s = ((bf16[8]{0}, f32[2]{0}), (bf16[64]{0}, f32[16]{0})) all-gather-start(%x, %y), "
        "replica_groups=[1,8]<=[8]\n"
        "  %d = (bf16[64]{0}, f32[16]{0}) all-gather-done(%s)"
    )
    assert collectives(main=lines) == [Collective("all-gather", 128 + 64, tuple(range(8)), 1)]


def test_a_start_whose_done_is_in_another_computation_is_counted_once():
    line = "%s = (f32[8]{0}, f32[64]{0}) all-gather-start(%x), replica_groups=[1,8]<=[8], dimensions={0}"
    assert collectives(main=line) == [Collective("all-gather", 256, tuple(range(8)), 1)]


def test_loops_within_loops_multiply():
    line = "%g = f32[64]{0} all-reduce(%x), replica_groups=[1,8]<=[8], to_apply=%add"
    assert collectives(inner=line) == [Collective("all-reduce", 256, tuple(range(8)), 96)]


def test_a_loop_of_unknown_length_is_counted_once_and_marked():
    line = "%g = f32[64]{0} all-reduce(%x), replica_groups=[1,8]<=[8], to_apply=%add"
    assert collectives(inner=line, trips="") == [
        Collective("all-reduce", 256, tuple(range(8)), 32, unknown_trip_count=True)
    ]


def test_bytes_that_one_device_moves_over_rings():
    # Thakur et al., 2005: (n-1)/n of the array to gather or scatter it, twice that to sum it everywhere.
    assert Collective("all-gather", 800, tuple(range(8)), 1).bytes_sent == 700
    assert Collective("reduce-scatter", 800, tuple(range(8)), 1).bytes_sent == 700
    assert Collective("all-reduce", 800, tuple(range(8)), 1).bytes_sent == 1400
    assert Collective("collective-permute", 800, (0, 1), 1).bytes_sent == 800


def test_hosts_of_a_group():
    assert Collective("all-reduce", 8, (0, 8), 1).hosts(per_host=8) == 2
    assert Collective("all-reduce", 8, (0, 7), 1).hosts(per_host=8) == 1


def test_shapes_in_bytes():
    assert shape_bytes("bf16[2,3]{1,0:T(8,128)(2,1)}") == 12
    assert shape_bytes("(f32[], s32[4]{0}, /*index=2*/f8e4m3fn[5]{0}, pred[3])") == 4 + 16 + 5 + 3
    assert shape_bytes("bf16[1,4]{1,0:S(5)}") == 8


COMPILED = """
    import json, jax, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from meshtune.costs.collectives import collectives_of
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    def layer(x, w):
        gathered = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))
        return x @ gathered, None
    def loss(w, x):
        return jax.lax.scan(layer, x, w)[0].sum()
    w = jax.ShapeDtypeStruct((5, 64, 64), "float32", sharding=NamedSharding(mesh, P(None, None, "b")))
    x = jax.ShapeDtypeStruct((16, 64), "float32", sharding=NamedSharding(mesh, P(("a", "b"))))
    text = jax.jit(loss).lower(w, x).compile().as_text()
    print(json.dumps([[c.kind, c.bytes, c.members, c.count, c.unknown_trip_count] for c in collectives_of(text, 8)]))
"""


def test_a_compiled_program_gathers_each_layer_once():
    flags = f"{FASTER} --xla_force_host_platform_device_count=8"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    code = textwrap.dedent(COMPILED)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert ran.returncode == 0, ran.stderr
    compiled = json.loads(ran.stdout)
    gathers = [collective for collective in compiled if collective[0] == "all-gather"]
    assert gathers == [["all-gather", 64 * 64 * 4, [0, 1, 2, 3], 5, False]], compiled
    (total,) = (collective for collective in compiled if collective[0] == "all-reduce")
    assert total[1:] == [4, list(range(8)), 1, False]
