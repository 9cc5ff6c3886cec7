"""What the devices of a compiled program exchange, from its HLO text: what, how much, among whom, how often."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "f16": 16, "bf16": 16, "s32": 32, "u32": 32,
    "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128, "s2": 2, "u2": 2,
}  # fmt: skip

# Attributes of a kernel may go over several lines, some of which begin with braces, too.
_END = re.compile(r"^\}(, execution_thread=.*)?$")
_HEAD = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$")
_CALL = re.compile(r"^(?P<shape>\(.*?\)|\S+) (?P<op>[a-z][\w\-]*)\((?P<operands>.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,<=]*)\]")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"?(\d+)')
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation|async_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One operation of a program. `bytes` is the whole array that is gathered, summed or moved, for one device's group.

    `members` are the devices' places in the program's device order, of the group that lies widest apart; `count` is how
    often a step runs it, for one turn of any loop whose length only the running program knows (`open` then is true).
    """

    kind: str
    bytes: int
    members: tuple[int, ...]
    count: int
    open: bool = False

    @property
    def group_size(self) -> int:
        return len(self.members)

    @property
    def moved(self) -> float:
        """Bytes that one device sends (and receives) when the operation runs once, over rings."""
        n = max(1, self.group_size)
        match self.kind:
            case "all-reduce":
                return 2 * self.bytes * (n - 1) / n
            case "collective-permute" | "collective-broadcast":
                return float(self.bytes)
            case _:
                return self.bytes * (n - 1) / n

    def hosts(self, each: int) -> int:
        """On how many hosts of `each` devices its group lies."""
        return len({member // each for member in self.members})


def collectives_of(hlo_text: str, devices: int | None = None) -> list[Collective]:
    """Every collective operation of a compiled module's text, those alike taken together.

    Operations in loops count as often as the loop turns, where the compiler knows it (`known_trip_count`); pairs of
    start and done are one operation. `devices` is needed only where a group is written as "all".
    """
    computations, entry = _computations(hlo_text)
    found: dict[tuple[str, int, tuple[int, ...], bool], int] = {}
    for name, times, unknown in _visits(computations, entry):
        for kind, size, members in _here(computations[name], devices):
            key = (kind, size, members, unknown)
            found[key] = found.get(key, 0) + times
    return [Collective(kind, size, members, count, unknown) for (kind, size, members, unknown), count in found.items()]


def shape_bytes(shape: str) -> int:
    """Bytes of an HLO shape such as `bf16[8,128]{1,0}` or a tuple of them."""
    return sum(_array_bytes(kind, dims) for kind, dims in _ARRAY.findall(shape))


def _array_bytes(kind: str, dims: str) -> int:
    bits = BITS.get(kind) or (8 if kind.startswith("f8") else 4 if kind.startswith("f4") else 0)
    count = math.prod(int(n.removeprefix("<=")) for n in dims.split(",") if n)
    return -(-count * bits // 8)


def _computations(text: str) -> tuple[dict[str, list[tuple[str, str]]], str]:
    """(each computation's lines as (name, rest), the name of the entry)."""
    computations: dict[str, list[tuple[str, str]]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None or _END.match(line):
            current = None
            if head := _HEAD.match(line):
                current = computations.setdefault(head["name"], [])
                entry = head["name"] if head["entry"] else entry
        elif one := _LINE.match(line):
            current.append((one["name"], one["rest"]))
    return computations, entry


def _visits(computations: dict[str, list[tuple[str, str]]], entry: str) -> Iterator[tuple[str, int, bool]]:
    """(computation, how often it runs a step, whether within a loop of unknown length)."""
    pending = [(entry, 1, False)] if entry in computations else []
    while pending:
        name, times, unknown = pending.pop()
        yield name, times, unknown
        for _, rest in computations[name]:
            called = _CALLED.findall(rest)
            for branches in _BRANCHES.findall(rest):
                called += [branch.strip().lstrip("%") for branch in branches.split(",")]
            if not called:
                continue
            turns, lost = 1, unknown
            if " while(" in rest:
                trips = _TRIPS.search(rest)
                turns, lost = (int(trips[1]), unknown) if trips else (1, True)
            pending += [(one, times * turns, lost) for one in called if one in computations]


def _here(lines: list[tuple[str, str]], devices: int | None) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """(kind, bytes, members) of the operations that stand in one computation itself."""
    started: dict[str, tuple[str, str, str]] = {}
    for name, rest in lines:
        call = _CALL.match(rest)
        if call is None:
            continue
        op, shape = call["op"], call["shape"]
        kind = op.removesuffix("-start").removesuffix("-done")
        if kind not in KINDS:
            continue
        if op.endswith("-start"):
            started[name] = kind, shape, rest
        elif op.endswith("-done"):
            begun = re.match(r"(?:.*?\s)?%?([\w.\-]+)\)?", call["operands"])
            key = next((word for word in re.findall(r"%?([\w.\-]+)", call["operands"]) if word in started), None)
            if begun and key is not None:
                kind, _, attributes = started.pop(key)
                yield _of(kind, shape, attributes, devices)
        else:
            yield _of(kind, shape, rest, devices)
    for kind, shape, attributes in started.values():  # finished in another computation
        parts = _parts(shape)
        yield _of(kind, parts[1] if len(parts) > 1 else shape, attributes, devices)


def _of(kind: str, shape: str, attributes: str, devices: int | None) -> tuple[str, int, tuple[int, ...]]:
    members = _members(attributes, devices)
    size = shape_bytes(shape)
    return kind, size * len(members) if kind == "reduce-scatter" else size, members


def _parts(shape: str) -> list[str]:
    """The elements of a tuple's shape; a lone shape as the only one."""
    if not shape.startswith("("):
        return [shape]
    parts, depth, start = [], 0, 1
    for at, letter in enumerate(shape):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or depth == 0:
            parts.append(shape[start:at].strip())
            start = at + 1
    return parts


def _members(attributes: str, devices: int | None) -> tuple[int, ...]:
    """The group of a collective that lies widest apart: places in the device order."""
    if pairs := re.search(r"source_target_pairs=\{(\{.*?\})\}", attributes):
        edges = [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs[1])]
        return _widest(_rings(edges))
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, ?device_ids=\((.*?)\))? ?\{([^}]*)\}", attributes):
        return _widest(_of_mesh(mesh[1], mesh[2], mesh[3]))
    if tiled := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        order = _iota(tiled[2], tiled[3])
        return _widest(order.reshape([int(n) for n in tiled[1].split(",")]).reshape(-1, int(tiled[1].split(",")[-1])))
    if listed := re.search(r"replica_groups=\{(\{.*?\})\}", attributes):
        return _widest([[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed[1])])
    return tuple(range(devices or 1))


def _iota(dims: str, order: str | None) -> np.ndarray:
    shape = [int(n) for n in dims.split(",")]
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return numbers.transpose([int(n) for n in order.split(",")]).reshape(-1) if order else numbers.reshape(-1)


def _of_mesh(axes: str, ids: str | None, named: str) -> np.ndarray:
    """Groups of a named mesh, as `['a'=2,'b'=4] {'b'}`; a part of an axis is written `'b':(2)2`."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", axes)}
    numbers = np.arange(math.prod(sizes.values()))
    if ids:
        tiled = re.match(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?", ids)
        numbers = _iota(tiled[2] or tiled[1], tiled[3]) if tiled else np.array([int(n) for n in ids.split(",")])
    # Every axis as three: what lies outside the named part, the part, what lies inside it.
    shape, chosen = [], []
    parts = {name: (int(before), int(size)) for name, before, size in re.findall(r"'([^']*)':\((\d+)\)(\d+)", named)}
    whole = set(re.findall(r"'([^']*)'", named)) - set(parts)
    for name, size in sizes.items():
        before, here = parts.get(name, (1, size if name in whole else 1))
        if name in parts or name in whole:
            chosen.append(len(shape) + 1)
        shape += [before, here, size // (before * here)]
    rest = [axis for axis in range(len(shape)) if axis not in chosen]
    group = math.prod(shape[axis] for axis in chosen)
    return numbers.reshape(shape).transpose([*rest, *chosen]).reshape(-1, group)


def _rings(edges: list[tuple[int, int]]) -> list[list[int]]:
    """The chains that source-target pairs form."""
    after = dict(edges)
    heads = [source for source in after if source not in after.values()]
    rings, seen = [], set[int]()
    for first in [*heads, *after]:
        ring, at = [], first
        while at is not None and at not in seen:
            seen.add(at)
            ring.append(at)
            at = after.get(at)
        if len(ring) > 1:
            rings.append(ring)
    return rings or [[edges[0][0]]] if edges else [[0]]


def _widest(groups: object) -> tuple[int, ...]:
    rows = [tuple(int(n) for n in group) for group in groups]  # pyright: ignore[reportGeneralTypeIssues]
    return max(rows, key=lambda group: max(group) - min(group))
