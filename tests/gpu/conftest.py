"""The platform of a test: a GPU with `make test-gpu`; in the other tiers the CPU, in small, by the same bodies."""

from __future__ import annotations

import os

import pytest

# Tests start other processes on the same GPU: none of them may take its whole memory first.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Some tests compare with the CPU in this process.
if (platforms := os.environ.get("JAX_PLATFORMS")) and "cpu" not in platforms:
    os.environ["JAX_PLATFORMS"] = f"{platforms},cpu"


def missing_gpu() -> str | None:
    """Why no test can run on a GPU here, or None."""
    import jax

    backend = jax.default_backend()
    if backend not in ("cpu", "tpu"):
        return None
    hint = "no NVIDIA or AMD GPU that JAX can use; see `meshtune doctor`"
    return f"JAX {jax.__version__} runs on {backend} here: {hint}"


@pytest.fixture(scope="session", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def platform(request: pytest.FixtureRequest) -> str:
    """`cpu` or `gpu`; a test that asks for it runs on both. Skips where there is no GPU."""
    if request.param == "gpu" and (reason := missing_gpu()):
        pytest.skip(reason)
    return request.param
