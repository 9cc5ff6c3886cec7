"""Reads the symbol tables of x86-64 Linux shared objects, and writes stubs whose functions return an error code.

Layouts as in the System V ABI (generic, chapters 4 and 5) and the GNU symbol versioning of the Linux Standard Base.
"""

from __future__ import annotations

import dataclasses
import mmap
import pathlib
import struct
from collections.abc import Iterable, Mapping

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
