"""AMD kernels' metadata out of a serialised JAX executable: registers, spills and memory of each kernel.

The executable holds a Riegeli file (google/riegeli, doc/riegeli_records_file_format.md) whose chunks are compressed by
Snappy (google/snappy, format_description.txt); in it lie ELF code objects, whose notes describe each kernel in
MessagePack (LLVM's AMDGPU usage page, code object V5 metadata).
"""

from __future__ import annotations

import re

SIGNATURE = bytes.fromhex("83af70d10d884a3f")
BLOCK, BLOCK_HEADER, CHUNK_HEADER = 65536, 24, 40
ACCUMULATION = ".agpr_count"
FACTS = (".vgpr_count", ACCUMULATION, ".vgpr_spill_count", ".group_segment_fixed_size", ".private_segment_fixed_size")


def kernels(serialised: bytes) -> dict[str, dict[str, int]]:
    """The facts of each kernel by its name."""
    records = _records(serialised)
    names = [name.decode() for name in re.findall(rb"\.symbol(?:[\xa0-\xbf]|\xd9.)([\w.]+?)\.kd", records, re.DOTALL)]
    columns = {key: [_integer(records, found.end()) for found in _keys(records, key)] for key in FACTS}
    columns[ACCUMULATION] = columns[ACCUMULATION] or [0] * len(names)  # RDNA has no such registers
    assert all(len(column) == len(names) for column in columns.values()), f"{len(names)} kernels, {columns}"
    return {name: {key: columns[key][i] for key in FACTS} for i, name in enumerate(names)}


def _keys(records: bytes, key: str):
    """Where a map has this key: a short string of MessagePack, whose first byte is its length."""
    return re.finditer(re.escape(bytes([0xA0 | len(key)]) + key.encode()), records)


def _integer(records: bytes, at: int) -> int:
    first = records[at]
    width = {0xCC: 1, 0xCD: 2, 0xCE: 4}.get(first, 0)
    return int.from_bytes(records[at + 1 : at + 1 + width], "big") if width else first


def _records(serialised: bytes) -> bytes:
    file = serialised[serialised.index(SIGNATURE) :]
    chunks = b"".join(file[start + BLOCK_HEADER : start + BLOCK] for start in range(0, len(file), BLOCK))
    at, found = 0, b""
    while at + CHUNK_HEADER <= len(chunks):
        size, kind = int.from_bytes(chunks[at + 8 : at + 16], "little"), chunks[at + 24]
        data = chunks[at + CHUNK_HEADER : at + CHUNK_HEADER + size]
        at += CHUNK_HEADER + size
        if kind == ord("r") and data[:1] == b"s":
            sizes, start = _varint(data, 1)
            _, start = _varint(data, start + sizes)  # the values' length once decompressed, which Snappy says again
            found += _snappy(data, start)
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


def _snappy(data: bytes, at: int) -> bytes:
    length, at = _varint(data, at)
    out = bytearray()
    while len(out) < length:
        tag, at = data[at], at + 1
        match tag & 3:
            case 0:
                count, more = tag >> 2, max(0, (tag >> 2) - 59)
                if more:
                    count, at = int.from_bytes(data[at : at + more], "little"), at + more
                out += data[at : at + count + 1]
                at += count + 1
                continue
            case 1:
                count, offset, at = (tag >> 2 & 7) + 4, tag >> 5 << 8 | data[at], at + 1
            case kind:
                width = 2 if kind == 2 else 4
                count, offset, at = (tag >> 2) + 1, int.from_bytes(data[at : at + width], "little"), at + width
        for _ in range(count):
            out.append(out[-offset])
    return bytes(out)
