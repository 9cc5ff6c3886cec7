"""The folder for everything Meshtune keeps between runs and can make again: tokens, plans, compilers."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping


def cache_folder(env: Mapping[str, str] = os.environ) -> pathlib.Path:
    """$MESHTUNE_CACHE, else meshtune in $XDG_CACHE_HOME, else ~/.cache/meshtune."""
    if env.get("MESHTUNE_CACHE"):
        return pathlib.Path(env["MESHTUNE_CACHE"]).expanduser()
    return pathlib.Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "meshtune"
