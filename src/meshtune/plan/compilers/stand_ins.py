"""Builds stub libraries for those that ROCm's compiler links against but does not call while it compiles.

The wheels of JAX's ROCm plugin contain XLA's whole compiler for AMD GPUs, but can be loaded only where HIP, rocBLAS,
MIOpen and others are, which come with an installation of ROCm. A stub ("stand-in") defines the symbols that the wheels
import; each function does nothing and returns hipErrorNoDevice, so nothing can run by mistake. Installed libraries are
never replaced.
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
    """The libraries that objects need and that are neither in `folders` nor in the objects' own search paths."""
    return sorted(
        {name for image in objects.values() for name in image.needed if _resolve(name, image, folders) is None}
    )


def library_folders(env: Mapping[str, str] = os.environ) -> list[pathlib.Path]:
    """The folders in which the loader searches for libraries, and those of ROCm."""
    from_env = [pathlib.Path(path) for path in env.get("LD_LIBRARY_PATH", "").split(":") if path]
    listed = [line.strip() for name in sorted(glob.glob("/etc/ld.so.conf.d/*.conf")) for line in _lines(name)]
    configured = [pathlib.Path(line) for line in listed if line.startswith("/")]
    rocm = [pathlib.Path(path) for pattern in ROCM for path in sorted(glob.glob(pattern))]
    return [*from_env, *configured, *map(pathlib.Path, SYSTEM), *rocm]


def build_stand_ins(
    paths: Iterable[pathlib.Path], cache: pathlib.Path, folders: Sequence[pathlib.Path]
) -> pathlib.Path | None:
    """A folder inside `cache` with a stub for every missing library, built once; None if none is missing."""
    objects = {path: read(path) for path in paths}
    missing = missing_libraries(objects, folders)
    if not missing:
        return None
    functions, versions = _imported_symbols(objects, set(missing), folders)
    images = {name: stand_in(name, functions[name], sorted(versions[name]), NO_DEVICE) for name in missing}
    digest = hashlib.sha256(b"".join(images[name] for name in missing)).hexdigest()[:16]
    folder = cache / f"rocm-stand-ins-{digest}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        # Built in a scratch folder and renamed: another process may build them at the same time.
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            ready = pathlib.Path(scratch) / "ready"
            ready.mkdir()
            for name, image in images.items():
                (ready / name).write_bytes(image)
            try:
                ready.rename(folder)
            except OSError:
                if not folder.is_dir():
                    raise
    return folder


def _imported_symbols(
    objects: Mapping[pathlib.Path, SharedObject], missing: set[str], folders: Sequence[pathlib.Path]
) -> tuple[dict[str, dict[str, str | None]], dict[str, set[str]]]:
    """(functions with their versions, version names) that are imported from each missing library.

    An unversioned symbol does not name its library, so every stub defines all unversioned symbols that no installed
    library of the importing object defines.
    """
    functions: dict[str, dict[str, str | None]] = {name: {} for name in missing}
    versions: dict[str, set[str]] = {name: set() for name in missing}
    unversioned = set[str]()
    for image in objects.values():
        installed = {path for name in image.needed if (path := _resolve(name, image, folders))}
        defined = set[str]().union(*(read(path).defined for path in installed))
        for symbol, version in image.undefined.items():
            if version is not None and version[0] in missing:
                functions[version[0]][symbol] = version[1]
                versions[version[0]].add(version[1])
            elif version is None and symbol not in defined and not symbol.startswith(("Py", "_Py")):  # Python's own
                unversioned.add(symbol)
    for symbols in functions.values():
        symbols |= dict.fromkeys(sorted(unversioned - set(symbols)))
    return {name: dict(sorted(symbols.items())) for name, symbols in functions.items()}, versions


def _resolve(name: str, image: SharedObject, folders: Sequence[pathlib.Path]) -> pathlib.Path | None:
    """The path of a library that an object needs, None if it is not installed."""
    return next((path for folder in [*image.paths, *folders] if (path := folder / name).is_file()), None)


def _lines(path: str) -> list[str]:
    return pathlib.Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
