"""Stand-ins for libraries that ROCm's compiler links against but never calls while it compiles.

The wheels of JAX's ROCm plugin hold all of XLA's compiler for AMD GPUs, and need HIP, rocBLAS, MIOpen and others, which
only an installation of ROCm has, to be loaded at all. A stand-in gives the names that the wheels ask for; each function
answers hipErrorNoDevice and does nothing, so nothing can be run by mistake. What is installed is never replaced.
"""

from __future__ import annotations

import glob
import hashlib
import os
import pathlib
import tempfile
from collections.abc import Iterable, Mapping, Sequence

from meshtune.plan.compilers.elf import SharedObject, read, stand_in

NO_DEVICE = 100  # hipErrorNoDevice
SYSTEM = (
    "/lib64",
    "/usr/lib64",
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/local/lib",
    "/lib",
    "/usr/lib",
)
ROCM = ("/opt/rocm/lib", "/opt/rocm-*/lib")


def missing_libraries(objects: Mapping[pathlib.Path, SharedObject], folders: Sequence[pathlib.Path]) -> list[str]:
    """The libraries that objects need and that are in none of `folders` nor where the objects themselves look."""
    return sorted({name for one in objects.values() for name in one.needed if _where(name, one, folders) is None})


def library_folders(env: Mapping[str, str] = os.environ) -> list[pathlib.Path]:
    """Where the loader finds libraries, and where ROCm is installed."""
    own = [pathlib.Path(word) for word in env.get("LD_LIBRARY_PATH", "").split(":") if word]
    listed = [line.strip() for name in sorted(glob.glob("/etc/ld.so.conf.d/*.conf")) for line in _lines(name)]
    rocm = [pathlib.Path(found) for pattern in ROCM for found in sorted(glob.glob(pattern))]
    return [*own, *(pathlib.Path(line) for line in listed if line.startswith("/")), *map(pathlib.Path, SYSTEM), *rocm]


def build_stand_ins(
    paths: Iterable[pathlib.Path], cache: pathlib.Path, folders: Sequence[pathlib.Path]
) -> pathlib.Path | None:
    """A folder inside `cache` with a stand-in for every missing library, made once; None if none is missing."""
    objects = {path: read(path) for path in paths}
    missing = missing_libraries(objects, folders)
    if not missing:
        return None
    functions, versions = _wanted(objects, set(missing), folders)
    made = {name: stand_in(name, functions[name], sorted(versions[name]), NO_DEVICE) for name in missing}
    digest = hashlib.sha256(b"".join(made[name] for name in missing)).hexdigest()[:16]
    folder = cache / f"rocm-stand-ins-{digest}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        # Made beside and renamed: another process may make them at the same time.
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            ready = pathlib.Path(scratch) / "ready"
            ready.mkdir()
            for name, image in made.items():
                (ready / name).write_bytes(image)
            try:
                ready.rename(folder)
            except OSError:
                if not folder.is_dir():
                    raise
    return folder


def _wanted(
    objects: Mapping[pathlib.Path, SharedObject], missing: set[str], folders: Sequence[pathlib.Path]
) -> tuple[dict[str, dict[str, str | None]], dict[str, set[str]]]:
    """(functions with their versions, version names), of each missing library.

    A name without a version does not say whose it is; each stand-in gives all of those, for an object is only given
    what the libraries it needs itself have.
    """
    functions: dict[str, dict[str, str | None]] = {name: {} for name in missing}
    versions: dict[str, set[str]] = {name: set() for name in missing}
    anyone = set[str]()
    for one in objects.values():
        given = {found for name in one.needed if (found := _where(name, one, folders))}
        there = set[str]().union(*(read(path).defined for path in given))
        for name, version in one.undefined.items():
            if version is not None and version[0] in missing:
                functions[version[0]][name] = version[1]
                versions[version[0]].add(version[1])
            elif version is None and name not in there and not name.startswith(("Py", "_Py")):  # Python gives its own
                anyone.add(name)
    for mine in functions.values():
        mine |= dict.fromkeys(sorted(anyone - set(mine)))
    return {name: dict(sorted(mine.items())) for name, mine in functions.items()}, versions


def _where(name: str, one: SharedObject, folders: Sequence[pathlib.Path]) -> pathlib.Path | None:
    return next((path for folder in [*one.paths, *folders] if (path := folder / name).is_file()), None)


def _lines(path: str) -> list[str]:
    return pathlib.Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
