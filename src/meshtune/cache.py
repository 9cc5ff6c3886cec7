"""The folder for everything Meshtune keeps between runs and can make again: tokens, plans, compilers."""

from __future__ import annotations

import hashlib
import os
import pathlib
import platform
from collections.abc import Mapping


def cache_folder(env: Mapping[str, str] = os.environ) -> pathlib.Path:
    """$MESHTUNE_CACHE, else meshtune in $XDG_CACHE_HOME, else ~/.cache/meshtune."""
    if env.get("MESHTUNE_CACHE"):
        return pathlib.Path(env["MESHTUNE_CACHE"]).expanduser()
    return pathlib.Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "meshtune"


def processor_key() -> str:
    """Hashes the processor's model and instructions, which JAX's keys of compiled programs do not name."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line for line in lines if line.split(":")[0].strip() in ("model name", "flags", "Features", "CPU part")]
    return hashlib.sha256("\n".join([platform.machine(), *dict.fromkeys(named)]).encode()).hexdigest()[:16]
