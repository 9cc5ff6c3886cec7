"""LLVM's linker, with which XLA makes code objects for AMD GPUs."""

from __future__ import annotations

import glob
import os
import pathlib
import re
import shutil
from collections.abc import Mapping

PLACES = (
    "/opt/rocm/llvm/bin",
    "/opt/rocm-*/llvm/bin",
    "/usr/lib/llvm-*/bin",
    "/usr/lib/llvm*/bin",
    "/usr/lib64/llvm*/bin",
)


def find_linker(env: Mapping[str, str] = os.environ) -> pathlib.Path | None:
    """ld.lld: that of the PATH, else ROCm's, else the newest of the system's LLVMs."""
    if here := shutil.which("ld.lld", path=env.get("PATH")):
        return pathlib.Path(here)
    for pattern in PLACES:
        folders = sorted(glob.glob(pattern), key=lambda folder: [int(n) for n in re.findall(r"\d+", folder)])
        for folder in reversed(folders):
            if (path := pathlib.Path(folder) / "ld.lld").exists():
                return path
    return None
