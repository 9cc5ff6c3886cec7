"""Stand-ins for libraries of GPU drivers that a compiler needs and a machine without such a GPU lacks.

The wheels of JAX's ROCm plugin contain XLA's whole compiler for AMD GPUs, but can be loaded only where HIP, rocBLAS,
MIOpen and others are, which come with an installation of ROCm. A stub ("stand-in") defines the symbols that the wheels
import; each function does nothing and returns hipErrorNoDevice, so nothing can run by mistake. Installed libraries are
replaced only where the caller says so.

Layouts as in the System V ABI (generic, chapters 4 and 5) and the GNU symbol versioning of the Linux Standard Base.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import mmap
import os
import pathlib
import re
import shutil
import struct
import tempfile
from collections.abc import Iterable, Mapping, Sequence

PAGE = 0x1000
NEEDED, STRTAB, SYMTAB, STRSZ, SYMENT, SONAME, HASH, RPATH, RUNPATH = 1, 5, 6, 10, 11, 14, 4, 15, 29
VERSYM, VERDEF, VERDEFNUM = 0x6FFFFFF0, 0x6FFFFFFC, 0x6FFFFFFD
DYNAMIC_SECTION, DYNSYM_SECTION, VERSYM_SECTION, VERNEED_SECTION = 6, 11, 0x6FFFFFFF, 0x6FFFFFFE


@dataclasses.dataclass(frozen=True)
class SharedObject:
    """The dynamic-linking information of a shared object.

    `needed` are the libraries it depends on and `paths` its own search paths for them ($ORIGIN resolved). `defined` are
    the symbols it exports; `undefined` those it imports, each with the (library, version) it is bound to, or None.
    """

    needed: list[str]
    paths: list[pathlib.Path]
    defined: set[str]
    undefined: dict[str, tuple[str, str] | None]


def read(path: pathlib.Path) -> SharedObject:
    """Reads a shared object. Raises: ValueError if the file is not a 64-bit little-endian ELF object."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is not a 64-bit ELF object")
        start, entry_size, count = *struct.unpack_from("<Q", data, 0x28), *struct.unpack_from("<HH", data, 0x3A)
        sections = [struct.unpack_from("<IIQQQQIIQQ", data, start + n * entry_size) for n in range(count)]
        by_kind = {kind: section for section in sections if (kind := section[1]) in _READ}

        def text(strings: tuple[int, ...], offset: int) -> str:
            begin = strings[4] + offset
            return data[begin : data.find(b"\0", begin)].decode()

        def strings_of(section: tuple[int, ...]) -> tuple[int, ...]:
            return sections[section[6]]

        needed, paths = [], []
        if dynamic := by_kind.get(DYNAMIC_SECTION):
            for at in range(dynamic[4], dynamic[4] + dynamic[5], 16):
                tag, value = struct.unpack_from("<qQ", data, at)
                if tag == NEEDED:
                    needed.append(text(strings_of(dynamic), value))
                elif tag in (RPATH, RUNPATH):
                    entries = text(strings_of(dynamic), value).replace("$ORIGIN", str(path.parent.resolve()))
                    paths += [pathlib.Path(entry) for entry in entries.split(":") if entry]
        versions: dict[int, tuple[str, str]] = {}
        if version_needs := by_kind.get(VERNEED_SECTION):
            strings, at = strings_of(version_needs), version_needs[4]
            for _ in range(version_needs[7]):
                _, entries, file_name, first, following = struct.unpack_from("<HHIII", data, at)
                entry = at + first
                for _ in range(entries):
                    _, _, number, name, after = struct.unpack_from("<IHHII", data, entry)
                    versions[number & 0x7FFF] = (text(strings, file_name), text(strings, name))
                    entry += after
                at += following
        defined, undefined = set[str](), dict[str, tuple[str, str] | None]()
        if symbols := by_kind.get(DYNSYM_SECTION):
            versym = by_kind.get(VERSYM_SECTION)
            for n in range(1, symbols[5] // 24):
                name, info, _, section, _, _ = struct.unpack_from("<IBBHQQ", data, symbols[4] + n * 24)
                if section:
                    defined.add(text(strings_of(symbols), name))
                elif info >> 4 != 2:  # weak symbols may stay undefined
                    number = struct.unpack_from("<H", data, versym[4] + n * 2)[0] & 0x7FFF if versym else 0
                    undefined[text(strings_of(symbols), name)] = versions.get(number)
    return SharedObject(needed, paths, defined, undefined)


_READ = {DYNAMIC_SECTION, DYNSYM_SECTION, VERSYM_SECTION, VERNEED_SECTION}


def stand_in(soname: str, functions: Mapping[str, str | None], versions: Iterable[str], code: int) -> bytes:
    """The bytes of a shared object named `soname` whose functions do nothing but return `code`.

    `functions` maps each symbol to its version or None; `versions` are additional version names to define.
    """
    names = list(functions)
    defined = list(dict.fromkeys([soname, *versions, *(v for v in functions.values() if v is not None)]))
    strings, at = bytearray(b"\0"), dict[str, int]()
    for string in dict.fromkeys([soname, *names, *defined]):
        at[string] = len(strings)
        strings += string.encode() + b"\0"

    # Segment 1, read and execute: header, program headers, hash, symbols, versions, strings, code.
    # Segment 2, read and write: dynamic.
    program = b"\xb8" + struct.pack("<i", code) + b"\xc3"  # mov eax, code; ret
    sizes = {
        "head": 64 + 4 * 56,
        "hash": 4 * (2 + 1 + len(names) + 1),
        "symbols": 24 * (len(names) + 1),
        "versym": 2 * (len(names) + 1),
        "verdef": 28 * len(defined),
        "strings": len(strings),
        "code": len(program),
    }
    offsets, end = dict[str, int](), 0
    for part, size in sizes.items():
        offsets[part] = end = -(-end // 16) * 16
        end += size
    tags = [
        (SONAME, at[soname]),
        (HASH, offsets["hash"]),
        (STRTAB, offsets["strings"]),
        (STRSZ, len(strings)),
        (SYMTAB, offsets["symbols"]),
        (SYMENT, 24),
        (VERSYM, offsets["versym"]),
        (VERDEF, offsets["verdef"]),
        (VERDEFNUM, len(defined)),
        (0, 0),
    ]
    dynamic = b"".join(struct.pack("<qQ", *tag) for tag in tags)
    dynamic_offset = -(-end // PAGE) * PAGE
    image = bytearray(dynamic_offset + len(dynamic))

    def put(offset: int, form: str, *values: int) -> None:
        struct.pack_into(form, image, offset, *values)

    image[:16] = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    put(16, "<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 4, 0, 0, 0)
    for n, (kind, flags, offset, size, align) in enumerate(
        [
            (1, 5, 0, end, PAGE),
            (1, 6, dynamic_offset, len(dynamic), PAGE),
            (2, 6, dynamic_offset, len(dynamic), 8),
            (0x6474E551, 6, 0, 0, 16),
        ]
    ):
        put(64 + n * 56, "<IIQQQQQQ", kind, flags, offset, offset, offset, size, size, align)
    # A hash table of one bucket: the loader searches all symbols linearly, which is fast enough for some hundreds.
    put(offsets["hash"], "<III", 1, len(names) + 1, 1 if names else 0)
    for n in range(len(names)):
        following = n + 2 if n + 1 < len(names) else 0
        put(offsets["hash"] + 4 * (3 + 1 + n), "<I", following)
    put(offsets["hash"] + 12, "<I", 0)
    for n, name in enumerate(names, start=1):
        put(offsets["symbols"] + 24 * n, "<IBBHQQ", at[name], 0x12, 0, 1, offsets["code"], len(program))
        version = functions[name]
        put(offsets["versym"] + 2 * n, "<H", 1 if version is None else defined.index(version) + 1)
    for n, name in enumerate(defined):
        record, last = offsets["verdef"] + 28 * n, n + 1 == len(defined)
        put(record, "<HHHHIII", 1, 1 if n == 0 else 0, n + 1, 1, _elf_hash(name), 20, 0 if last else 28)
        put(record + 20, "<II", at[name], 0)
    image[offsets["strings"] : offsets["strings"] + len(strings)] = strings
    image[offsets["code"] : offsets["code"] + len(program)] = program
    image[dynamic_offset:] = dynamic
    return bytes(image)


def _elf_hash(name: str) -> int:
    """The System V hash of a name, stored in version records."""
    value = 0
    for byte in name.encode():
        value = (value << 4) + byte
        value = (value ^ (value >> 24 & 0xF0)) & 0x0FFFFFFF
    return value


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
    paths: Iterable[pathlib.Path], cache: pathlib.Path, folders: Sequence[pathlib.Path], replaced: Sequence[str] = ()
) -> pathlib.Path | None:
    """A folder inside `cache` with a stub for every missing library, built once; None if none is missing.

    The libraries `replaced` get a stub wherever they are needed, installed or not.
    """
    objects = {path: read(path) for path in paths}
    needed = {name for image in objects.values() for name in image.needed}
    missing = sorted({*missing_libraries(objects, folders), *needed.intersection(replaced)})
    if not missing:
        return None
    functions, versions = _imported_symbols(objects, set(missing), folders)
    images = {name: stand_in(name, functions[name], sorted(versions[name]), NO_DEVICE) for name in missing}
    digest = hashlib.sha256(b"".join(images[name] for name in missing)).hexdigest()[:16]
    folder = cache / f"stand-ins-{digest}"
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
        present = [name for name in image.needed if name not in missing]
        installed = {path for name in present if (path := _resolve(name, image, folders))}
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
