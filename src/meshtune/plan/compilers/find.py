"""Finds the compilers of accelerators on this machine, and installs those that are missing.

A separate folder is better: JAX loads every plugin in its environment, also in runs that have nothing to do with plans.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping

from packaging.requirements import Requirement

from meshtune.cache import cache_folder
from meshtune.errors import UserError, nearest, pip_install
from meshtune.plan.compilers.stand_ins import build_stand_ins, find_linker, library_folders

COMPILERS_VARIABLE = "MESHTUNE_COMPILERS"  # environment variable: the folder that holds cuda/, rocm/, tpu/ and oneapi/


@dataclasses.dataclass(frozen=True)
class Compiler:
    """An installed compiler: its packages with their versions, and the environment variables to run it with.

    `folder` holds the packages; it is None if they are in Meshtune's own environment. `notes` list substitutes for
    missing libraries.
    """

    platform: str
    packages: dict[str, str]
    folder: pathlib.Path | None
    env: dict[str, str]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ", ".join(f"{name} {version}" for name, version in self.packages.items())


@dataclasses.dataclass(frozen=True)
class MissingCompiler:
    """Why there is no usable compiler for a platform, and how to get one."""

    platform: str
    reason: str
    fix: str


def compilers_folder(env: Mapping[str, str] = os.environ) -> pathlib.Path:
    """The folder into which `meshtune doctor --install` installs compilers, with a subfolder for each platform."""
    return (
        pathlib.Path(env[COMPILERS_VARIABLE]).expanduser()
        if env.get(COMPILERS_VARIABLE)
        else cache_folder(env) / "compilers"
    )


def find_compiler(platform: str, env: Mapping[str, str] = os.environ) -> Compiler | MissingCompiler:
    """The compiler for a platform: the one in `compilers_folder`, else that of the environment."""
    if platform == "cpu":
        return Compiler("cpu", _versions(None, ("jaxlib",)), None, {})
    if platform not in _FIND:
        return MissingCompiler(platform, NO_COMPILER, "a run's report compares them with what it measures")
    separate = compilers_folder(env) / platform
    folders = [separate] if separate.is_dir() else []
    results = [_FIND[platform](folder, env) for folder in (*folders, None)]
    return next((result for result in results if isinstance(result, Compiler)), results[0])


def require_compiler(platform: str) -> Compiler:
    """The compiler for a platform. Raises: UserError, with the way to install it, if it is missing."""
    result = find_compiler(platform)
    if isinstance(result, MissingCompiler):
        raise UserError(result.reason, where=f"the compiler for {platform}", fix=result.fix)
    return result


def how_to_install(platform: str) -> str:
    return f"run `meshtune doctor --install {platform}`, or {pip_install(f'plan-{platform}')}"


def _cuda(folder: pathlib.Path | None, env: Mapping[str, str]) -> Compiler | MissingCompiler:
    for generation in ("13", "12"):
        plugin = _package(folder, f"jax_plugins/xla_cuda{generation}")
        packages = _versions(folder, (f"jax-cuda{generation}-plugin", f"jax-cuda{generation}-pjrt"))
        if plugin is None or len(packages) < 2:
            continue
        if mismatch := _version_mismatch(packages):
            return MissingCompiler("cuda", mismatch, how_to_install("cuda"))
        tool = f"nvidia-cuda-nvcc{'-cu12' if generation == '12' else ''}"
        home = _package(folder, "nvidia/cuda_nvcc" if generation == "12" else "nvidia/cu13")
        if home is None or not (home / "bin/ptxas").is_file():
            home = next((path for path in _cuda_homes(env) if (path / "bin/ptxas").is_file()), None)
        else:
            packages |= _versions(folder, (tool,))
        if home is None:
            return MissingCompiler(
                "cuda",
                f"XLA's compiler for NVIDIA GPUs is installed, but ptxas and libdevice are not ({tool})",
                how_to_install("cuda"),
            )
        variables = {
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # compiling does not need cuBLAS, cuDNN and the like
            "CUDA_VISIBLE_DEVICES": "-1",  # hides GPUs of this machine
            "CUDA_ROOT": str(home),  # where JAX and XLA first look for ptxas and libdevice
        }
        return Compiler("cuda", packages, folder, variables)
    return MissingCompiler("cuda", "XLA's compiler for NVIDIA GPUs is not installed", how_to_install("cuda"))


def _rocm(folder: pathlib.Path | None, env: Mapping[str, str]) -> Compiler | MissingCompiler:
    plugin, kernels = _package(folder, "jax_plugins/xla_rocm7"), _package(folder, "jax_rocm7_plugin")
    packages = _versions(folder, ("jax-rocm7-plugin", "jax-rocm7-pjrt"))
    if plugin is None or kernels is None:
        return MissingCompiler("rocm", "XLA's compiler for AMD GPUs is not installed", how_to_install("rocm"))
    if mismatch := _version_mismatch(packages):
        return MissingCompiler("rocm", mismatch, how_to_install("rocm"))
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return MissingCompiler("rocm", "XLA's compiler for AMD GPUs runs only on x86-64 Linux", "plan for it there")
    objects = [*sorted(plugin.glob("*.so")), *sorted(kernels.glob("*.so"))]
    stand_ins = build_stand_ins(objects, cache_folder(env), library_folders(env))
    variables = {"ROCR_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
    notes = ()
    if stand_ins is not None:
        variables["LD_LIBRARY_PATH"] = (
            f"{stand_ins}:{env['LD_LIBRARY_PATH']}" if env.get("LD_LIBRARY_PATH") else str(stand_ins)
        )
        notes = (f"ROCm is not installed: stubs for its libraries are in {stand_ins}",)
    if linker := find_linker(env):  # for wheels that were built without a linker of their own
        variables["PATH"] = f"{linker.parent}:{env.get('PATH', os.defpath)}"
    return Compiler("rocm", packages, folder, variables, notes)


def _tpu(folder: pathlib.Path | None, env: Mapping[str, str]) -> Compiler | MissingCompiler:
    if _package(folder, "libtpu") is None:
        return MissingCompiler("tpu", "XLA's compiler for TPUs (libtpu) is not installed", how_to_install("tpu"))
    variables = {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes may compile at once; none touches a TPU
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "",  # empty variables are unset, which hides a TPU of this machine
        "TPU_LIBRARY_PATH": "",
    }
    return Compiler("tpu", _versions(folder, ("libtpu",)), folder, variables)


def _oneapi(folder: pathlib.Path | None, env: Mapping[str, str]) -> Compiler | MissingCompiler:
    plugin, packages = _package(folder, "jax_plugins/xla_oneapi"), _versions(folder, ONEAPI)
    if plugin is None or len(packages) < 2:
        return MissingCompiler("oneapi", "XLA's compiler for Intel GPUs is not installed", how_to_install("oneapi"))
    if mismatch := _version_mismatch(packages):
        return MissingCompiler("oneapi", mismatch, how_to_install("oneapi"))
    runtime = (pathlib.Path(sys.prefix) if folder is None else folder) / "lib"  # SYCL and MKL
    objects = [*plugin.glob("*.so"), *runtime.glob("libur_adapter_*.so.0")]
    stand_ins = build_stand_ins(objects, cache_folder(env), [runtime, *library_folders(env)], LEVEL_ZERO)
    variables = {
        "LD_LIBRARY_PATH": ":".join(filter(None, [str(stand_ins or ""), str(runtime), env.get("LD_LIBRARY_PATH")])),
        # This pass asks the device which of oneDNN's products it has.
        "XLA_FLAGS": f"{env.get('XLA_FLAGS', '')} --xla_disable_hlo_passes=cublas-gemm-rewriter".strip(),
    }
    return Compiler("oneapi", packages, folder, variables, (f"the GPU's driver is replaced by stubs in {stand_ins}",))


ONEAPI = ("jax-oneapi-plugin", "jax-oneapi-pjrt")
LEVEL_ZERO = ("libze_loader.so.1", "libze_tracing_layer.so.1")  # an installed one may be too old, and finds no GPU

_FIND: dict[str, Callable[[pathlib.Path | None, Mapping[str, str]], Compiler | MissingCompiler]] = {
    "cuda": _cuda,
    "rocm": _rocm,
    "tpu": _tpu,
    "oneapi": _oneapi,
}
NO_COMPILER = "programs for Apple's GPUs are run by MLX, which has no compiler to ask for their memory"


def _package(folder: pathlib.Path | None, name: str) -> pathlib.Path | None:
    """The directory of a package inside `folder`, or on `sys.path` without one; nothing is imported."""
    if folder is not None:
        return path if (path := folder / name).is_dir() else None
    for entry in sys.path:
        if (path := pathlib.Path(entry or ".") / name).is_dir():
            return path.resolve()
    return None


def _versions(folder: pathlib.Path | None, names: tuple[str, ...]) -> dict[str, str]:
    """Versions of those of the packages that are installed in `folder`, or on `sys.path` without one."""
    paths = sys.path if folder is None else [str(folder)]
    versions = {}
    for name in names:
        distribution = next(iter(importlib.metadata.distributions(name=name, path=paths)), None)
        if distribution is not None:
            versions[name] = distribution.version
    return versions


def _version_mismatch(packages: Mapping[str, str]) -> str | None:
    """A message if plugins are not of jaxlib's version, as the interface between them is not stable; else None."""
    jaxlib = importlib.metadata.version("jaxlib")
    release = jaxlib.split(".")[:3]
    mismatched = [f"{name} {version}" for name, version in packages.items() if version.split(".")[:3] != release]
    return f"{' and '.join(mismatched)} cannot work with jaxlib {jaxlib}" if mismatched else None


def _cuda_homes(env: Mapping[str, str]) -> list[pathlib.Path]:
    named = [env[name] for name in ("CUDA_ROOT", "CUDA_HOME", "CUDA_PATH") if env.get(name)]
    return [pathlib.Path(path) for path in (*named, "/usr/local/cuda")]


# The extras of jax that list each platform's wheels with matching versions, in order of preference.
EXTRAS = {"cuda": ("cuda12-local", "cuda13-local"), "rocm": ("rocm7-local",), "tpu": ("tpu",), "oneapi": ()}
# The wheel with ptxas and libdevice, which XLA needs to compile for NVIDIA, and which jax's extra does not list.
ASSEMBLER = {"12": "nvidia-cuda-nvcc-cu12>=12.6.85", "13": "nvidia-cuda-nvcc>=13"}


def requirements(platform: str) -> list[str]:
    """The packages that compiling for a platform needs; about 0.5 GB, and 3 GB with Intel's libraries.

    Raises: UserError for an unknown platform, or for one without wheels for this version of jax.
    """
    if platform == "oneapi":
        jaxlib = importlib.metadata.version("jaxlib")
        return [f"{ONEAPI[0]}[with-oneapi]=={jaxlib}", f"{ONEAPI[1]}=={jaxlib}"]
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
        # Intel's libraries are dependencies of its plugin; all others are of jax, which is here.
        alone = () if platform == "oneapi" else ("--no-deps",)
        ran = subprocess.run([*_installer(), *alone, "--target", str(fresh), *packages])
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
