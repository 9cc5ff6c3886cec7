"""Attention compiled by the real compilers for chips that are not attached, and the memory that it needs there.

Every kernel, forward and backward, for each chip; shapes and figures of more cases: benchmarks/kernels_deviceless.
"""

from __future__ import annotations

import pytest

from deviceless import compiled_for

pytestmark = pytest.mark.deviceless

GPUS = ["A100-80", "RTX4090", "H100", "B200", "RTX5090", "MI250X", "MI300X", "MI350X", "RX7900XTX", "RX9070XT"]
TPUS = ["TPUv5e", "TPUv5p", "TPUv6e", "2xTPUv7x"]  # a chip of v7x is two devices

SNIPPET = """
from meshtune.kernels.attention import AttentionInputs, AttentionRequest, choose_backend

B, T, H, K, h = sizes
request = AttentionRequest(
    batch=B, q_length=T, kv_length=T, heads=H, kv_heads=K, head_dim=h, dtype=dtype, scale=h**-0.5, window=window,
    softcap=softcap, aligned=True, platform=target.device.platform, chip=target.device.arch, parents=parents,
)
implementation = choose_backend(request, backend)[0]
result = implementation.name

def forward_and_backward(q, k, v, g, positions, segments):
    tokens = positions, positions, segments, segments, None, None, segments if parents else None
    out, vjp = jax.vjp(lambda q, k, v: implementation.run(AttentionInputs(q, k, v, *tokens), request), q, k, v)
    return out, *vjp(g)

q, k, tokens = array((B, T, H, h), dtype), array((B, T, K, h), dtype), array((B, T), "int32")
f, args = jax.jit(forward_and_backward), (q, k, k, q, tokens, tokens)
"""


def compile_attention(
    target, sizes, dtype="bfloat16", window=None, softcap=None, backend="auto", parents=False, **options
):
    values = {"sizes": sizes, "dtype": dtype, "window": window, "softcap": softcap, "backend": backend}
    return compiled_for(target, SNIPPET, **values, parents=parents, **options)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("target", GPUS)
def test_triton_kernels_compile(target, head_dim):
    program = compile_attention(target, (1, 1000, 4, 2, head_dim), window=300, softcap=30.0, text=True)
    assert program["result"] == "triton"
    for kernel in ("attention_forward_kernel", "attention_query_grads", "attention_key_grads"):
        assert kernel in program["text"]


@pytest.mark.parametrize("target", ["RTX4090", "H100", "MI300X"])
def test_triton_kernels_compile_for_segments_that_continue_others(target):
    assert compile_attention(target, (1, 1000, 4, 2, 128), window=300, parents=True)["result"] == "triton"


@pytest.mark.parametrize("target", ["H100", "MI300X"])
def test_triton_kernels_compile_in_float32_if_forced(target):
    assert compile_attention(target, (1, 256, 2, 1, 64), dtype="float32", backend="triton")["result"] == "triton"


@pytest.mark.parametrize("target", ["T4", "ArcProB60", "Max1100"])
def test_chips_without_kernels_take_blocks_of_scores(target):
    """In XLA's own operations: the scores of a block of queries exist, and never those of all, which are 512 MiB."""
    dtype = "float16" if target == "T4" else "bfloat16"
    program = compile_attention(target, (1, 8192, 2, 2, 64), dtype=dtype)
    assert program["result"] == "blockwise"
    assert program["temp_bytes"] < 64 << 20


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("target", TPUS)
def test_splash_attention_compiles(target, head_dim):
    assert compile_attention(target, (1, 1000, 4, 2, head_dim), window=300, softcap=30.0)["result"] == "splash"


@pytest.mark.parametrize(("target", "bytes_per_token_and_head"), [("H100", 16), ("MI300X", 16), ("TPUv5e", 2048)])
def test_temporary_memory_is_a_few_numbers_per_token(target, bytes_per_token_and_head):
    """Two float32 numbers per token and head in the Triton kernels; splash broadcasts each over 128 lanes.

    All scores of a head would be 512 KiB per token.
    """
    T, H = 131072, 2
    assert compile_attention(target, (1, T, H, 1, 128))["temp_bytes"] < T * H * bytes_per_token_and_head


def test_a_row_of_a_million_tokens_compiles():
    """Offsets beyond 2^32 bytes, and a table of blocks that must not be materialised: 16,384 x 16,384 are 256 MiB."""
    program = compile_attention("H100", (1, 2**20, 32, 8, 128))
    scalars = 2 * 4 * 32 * 2**20  # log-sum-exp and delta, float32 per head and token
    assert program["temp_bytes"] < scalars + 2**27


RING = """
from meshtune.kernels.attention import AttentionSharding, attention

m = mesh(dp=2, cp=4)
sharding = AttentionSharding(m, ("dp",), None, None, "cp")
rows = jax.sharding.NamedSharding(m, jax.sharding.PartitionSpec("dp", "cp"))

def forward_and_backward(q, k, v, g, positions, segments):
    def run(q, k, v):
        return attention(
            q, k, v, q_positions=positions, kv_positions=positions, q_segments=segments, kv_segments=segments,
            scale=0.1, aligned=True, sharding=sharding, platform=target.device.platform, chip=target.device.arch,
        )

    out, vjp = jax.vjp(run, q, k, v)
    return out, *vjp(g)

q, k, tokens = (array(shape, dtype, rows) for shape, dtype in (
    ((2, 4096, 8, 128), "bfloat16"), ((2, 4096, 2, 128), "bfloat16"), ((2, 4096), "int32")))
f, args = jax.jit(forward_and_backward), (q, k, k, q, tokens, tokens)
"""


@pytest.mark.parametrize("target", ["8xH100", "8xMI300X"])
def test_the_kernels_compile_in_a_ring(target):
    program = compiled_for(target, RING, text=True)
    assert "attention_forward_kernel" in program["text"]
    assert "collective-permute" in program["text"]


DECODE = """
from meshtune.kernels.attention import AttentionInputs, AttentionRequest, StackedCaches
from meshtune.kernels.attention import triton, triton_decode

B, S, L, H, K, h = 64, 1024, 32, 32, 8, head_dim
chip = {"platform": target.device.platform, "chip": target.device.arch}
request = AttentionRequest(B, 1, S, H, K, h, "bfloat16", scale=h**-0.5, softcap=softcap, **chip)
assert triton.decode_refusal(request) is None

def attend(q, k, v, layer, q_tokens, kv_tokens):
    inputs = AttentionInputs(q, None, None, q_tokens, kv_tokens, q_tokens, kv_tokens)
    return triton_decode.run(inputs, request, StackedCaches(k, v, layer))

caches, integer = array((L, B, K, S, h), "bfloat16"), array((), "int32")
tokens = array((B, 1), "int32"), array((B, S), "int32")
f, args = jax.jit(attend), (array((B, 1, H, h), "bfloat16"), caches, caches, integer, *tokens)
"""


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("target", GPUS)
def test_attention_over_stacked_caches_compiles_and_copies_no_cache(target, head_dim):
    program = compiled_for(target, DECODE, head_dim=head_dim, softcap=30.0, text=True)
    assert "attention_decode" in program["text"]
    assert program["temp_bytes"] < 64 << 20  # a layer's keys are 64 MiB at least
