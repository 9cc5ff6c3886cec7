"""A network namespace with loopback only, for Ray, which listens on all interfaces."""

from __future__ import annotations

import subprocess

import pytest


def loopback_only() -> list[str]:
    """The beginning of a command that runs in a namespace. Skips the test where none may be made."""
    begin = ["unshare", "-n", "bash", "-c", 'ip link set lo up && exec "$@"', "namespace"]
    tried = subprocess.run([*begin, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no network namespace: {tried.stderr.strip()}")
    return begin
