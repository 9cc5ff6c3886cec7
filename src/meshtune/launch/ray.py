"""Connects to Ray (https://docs.ray.io)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

FORWARDED = ("PYTHONPATH", "HF_HOME", "HF_HUB_OFFLINE", "TMPDIR", "XLA_FLAGS")  # and all of these beginnings
FORWARDED_PREFIXES = ("MESHTUNE_", "JAX_", "NCCL_", "RCCL_")


@contextlib.contextmanager
def connect(ray: Any) -> Iterator[None]:
    """Connects to the cluster at RAY_ADDRESS, or starts one on this machine, until the context ends."""
    ray.init(log_to_driver=False, logging_level="WARNING", include_dashboard=False)
    try:
        yield
    finally:
        ray.shutdown()


def forwarded_environment() -> dict[str, str]:
    """The variables of this process that its workers need on other machines."""
    return {
        name: value for name, value in os.environ.items() if name in FORWARDED or name.startswith(FORWARDED_PREFIXES)
    }
