"""`meshtune shard`: how a run's arrays lie on a mesh, here or only described."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from meshtune.plan.shards import Shard, Sharding

COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red", "white", "bright_black")
MOST_BLOCKS = 16  # of a picture, along each side


def shard(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE [KEY=VALUE]", help="A YAML recipe, then what to change in it.", show_default=False
        ),
    ],
    target: Annotated[
        str | None, typer.Option("--target", help="A machine that is not here, as 8xMI300X or 2x8xA100-80.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show how every array lies on the mesh, and what each device holds. Needs no weights, only the model's config."""
    from meshtune.cli.train import split
    from meshtune.config.load import load_recipe
    from meshtune.plan.hardware import find_target

    described = find_target(target) if target else None
    recipe = load_recipe(*split(arguments))

    from meshtune.plan.shards import shardings_of

    found = shardings_of(recipe, described)
    if as_json:
        print(json.dumps(_plain(found), indent=2))
    else:
        _show(found)


def _show(found: Sharding) -> None:
    from rich.console import Console

    from meshtune.setup.memory import size_in_words

    console = Console(highlight=False)
    console.print(_devices(found))
    for choice in found.choices:
        console.print(f"{choice.name:<10}  {choice.value} [dim]({choice.reason})[/]")
    console.print(_tensors(found))
    for one in _examples(found.shards):
        lead = f"each of {one.shape[0]} layers, " if len(one.shape) == 3 else ""
        console.print(f"[bold]{one.path}[/]: {lead}{one.shape[-2]} x {one.shape[-1]}, by device")
        console.print(_picture(one, found))
    parts = [(role, found.nbytes(role)) for role in ("frozen", "trained", "gradient", "optimizer")]
    words = ", ".join(f"{role} {size_in_words(size)}" for role, size in parts if size)
    total = found.nbytes()
    console.print(f"[bold]each device[/] holds {size_in_words(total)}: {words}; activations are not counted")
    if found.capacity is not None:
        share = 100 * total / found.capacity
        verdict = "" if total < found.capacity else " [bold red]which it has not got[/]"
        console.print(f"that is {share:.0f}% of the {size_in_words(found.capacity)} of its memory{verdict}")


def _devices(found: Sharding) -> Table:
    from rich.table import Table

    from meshtune.setup.memory import size_in_words

    table = Table(title="devices", title_justify="left")
    for heading in ("target", "mesh", "devices", "memory each"):
        table.add_column(heading)
    memory = size_in_words(found.capacity) if found.capacity else "as shown by meshtune env"
    table.add_row(found.target, str(found.mesh), str(found.mesh.devices), memory)
    return table


def _tensors(found: Sharding) -> Table:
    from rich.table import Table

    from meshtune.setup.memory import size_in_words

    table = Table(title="arrays", title_justify="left")
    for heading in ("array", "shape", "dtype", "axes", "split over", "each device"):
        table.add_column(heading, justify="right" if heading == "each device" else "left", overflow="fold")
    roles = ("frozen", "trained")
    for one in (shard for shard in found.shards if shard.role in roles):
        path = f"[bold]{one.path}[/]" if one.role == "trained" else one.path
        shape, axes = " x ".join(map(str, one.shape)), " ".join(one.axes)
        table.add_row(path, shape, one.dtype, axes, _words(one), size_in_words(one.nbytes))
    for role, words in (("gradient", "gradients of the trained"), ("optimizer", "optimizer state")):
        these = [shard for shard in found.shards if shard.role == role]
        if these:
            size = size_in_words(sum(shard.nbytes for shard in these))
            dtype = max(these, key=lambda shard: shard.nbytes).dtype
            table.add_row(f"[dim]{words}, {len(these)} arrays[/]", "", dtype, "", "as the trained", size)
    return table


def _words(one: Shard) -> str:
    parts = ["-" if part is None else part if isinstance(part, str) else "x".join(part) for part in one.spec]
    parts += ["-"] * (len(one.shape) - len(parts))
    return "whole on each" if set(parts) == {"-"} else " ".join(parts)


def _examples(shards: list[Shard]) -> list[Shard]:
    """The largest matrix for each way of splitting."""
    largest: dict[str, Shard] = {}
    for one in shards:
        if one.role in ("frozen", "trained") and len(one.shape) >= 2 and one.local != one.shape:
            key = str(one.spec)
            if key not in largest or one.nbytes > largest[key].nbytes:
                largest[key] = one
    return list(largest.values())


def _picture(one: Shard, found: Sharding) -> Table:
    """A matrix as blocks, each with the numbers of the devices that hold it."""
    import numpy as np
    from rich.table import Table
    from rich.text import Text

    from meshtune.mesh.axes import AXES

    sizes = found.mesh.sizes
    numbers = np.arange(found.mesh.devices).reshape(tuple(sizes.values()))
    spec = [*one.spec, *[None] * (len(one.shape) - len(one.spec))]
    rows, columns = (() if part is None else (part,) if isinstance(part, str) else part for part in spec[-2:])
    rest = [axis for axis in AXES if axis not in (*rows, *columns)]
    order = [AXES.index(axis) for axis in (*rows, *columns, *rest)]
    height, width = (int(np.prod([sizes[axis] for axis in part])) for part in (rows, columns))
    blocks = numbers.transpose(order).reshape(height, width, -1)
    table = Table(show_header=False, show_lines=True)
    shown_rows, shown_columns = min(height, MOST_BLOCKS), min(width, MOST_BLOCKS)
    for r in range(shown_rows):
        cells = []
        for c in range(shown_columns):
            holders = blocks[r, c].tolist()
            words = ", ".join(map(str, holders[:4])) + (f" +{len(holders) - 4}" if len(holders) > 4 else "")
            cells.append(Text(words, style=COLORS[(r * width + c) % len(COLORS)]))
        table.add_row(*cells, *(["..."] if width > shown_columns else []))
    if height > shown_rows:
        table.add_row("...")
    return table


def _plain(found: Sharding) -> dict[str, object]:
    return {
        "target": found.target,
        "mesh": found.mesh.sizes,
        "device_bytes": found.nbytes(),
        "device_capacity": found.capacity,
        "breakdown": {role: found.nbytes(role) for role in ("frozen", "trained", "gradient", "optimizer")},
        "notes": [f"{choice.name}: {choice.value} ({choice.reason})" for choice in found.choices],
        "arrays": [
            {
                "role": one.role,
                "path": one.path,
                "shape": one.shape,
                "dtype": one.dtype,
                "spec": [None if part is None else part if isinstance(part, str) else list(part) for part in one.spec],
                "device_bytes": one.nbytes,
            }
            for one in found.shards
        ],
    }
