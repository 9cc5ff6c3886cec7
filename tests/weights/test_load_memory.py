"""Peak host memory of loading, measured by the kernel in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, pathlib, resource, sys
import jax
from meshtune.weights.load import load_params, load_spec

def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

jax.numpy.zeros(3).block_until_ready()
before = status("VmRSS")
spec, _ = load_spec(pathlib.Path(sys.argv[1]), sys.argv[2])
params = load_params(pathlib.Path(sys.argv[1]), spec)
model = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
peak = max(status("VmHWM"), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
print(json.dumps({"before": before, "model": model, "peak": peak}))
"""
MB = 1 << 20


def measure(directory: Path, dtype: str) -> dict[str, int]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    # A process inherits ru_maxrss from the one that it is forked from: let that be a shell, not this one with torch.
    shell = ["sh", "-c", '"$@"; exit $?', "sh"]
    python = [sys.executable, "-c", SCRIPT, str(directory), dtype]
    done = subprocess.run(shell + python, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def assert_small(directory: Path, dtype: str) -> None:
    """The whole process, interpreter and JAX (about 200 MB) included, is at most 300 MB above the model's own bytes."""
    got = measure(directory, dtype)
    assert got["peak"] > got["model"], "the measurement must see the model itself"
    above = got["peak"] - got["model"]
    assert above <= 300 * MB, f"{above / MB:.0f} MB above the model's {got['model'] / MB:.0f} MB"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_loading_a_200_mb_model_takes_little_more_than_its_own_memory(make_model):
    """Wide enough that holding one stacked array twice (100 MB), or the model twice, would show."""
    shape = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 10, "vocab_size": 16000}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 64}
    directory = make_model("llama-tied", "bfloat16", "60MB", **shape, **heads)
    assert_small(directory, "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loading_smollm2_takes_little_more_than_its_own_memory(smollm2, dtype):
    assert_small(smollm2, dtype)
