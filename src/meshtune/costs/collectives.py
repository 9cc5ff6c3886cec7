"""Reads the collective operations of a compiled program from its HLO text: kind, bytes, device group and count."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator

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

# The attributes of a custom call may span several lines, some of which begin with a brace too.
_END = re.compile(r"^\}(, execution_thread=.*)?$")
_HEAD = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<call>.*)$")
_CALL = re.compile(r"^(?P<shape>\(.*?\)|\S+) (?P<op>[a-z][\w\-]*)\((?P<operands>.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,<=]*)\]")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"?(\d+)')
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation|async_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a program, with the number of times a step runs it.

    `bytes` is the size of the whole array that a group gathers, reduces or moves. `members` are indices into the
    program's device order, for the group whose members lie furthest apart. `count` is per step; where the operation is
    inside a loop whose trip count is known only at run time, `unknown_trip_count` is true and `count` is for one trip.
    """

    kind: str
    bytes: int
    members: tuple[int, ...]
    count: int
    unknown_trip_count: bool = False

    @property
    def group_size(self) -> int:
        return len(self.members)

    @property
    def bytes_sent(self) -> float:
        """Bytes that one device sends (and receives) in one run of the operation with ring algorithms."""
        n = max(1, self.group_size)
        match self.kind:
            case "all-reduce":
                return 2 * self.bytes * (n - 1) / n
            case "collective-permute" | "collective-broadcast":
                return float(self.bytes)
            case _:
                return self.bytes * (n - 1) / n

    def hosts(self, per_host: int) -> int:
        """The number of hosts, of `per_host` devices each, that the group spans."""
        return len({member // per_host for member in self.members})


def collectives_of(hlo_text: str, devices: int | None = None) -> list[Collective]:
    """Every collective operation of a compiled module's text, with identical operations merged.

    Operations in loops are counted once per trip where the compiler knows the number of trips (`known_trip_count`); a
    pair of start and done is one operation. `devices` is the size of a group that is written as empty ("all").
    """
    computations, entry = _computations(hlo_text)
    counts: dict[tuple[str, int, tuple[int, ...], bool], int] = {}
    for name, times, unknown in _visits(computations, entry):
        for kind, size, members in _operations(computations[name], devices):
            key = (kind, size, members, unknown)
            counts[key] = counts.get(key, 0) + times
    return [Collective(kind, size, members, count, unknown) for (kind, size, members, unknown), count in counts.items()]


def shape_bytes(shape: str) -> int:
    """Bytes of an HLO shape such as `bf16[8,128]{1,0}`, or of a tuple of shapes."""
    return sum(_array_bytes(kind, dims) for kind, dims in _ARRAY.findall(shape))


def _array_bytes(kind: str, dims: str) -> int:
    bits = BITS.get(kind) or (8 if kind.startswith("f8") else 4 if kind.startswith("f4") else 0)
    count = math.prod(int(n.removeprefix("<=")) for n in dims.split(",") if n)
    return -(-count * bits // 8)


def _computations(text: str) -> tuple[dict[str, list[tuple[str, str]]], str]:
    """The lines of each computation as (result name, right-hand side), and the name of the entry computation."""
    computations: dict[str, list[tuple[str, str]]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None or _END.match(line):
            current = None
            if head := _HEAD.match(line):
                current = computations.setdefault(head["name"], [])
                entry = head["name"] if head["entry"] else entry
        elif line_match := _LINE.match(line):
            current.append((line_match["name"], line_match["call"]))
    return computations, entry


def _visits(computations: dict[str, list[tuple[str, str]]], entry: str) -> Iterator[tuple[str, int, bool]]:
    """Each computation that a step runs: (name, runs per step, whether inside a loop of unknown trip count)."""
    pending = [(entry, 1, False)] if entry in computations else []
    while pending:
        name, times, unknown = pending.pop()
        yield name, times, unknown
        for _, call in computations[name]:
            callees = _CALLED.findall(call)
            for branches in _BRANCHES.findall(call):
                callees += [branch.strip().lstrip("%") for branch in branches.split(",")]
            if not callees:
                continue
            trip_count, callee_unknown = 1, unknown
            if " while(" in call:
                trips = _TRIPS.search(call)
                trip_count, callee_unknown = (int(trips[1]), unknown) if trips else (1, True)
            pending += [(callee, times * trip_count, callee_unknown) for callee in callees if callee in computations]


def _operations(lines: list[tuple[str, str]], devices: int | None) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """(kind, bytes, members) of the collectives in one computation, without those of the computations it calls."""
    started: dict[str, tuple[str, str, str]] = {}
    for name, definition in lines:
        call = _CALL.match(definition)
        if call is None:
            continue
        op, shape = call["op"], call["shape"]
        kind = op.removesuffix("-start").removesuffix("-done")
        if kind not in KINDS:
            continue
        if op.endswith("-start"):
            started[name] = kind, shape, definition
        elif op.endswith("-done"):
            operands = re.findall(r"%?([\w.\-]+)", call["operands"])
            start = next((operand for operand in operands if operand in started), None)
            if start is not None:
                kind, _, attributes = started.pop(start)
                yield _sizes(kind, shape, attributes, devices)
        else:
            yield _sizes(kind, shape, definition, devices)
    for kind, shape, attributes in started.values():  # the matching done is in another computation
        elements = _tuple_elements(shape)
        yield _sizes(kind, elements[1] if len(elements) > 1 else shape, attributes, devices)


def _sizes(kind: str, shape: str, attributes: str, devices: int | None) -> tuple[str, int, tuple[int, ...]]:
    members = _members(attributes, devices)
    size = shape_bytes(shape)
    return kind, size * len(members) if kind == "reduce-scatter" else size, members


def _tuple_elements(shape: str) -> list[str]:
    """The elements of a tuple shape; an array shape is its own only element."""
    if not shape.startswith("("):
        return [shape]
    elements, depth, start = [], 0, 1
    for position, letter in enumerate(shape):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or depth == 0:
            elements.append(shape[start:position].strip())
            start = position + 1
    return elements


def _members(attributes: str, devices: int | None) -> tuple[int, ...]:
    """The members of the group that spans the widest range of device indices."""
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
    """Groups [group, member] of a named mesh such as `['a'=2,'b'=4] {'b'}`; `'b':(2)2` is a sub-axis.

    In `'b':(before)size`, `before` is the product of the sub-axes of `'b'` that precede this one.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", axes)}
    numbers = np.arange(math.prod(sizes.values()))
    if ids:
        tiled = re.match(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?", ids)
        numbers = _iota(tiled[2] or tiled[1], tiled[3]) if tiled else np.array([int(n) for n in ids.split(",")])
    # Every axis is viewed as three: the part outside the named sub-axis, the sub-axis, the part inside it.
    shape, chosen = [], []
    sub_axes = {name: (int(before), int(size)) for name, before, size in re.findall(r"'([^']*)':\((\d+)\)(\d+)", named)}
    full_axes = set(re.findall(r"'([^']*)'", named)) - set(sub_axes)
    for name, size in sizes.items():
        before, extent = sub_axes.get(name, (1, size if name in full_axes else 1))
        if name in sub_axes or name in full_axes:
            chosen.append(len(shape) + 1)
        shape += [before, extent, size // (before * extent)]
    batch = [axis for axis in range(len(shape)) if axis not in chosen]
    group_size = math.prod(shape[axis] for axis in chosen)
    return numbers.reshape(shape).transpose([*batch, *chosen]).reshape(-1, group_size)


def _rings(edges: list[tuple[int, int]]) -> list[list[int]]:
    """The chains and cycles that source-target pairs form."""
    successor = dict(edges)
    heads = [source for source in successor if source not in successor.values()]
    rings, visited = [], set[int]()
    for head in [*heads, *successor]:
        ring, device = [], head
        while device is not None and device not in visited:
            visited.add(device)
            ring.append(device)
            device = successor.get(device)
        if len(ring) > 1:
            rings.append(ring)
    return rings or [[edges[0][0]]] if edges else [[0]]


def _widest(groups: Iterable[Iterable[int]] | np.ndarray) -> tuple[int, ...]:
    """The group that spans the widest range of device indices."""
    return max((tuple(int(device) for device in group) for group in groups), key=lambda group: max(group) - min(group))
