"""Real compilers for accelerators that are not present, each in its own process."""

from __future__ import annotations

import json
import os

import pytest

from deviceless import compiled_for, compiler_for
from meshtune.config.recipe import Recipe
from meshtune.costs.hardware import find_target, known_devices
from meshtune.plan.compilers import compile_recipe
from meshtune.plan.compilers.process import run

pytestmark = pytest.mark.deviceless
GIB = 2**30

MATMUL = """
m = mesh(x=len(devices))
rows = jax.sharding.NamedSharding(m, jax.sharding.PartitionSpec("x"))
replicated = jax.sharding.NamedSharding(m, jax.sharding.PartitionSpec())
f = jax.jit(lambda a, b: jnp.sum(jnp.tanh(a @ b)))
args = (array((1024, 512), "bfloat16", rows), array((512, 256), "bfloat16", replicated))
result = [len({device.process_index for device in devices}), devices[0].device_kind]
"""


@pytest.mark.parametrize(
    ("target", "hosts"), [("8xH100", 1), ("2x4xH100", 2), ("8xMI300X", 1), ("2x4xMI300X", 2), ("8xTPUv5p", 2)]
)
def test_a_sharded_product_compiles(target, hosts):
    facts = compiled_for(target, MATMUL, text=True)
    # Both arguments are bf16: an eighth of the rows of the first, and the second replicated.
    assert facts["argument_bytes"] == 2 * (1024 * 512 // 8 + 512 * 256)
    assert "all-reduce" in facts["text"]
    assert facts["result"] == [hosts, find_target(target).device.kind]


@pytest.mark.parametrize("name", [name for name, device in known_devices({}).items() if device.platform != "cpu"])
def test_every_described_device_is_accepted_by_its_compiler(name):
    target = find_target(f"2x{name}")
    compiler = compiler_for(target.device.platform)
    facts = run(target, "meshtune.plan.compilers.trial:compile_trial", compiler=compiler, limit=120)
    assert facts["temp_bytes"] >= 0


PINNED = """
from meshtune.mesh.placement import host_sharding
f = jax.jit(lambda a, b: jax.device_put(a, jax.memory.Space.Device) @ b)
args = (array((1024, 512), "bfloat16", host_sharding(None)), array((512, 256), "bfloat16"))
"""


@pytest.mark.parametrize("target", ["H100", "MI300X", "TPUv5e"])
def test_an_argument_in_the_hosts_memory_is_counted_there(target):
    facts = compiled_for(target, PINNED)
    assert facts["host_argument_bytes"] == 2 * 1024 * 512
    assert facts["argument_bytes"] == 2 * 512 * 256


def test_each_compiler_process_loads_one_compiler_of_the_environment(tmp_path, monkeypatch):
    """All three plugins importable, as with the extras plan-cuda, plan-rocm and plan-tpu in one environment."""
    compilers = [compiler_for(platform) for platform in ("cuda", "rocm", "tpu")]
    folders = [str(compiler.folder) for compiler in compilers if compiler.folder is not None]
    if not folders:
        pytest.skip("they are in the environment already: the other tests show it")
    monkeypatch.setenv("MESHTUNE_COMPILERS", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    for folder in folders:
        monkeypatch.syspath_prepend(folder)
    for name in ("2xA100-80", "2xMI300X", "4xTPUv5e"):
        assert run(find_target(name), "meshtune.plan.compilers.trial:compile_trial")["temp_bytes"] >= 0


LLAMA_405B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248,
    "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16",
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
}  # fmt: skip


@pytest.fixture
def recipe_405b(tmp_path):
    """Llama 3.1 405B, LoRA of rank 8 on all linear layers, from nothing but its config."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_405B))

    def make(rows: int, length: int, mesh: dict[str, int]) -> Recipe:
        return Recipe.model_validate(
            {
                "model": str(tmp_path),
                "data": {"train": "none.jsonl", "max_length": length},
                "output": str(tmp_path / "out"),
                "method": {"kind": "lora", "rank": 8, "alpha": 16},
                "train": {"batch_size": rows, "steps": 100},
                "mesh": mesh,
                "compute": {"remat": "full"},
            }
        )

    return make


def test_llama_405b_on_eight_gpus_with_few_tokens_fits_as_it_should(recipe_405b):
    """16 x 64 tokens over tp=8 within 105 GiB, and the compilers for NVIDIA and AMD agree on what it takes."""
    recipe = recipe_405b(16, 64, {"tp": 8})
    results = {}
    for name in ("8xMI300X", "8xH100"):
        target = find_target(name)
        compiler_for(target.device.platform)
        results[name] = compiled = compile_recipe(recipe, target, cache=False)
        assert compiled.out_of_memory is None
        assert compiled.device_bytes <= 105 * GIB, name
        # An eighth of 405.85e9 bf16 weights, and no gradient for them: a second copy would be as much again.
        assert abs(compiled.breakdown["frozen"]["device"] - 2 * 405.85e9 / 8) < 0.01 * 2 * 405.85e9 / 8
        assert compiled.temp_bytes < 10 * GIB
        assert compiled.compile_seconds + compiled.lower_seconds < 300
    amd, nvidia = results["8xMI300X"], results["8xH100"]
    assert amd.argument_bytes == nvidia.argument_bytes
    assert amd.temp_bytes == pytest.approx(nvidia.temp_bytes, rel=0.03)


def test_a_program_that_no_tpu_holds_is_a_result_and_no_crash(recipe_405b):
    """Weights and adapters alone are 94.9 GiB of the 95.7 GiB that a v5p gives."""
    compiler_for("tpu")
    compiled = compile_recipe(recipe_405b(16, 64, {"tp": 8}), find_target("8xTPUv5p"), cache=False)
    assert "RESOURCE_EXHAUSTED" in (compiled.out_of_memory or "")
    arguments = sum(sizes["device"] for sizes in compiled.breakdown.values())
    assert arguments < compiled.device_bytes < 1.2 * arguments
