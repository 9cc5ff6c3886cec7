"""The ring of attention: its collectives, memory, balance of work, and what a rematerialisation policy saves."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from kernels import mesh_attention_cases
from kernels.attention_oracle import pack_rows
from meshtune.errors import UserError
from meshtune.kernels.attention import AttentionRequest, blocks, choose_backend, zigzag_order

# Runs in a separate process, because the number of CPU devices is fixed when JAX starts.
PROGRAM = """
import json, re, sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
sys.path.insert(0, TESTS)
from kernels.mesh_attention_cases import sharding_of
from meshtune.kernels.attention import LOG_SUM_EXP, OUTPUT, attention

H, K, h = 2, 1, 16

def attend(q, k, v, positions, segments, sharding, **options):
    return attention(q, k, v, q_positions=positions, kv_positions=positions, q_segments=segments, kv_segments=segments,
                     scale=0.25, aligned=True, sharding=sharding, backend="blockwise", **options)

def forward_and_backward(sharding, policy=None):
    def run(q, k, v, g, positions, segments):
        function = lambda *qkv: attend(*qkv, positions, segments, sharding)
        out, vjp = jax.vjp(function if policy is None else jax.checkpoint(function, policy=policy), q, k, v)
        return out, vjp(g)
    return run

def shapes(T, cp, sharding):
    def of(shape, dtype):
        spec = P(None, "cp") if cp > 1 else P()
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(sharding.mesh, spec))
    return [of((1, T, n, h), jnp.float32) for n in (H, K, K, H)] + [of((1, T), jnp.int32)] * 2

def compiled(T, cp):
    sharding = sharding_of({"cp": cp}, H, K)
    return jax.jit(forward_and_backward(sharding)).lower(*shapes(T, cp, sharding)).compile()

"""


def run(program: str):
    tests = str(pathlib.Path(mesh_attention_cases.__file__).parents[1])
    source = PROGRAM.replace("TESTS", repr(tests)) + program
    # Which arrays exist at once depends on the compiler's optimisations, which fast tests turn off.
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=500, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_keys_are_rotated_and_never_gathered():
    """In the compiled forward and backward for cp=4 the only collective is a permute, and no array holds all keys."""
    T, cp, H, h = 2048, 4, 2, 16
    text = run(f"print(json.dumps(compiled({T}, {cp}).as_text()))")
    collectives = set(re.findall(r"\b(all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)\(", text))
    assert collectives == {"collective-permute"}
    arrays = re.findall(r"\b(?:f32|s32|pred)\[([\d,]+)\]", text)
    largest = max(np.prod([int(n) for n in shape.split(",")]) for shape in arrays)
    assert largest <= T // cp * H * h  # the queries of a device; all keys would be twice as large
    assert largest < (T // cp) ** 2


MEMORY = """
bytes_by_cp = {{cp: compiled({T}, cp).memory_analysis().temp_size_in_bytes for cp in {parts}}}
print(json.dumps(bytes_by_cp))
"""


def assert_halves_with_cp(bytes_by_cp):
    """The memory halves with each doubling of cp. Compared with one device, a ring adds the shard in transit and the
    running sums."""
    assert bytes_by_cp["4"] <= 0.55 * bytes_by_cp["2"]
    assert bytes_by_cp["8"] <= 0.52 * bytes_by_cp["4"]
    assert bytes_by_cp["8"] <= 0.25 * bytes_by_cp["1"]


@pytest.mark.slow
def test_the_memory_of_a_device_halves_with_each_doubling_of_cp():
    """Temporary memory of the compiled forward and backward for 32k tokens."""
    assert_halves_with_cp(run(MEMORY.format(T=32 * 1024, parts=(1, 2, 4, 8))))


@pytest.mark.slow
def test_rows_of_128k_tokens_compile_and_their_memory_halves_with_each_doubling_of_cp():
    assert_halves_with_cp(run(MEMORY.format(T=128 * 1024, parts=(1, 2, 4, 8))))


def test_a_policy_that_saves_the_names_avoids_a_second_forward_ring():
    permutes = run("""
sharding = sharding_of({"cp": 4, "tp": 2}, H, K)
policies = jax.checkpoint_policies
arguments = shapes(256, 4, sharding)
def permutes(policy):
    return str(jax.make_jaxpr(forward_and_backward(sharding, policy))(*arguments)).count("ppermute")
print(json.dumps([permutes(policies.nothing_saveable), permutes(policies.save_only_these_names(OUTPUT, LOG_SUM_EXP)),
                  permutes(None)]))
""")
    nothing_saved, names_saved, without_remat = permutes
    assert names_saved == without_remat
    assert names_saved < nothing_saved


def work(segments, positions, order, parts, window=None):
    """The number of visible blocks [device, step] of a ring of `parts` devices."""
    T = len(order)
    request = AttentionRequest(1, T // parts, T // parts, 1, 1, 8, "float32", "cpu", 1.0, window)
    pieces = [(x[:, order].reshape(1, parts, -1)) for x in (positions, segments)]

    def tokens(device):
        device_tokens = [
            jnp.asarray(x[:, device].reshape(1, -1, blocks.block_sizes(request)[0]).swapaxes(0, 1)) for x in pieces
        ]
        return blocks.TokenBlocks(*device_tokens)

    return np.array(
        [
            [int(blocks.any_visible(tokens(i), tokens((i - step) % parts), window).sum()) for step in range(parts)]
            for i in range(parts)
        ]
    )


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_zigzag_order_gives_every_device_the_same_work(parts):
    T = 64 * 8 * parts
    segments, positions = pack_rows([[T]], T)
    even = work(segments, positions, zigzag_order(T, parts), parts)
    uneven = work(segments, positions, np.arange(T), parts)
    assert even.sum() == uneven.sum()
    assert even.sum(1).max() == even.sum(1).min()
    # Each step of a ring takes as long as its slowest device.
    assert even.max(0).sum() <= 1.02 * even.sum() / parts
    assert uneven.max(0).sum() >= 1.4 * uneven.sum() / parts


def test_shards_that_no_query_sees_are_skipped():
    """With documents of an eighth of the row and contiguous shards, each of 8 devices computes only its own shard."""
    segments, positions = pack_rows([[512] * 8], 4096)
    visible = work(segments, positions, np.arange(4096), 8)
    assert (visible[:, 0] > 0).all()
    assert not visible[:, 1:].any()


def test_the_blocks_of_packed_documents_are_causal():
    """Compared by (segment, position), a later block of the same row is never considered visible."""
    segments, positions = pack_rows([[24] * 85], 2048)
    visible = work(segments, positions, np.arange(2048), 1)
    assert visible.sum() <= 2 * 2048 // 64
    one_document = work(*pack_rows([[2048]], 2048), np.arange(2048), 1)
    assert one_document.sum() == 32 * 33 // 2


@pytest.mark.parametrize(("length", "parts"), [(8, 2), (48, 4), (128, 8), (7, 1)])
def test_zigzag_order_pairs_an_early_chunk_with_a_late_one(length, parts):
    order = zigzag_order(length, parts)
    assert order.dtype == np.int32
    assert sorted(order) == list(range(length))
    if parts == 1:
        assert (order == np.arange(length)).all()
        return
    chunk = length // (2 * parts)
    for i, shard in enumerate(order.reshape(parts, -1)):
        late = (2 * parts - 1 - i) * chunk
        assert list(shard) == [*range(i * chunk, (i + 1) * chunk), *range(late, late + chunk)]


def test_a_length_that_cannot_be_cut_into_chunks_is_an_error_with_lengths_that_can():
    with pytest.raises(UserError) as error:
        zigzag_order(1000, 8)
    assert error.value.where == "mesh.cp"
    assert "992 or 1008" in str(error.value)
    with pytest.raises(UserError, match="make rows 16 tokens long"):
        zigzag_order(5, 8)


def test_a_backend_without_a_ring_refuses_sharded_rows():
    request = AttentionRequest(1, 64, 64, 2, 1, 8, "float32", "cpu", 1.0, aligned=True, ring=4)
    backend, reason = choose_backend(request)
    assert backend.name == "blockwise"
    assert "not direct: it does not pass keys on between 4 devices" in reason
    with pytest.raises(UserError, match="does not pass keys on"):
        choose_backend(request, "direct")
