"""Compilers brought from the package index into a folder of their own, where no run of the environment loads them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable

from packaging.requirements import Requirement

from meshtune.errors import UserError, nearest
from meshtune.plan.compilers.find import compilers_folder

# The extras of jax that name each platform's wheels, the first one jax has; jax knows which versions go with it.
EXTRAS = {"cuda": ("cuda12-local", "cuda13-local"), "rocm": ("rocm7-local",), "tpu": ("tpu",)}
# XLA assembles for NVIDIA with ptxas and links libdevice; both are in this wheel, which jax's extra leaves out.
ASSEMBLER = {"12": "nvidia-cuda-nvcc-cu12>=12.6.85", "13": "nvidia-cuda-nvcc>=13"}


def requirements(platform: str) -> list[str]:
    """What is installed for a platform, without dependencies: all that compiling needs, about half a gigabyte.

    Raises: UserError for a platform that has no compiler, or for one that this version of jax has no wheels of.
    """
    if platform not in EXTRAS:
        raise UserError(
            f"there is no compiler to install for '{platform}'",
            where="--install",
            fix=f"{nearest(platform, EXTRAS)}choose of {', '.join(EXTRAS)}",
        )
    stated = [Requirement(line) for line in importlib.metadata.requires("jax") or []]
    for extra in EXTRAS[platform]:
        mine = [one for one in stated if one.marker is not None and one.marker.evaluate({"extra": extra})]
        wanted = [one for one in mine if one.name.startswith(("jax-cuda", "jax-rocm", "libtpu"))]
        if wanted:
            return _with_what_they_need(wanted)
    raise UserError(
        f"jax {importlib.metadata.version('jax')} names no compiler for {platform}",
        where="--install",
        fix=f"install it by hand into {compilers_folder() / platform}",
    )


def _with_what_they_need(wanted: Iterable[Requirement]) -> list[str]:
    found = []
    for one in wanted:
        found.append(f"{one.name}{one.specifier}")
        if one.name.endswith("-plugin"):
            found.append(f"{one.name.removesuffix('plugin')}pjrt{one.specifier}")
        if one.name.startswith("jax-cuda"):
            found.append(ASSEMBLER[one.name.removeprefix("jax-cuda")[:2]])
    return found


def install(platform: str) -> pathlib.Path:
    """Puts a platform's compiler into `compilers_folder`, in place of one that is there; pip's own output is shown.

    Raises: UserError, as `requirements` does, and if it cannot be installed.
    """
    wanted = requirements(platform)
    folder = compilers_folder() / platform
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside its place and renamed when whole: half a compiler is worse than none.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{platform}-") as scratch:
        fresh = pathlib.Path(scratch) / "packages"
        ran = subprocess.run([*_installer(), "--no-deps", "--target", str(fresh), *wanted])
        if ran.returncode != 0 or not fresh.is_dir():
            raise UserError(
                f"the compiler for {platform} could not be installed: {' '.join(wanted)}",
                where=str(folder),
                fix="see the lines above; there may be no wheels for this Python, machine or version of jax",
            )
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
        elif folder.exists():
            shutil.rmtree(folder)
        fresh.rename(folder)
    return folder


def _installer() -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--quiet", "--python", sys.executable, "--only-binary=:all:"]
    raise UserError(
        "neither pip nor uv is there to install with", where=sys.executable, fix="python -m ensurepip, or install uv"
    )
