"""Finds LLVM's linker, with which XLA links code objects for AMD GPUs."""

from __future__ import annotations

import glob
import os
import pathlib
import re
import shutil
from collections.abc import Mapping

DIRECTORIES = (
    "/opt/rocm/llvm/bin",
    "/opt/rocm-*/llvm/bin",
    "/usr/lib/llvm-*/bin",
    "/usr/lib/llvm*/bin",
    "/usr/lib64/llvm*/bin",
)


def find_linker(env: Mapping[str, str] = os.environ) -> pathlib.Path | None:
    """The path of ld.lld: from PATH, else ROCm's, else that of the newest LLVM of the system; None if there is none."""
    if on_path := shutil.which("ld.lld", path=env.get("PATH")):
        return pathlib.Path(on_path)
    for pattern in DIRECTORIES:
        folders = sorted(glob.glob(pattern), key=lambda folder: [int(n) for n in re.findall(r"\d+", folder)])
        for folder in reversed(folders):
            if (path := pathlib.Path(folder) / "ld.lld").exists():
                return path
    return None
