"""Which compilers this installation has: in a folder of their own, or in the environment Meshtune runs in.

A folder of their own is better: JAX loads every plugin it finds, in runs that have nothing to do with planning too.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import pathlib
import sys
from collections.abc import Callable, Mapping

from meshtune.cache import cache_folder
from meshtune.errors import UserError
from meshtune.plan.compilers.linker import find_linker
from meshtune.plan.compilers.stand_ins import build_stand_ins, library_folders

OWN = "MESHTUNE_COMPILERS"  # environment variable: the folder that holds cuda/, rocm/ and tpu/


@dataclasses.dataclass(frozen=True)
class Found:
    """A compiler: packages with their versions, and the variables it runs with.

    `folder` holds the packages (None: they are in the environment). `notes` say what was made up or left out.
    """

    platform: str
    packages: dict[str, str]
    folder: pathlib.Path | None
    env: dict[str, str]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ", ".join(f"{name} {version}" for name, version in self.packages.items())


@dataclasses.dataclass(frozen=True)
class Missing:
    """No compiler: why, and how to get it."""

    platform: str
    reason: str
    fix: str


def compilers_folder(env: Mapping[str, str] = os.environ) -> pathlib.Path:
    """Where `meshtune doctor --install` puts compilers, each platform's in a folder of its own."""
    return pathlib.Path(env[OWN]).expanduser() if env.get(OWN) else cache_folder(env) / "compilers"


def look(platform: str, env: Mapping[str, str] = os.environ) -> Found | Missing:
    """The compiler for a platform: the one in `compilers_folder`, else that of the environment."""
    if platform == "cpu":
        return Found("cpu", _versions(None, ("jaxlib",)), None, {})
    own = compilers_folder(env) / platform
    folders = [own] if own.is_dir() else []
    answers = [_LOOK[platform](folder, env) for folder in (*folders, None)]
    return next((answer for answer in answers if isinstance(answer, Found)), answers[0])


def found_or_error(platform: str) -> Found:
    """Raises: UserError, with the way to get it, if the compiler is missing."""
    answer = look(platform)
    if isinstance(answer, Missing):
        raise UserError(answer.reason, where=f"the compiler for {platform}", fix=answer.fix)
    return answer


def how_to_get(platform: str) -> str:
    return f"run `meshtune doctor --install {platform}`, or pip install 'meshtune[plan-{platform}]'"


def _cuda(folder: pathlib.Path | None, env: Mapping[str, str]) -> Found | Missing:
    for generation in ("13", "12"):
        plugin = _package(folder, f"jax_plugins/xla_cuda{generation}")
        packages = _versions(folder, (f"jax-cuda{generation}-plugin", f"jax-cuda{generation}-pjrt"))
        if plugin is None or len(packages) < 2:
            continue
        if wrong := _not_jaxs(packages):
            return Missing("cuda", wrong, how_to_get("cuda"))
        tool = f"nvidia-cuda-nvcc{'-cu12' if generation == '12' else ''}"
        inside = "nvidia/cuda_nvcc" if generation == "12" else "nvidia/cu13"
        home = _package(folder, inside)
        if home is None or not (home / "bin/ptxas").is_file():
            home = next((path for path in _cuda_homes(env) if (path / "bin/ptxas").is_file()), None)
        else:
            packages |= _versions(folder, (tool,))
        if home is None:
            return Missing(
                "cuda",
                f"XLA's compiler for NVIDIA is there, but ptxas and libdevice are not ({tool})",
                how_to_get("cuda"),
            )
        more = {
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # cuBLAS, cuDNN and the like are not needed to compile
            "CUDA_VISIBLE_DEVICES": "-1",  # a GPU that is here takes no part
            "CUDA_ROOT": str(home),  # where JAX and XLA look for ptxas and libdevice first
        }
        return Found("cuda", packages, folder, more)
    return Missing("cuda", "XLA's compiler for NVIDIA GPUs is not installed", how_to_get("cuda"))


def _rocm(folder: pathlib.Path | None, env: Mapping[str, str]) -> Found | Missing:
    plugin, kernels = _package(folder, "jax_plugins/xla_rocm7"), _package(folder, "jax_rocm7_plugin")
    packages = _versions(folder, ("jax-rocm7-plugin", "jax-rocm7-pjrt"))
    if plugin is None or kernels is None:
        return Missing("rocm", "XLA's compiler for AMD GPUs is not installed", how_to_get("rocm"))
    if wrong := _not_jaxs(packages):
        return Missing("rocm", wrong, how_to_get("rocm"))
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return Missing("rocm", "XLA's compiler for AMD GPUs runs on 64-bit x86 Linux alone", "plan for it there")
    objects = [*sorted(plugin.glob("*.so")), *sorted(kernels.glob("*.so"))]
    stand_ins = build_stand_ins(objects, cache_folder(env), library_folders(env))
    more = {"ROCR_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
    notes = ()
    if stand_ins is not None:
        more["LD_LIBRARY_PATH"] = (
            f"{stand_ins}:{env['LD_LIBRARY_PATH']}" if env.get("LD_LIBRARY_PATH") else str(stand_ins)
        )
        notes = (f"without ROCm: stand-ins for its libraries in {stand_ins}",)
    if linker := find_linker(env):  # the wheels link GPU code themselves; where they were built without, with this
        more["PATH"] = f"{linker.parent}:{env.get('PATH', os.defpath)}"
    return Found("rocm", packages, folder, more, notes)


def _tpu(folder: pathlib.Path | None, env: Mapping[str, str]) -> Found | Missing:
    if _package(folder, "libtpu") is None:
        return Missing("tpu", "XLA's compiler for TPUs (libtpu) is not installed", how_to_get("tpu"))
    more = {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several may compile at once; none touches a TPU
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "",  # what is empty is unset: a TPU that is here takes no part
        "TPU_LIBRARY_PATH": "",
    }
    return Found("tpu", _versions(folder, ("libtpu",)), folder, more)


_LOOK: dict[str, Callable[[pathlib.Path | None, Mapping[str, str]], Found | Missing]] = {
    "cuda": _cuda,
    "rocm": _rocm,
    "tpu": _tpu,
}


def _package(folder: pathlib.Path | None, name: str) -> pathlib.Path | None:
    """The directory of a package inside `folder`, or of one that can be imported here; nothing is imported."""
    if folder is not None:
        return path if (path := folder / name).is_dir() else None
    for entry in sys.path:
        if (path := pathlib.Path(entry or ".") / name).is_dir():
            return path.resolve()
    return None


def _versions(folder: pathlib.Path | None, names: tuple[str, ...]) -> dict[str, str]:
    """Versions of the packages that are installed there."""
    where = sys.path if folder is None else [str(folder)]
    found = {}
    for name in names:
        one = next(iter(importlib.metadata.distributions(name=name, path=where)), None)
        if one is not None:
            found[name] = one.version
    return found


def _not_jaxs(packages: Mapping[str, str]) -> str | None:
    """What is wrong if plugins are not of JAX's own version: they share an interface that has no other promise."""
    here = importlib.metadata.version("jaxlib")
    wrong = [f"{name} {version}" for name, version in packages.items() if version.split(".")[:3] != here.split(".")[:3]]
    return f"{' and '.join(wrong)} cannot work with jaxlib {here}" if wrong else None


def _cuda_homes(env: Mapping[str, str]) -> list[pathlib.Path]:
    named = [env[name] for name in ("CUDA_ROOT", "CUDA_HOME", "CUDA_PATH") if env.get(name)]
    return [pathlib.Path(path) for path in (*named, "/usr/local/cuda")]
