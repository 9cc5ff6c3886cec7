"""Installs compilers from the package index into a separate folder, where other runs do not load them."""

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

# The extras of jax that list each platform's wheels with matching versions, in order of preference.
EXTRAS = {"cuda": ("cuda12-local", "cuda13-local"), "rocm": ("rocm7-local",), "tpu": ("tpu",)}
# The wheel with ptxas and libdevice, which XLA needs to compile for NVIDIA, and which jax's extra does not list.
ASSEMBLER = {"12": "nvidia-cuda-nvcc-cu12>=12.6.85", "13": "nvidia-cuda-nvcc>=13"}


def requirements(platform: str) -> list[str]:
    """The packages that compiling for a platform needs, to be installed without their dependencies; about 0.5 GB.

    Raises: UserError for an unknown platform, or for one without wheels for this version of jax.
    """
    if platform not in EXTRAS:
        raise UserError(
            f"there is no compiler to install for '{platform}'",
            where="--install",
            fix=f"{nearest(platform, EXTRAS)}choose of {', '.join(EXTRAS)}",
        )
    requirements_of_jax = [Requirement(line) for line in importlib.metadata.requires("jax") or []]
    for extra in EXTRAS[platform]:
        compilers = [
            requirement
            for requirement in requirements_of_jax
            if requirement.marker is not None
            and requirement.marker.evaluate({"extra": extra})
            and requirement.name.startswith(("jax-cuda", "jax-rocm", "libtpu"))
        ]
        if compilers:
            return _with_companions(compilers)
    raise UserError(
        f"jax {importlib.metadata.version('jax')} lists no compiler for {platform}",
        where="--install",
        fix=f"install it by hand into {compilers_folder() / platform}",
    )


def _with_companions(compilers: Iterable[Requirement]) -> list[str]:
    """The requirements with the PJRT library of each plugin, and the assembler for CUDA."""
    lines = []
    for requirement in compilers:
        name, specifier = requirement.name, requirement.specifier
        lines.append(f"{name}{specifier}")
        if name.endswith("-plugin"):
            lines.append(f"{name.removesuffix('plugin')}pjrt{specifier}")
        if name.startswith("jax-cuda"):
            lines.append(ASSEMBLER[name.removeprefix("jax-cuda")[:2]])
    return lines


def install(platform: str) -> pathlib.Path:
    """Installs a platform's compiler into `compilers_folder`, replacing an installed one; pip's own output is shown.

    Raises: UserError, as `requirements` does, and if the installation fails.
    """
    packages = requirements(platform)
    folder = compilers_folder() / platform
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Installed next to the final folder and renamed when complete, so that a failure leaves no partial compiler.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{platform}-") as scratch:
        fresh = pathlib.Path(scratch) / "packages"
        ran = subprocess.run([*_installer(), "--no-deps", "--target", str(fresh), *packages])
        if ran.returncode != 0 or not fresh.is_dir():
            raise UserError(
                f"the compiler for {platform} could not be installed: {' '.join(packages)}",
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
        "neither pip nor uv is available to install with",
        where=sys.executable,
        fix="python -m ensurepip, or install uv",
    )
