"""`meshtune shard`: how a run's arrays are split over a mesh, of this machine or a described one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from meshtune.cli.train import Arguments, split

if TYPE_CHECKING:
    from rich.table import Table

    from meshtune.plan.shards import Shard, Sharding

COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red", "white", "bright_black")
MAX_BLOCKS = 16  # of a picture, along each side
ROLES = ("frozen", "trained", "gradient", "optimizer")


def shard(
    arguments: Arguments,
    target: Annotated[str | None, typer.Option("--target", help="Another machine, as 8xMI300X or 2x8xA100-80.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show how every array is split over the mesh, and what each device holds. Reads only the model's config."""
    from meshtune.config.load import load_recipe
    from meshtune.costs.hardware import find_target

    described = find_target(target) if target else None
    recipe = load_recipe(*split(arguments))

    from meshtune.plan.shards import shardings_of

    sharding = shardings_of(recipe, described)
    if as_json:
        print(json.dumps(_as_json(sharding), indent=2))
    else:
        _show(sharding)


def _show(sharding: Sharding) -> None:
    from rich.markup import escape

    from meshtune.setup.memory import size_in_words
    from meshtune.terminal import console as open_console

    console = open_console()
    console.print(_devices(sharding))
    for choice in sharding.decisions:
        name = f"[{choice.style}]{choice.name:<10}[/]"
        console.print(f"{name}  {escape(choice.value)} [dim]({escape(choice.reason)})[/]")
    console.print(_tensors(sharding))
    for shard in _examples(sharding.shards):
        lead = "".join(f"each of {n} {axis}, " for n, axis in zip(shard.shape[:-2], shard.axes, strict=False))
        console.print(f"[bold]{shard.path}[/]: {lead}{shard.shape[-2]} x {shard.shape[-1]}, by device")
        console.print(_picture(shard, sharding))
    sizes = [(role, sharding.nbytes(role)) for role in ROLES]
    breakdown = ", ".join(f"{role} {size_in_words(size)}" for role, size in sizes if size)
    total = sharding.nbytes()
    console.print(f"[bold]each device[/] holds {size_in_words(total)}: {breakdown}; activations are not counted")
    if sharding.capacity is not None:
        share = 100 * total / sharding.capacity
        verdict = "" if total < sharding.capacity else " [bold red]which does not fit[/]"
        console.print(f"that is {share:.0f}% of the {size_in_words(sharding.capacity)} of its memory{verdict}")


def _devices(sharding: Sharding) -> Table:
    from rich.table import Table

    from meshtune.setup.memory import size_in_words

    table = Table(title="devices", title_justify="left")
    for heading in ("target", "mesh", "devices", "memory each"):
        table.add_column(heading, overflow="fold")
    memory = size_in_words(sharding.capacity) if sharding.capacity else "as shown by meshtune env"
    table.add_row(sharding.target, str(sharding.mesh), str(sharding.mesh.devices), memory)
    return table


def _tensors(sharding: Sharding) -> Table:
    from rich.table import Table

    from meshtune.setup.memory import size_in_words

    table = Table(title="arrays", title_justify="left")
    for heading in ("array", "shape", "dtype", "axes", "split over", "each device"):
        table.add_column(heading, justify="right" if heading == "each device" else "left", overflow="fold")
    for shard in (shard for shard in sharding.shards if shard.role in ("frozen", "trained")):
        path = f"[bold]{shard.path}[/]" if shard.role == "trained" else shard.path
        shape, axes = " x ".join(map(str, shard.shape)), " ".join(shard.axes)
        table.add_row(path, shape, shard.dtype, axes, _split_text(shard), size_in_words(shard.nbytes))
    for role, title in (("gradient", "gradients of the trained"), ("optimizer", "optimizer state")):
        shards = [shard for shard in sharding.shards if shard.role == role]
        if shards:
            size = size_in_words(sum(shard.nbytes for shard in shards))
            dtype = max(shards, key=lambda shard: shard.nbytes).dtype
            table.add_row(f"[dim]{title}, {len(shards)} arrays[/]", "", dtype, "", "as the trained", size)
    return table


def _split_text(shard: Shard) -> str:
    parts = ["-" if part is None else part if isinstance(part, str) else "x".join(part) for part in shard.spec]
    parts += ["-"] * (len(shard.shape) - len(parts))
    return "whole on each" if set(parts) == {"-"} else " ".join(parts)


def _examples(shards: list[Shard]) -> list[Shard]:
    """The largest matrix for each way of splitting."""
    largest: dict[str, Shard] = {}
    for shard in shards:
        if shard.role in ("frozen", "trained") and len(shard.shape) >= 2 and shard.local != shard.shape:
            key = str(shard.spec)
            if key not in largest or shard.nbytes > largest[key].nbytes:
                largest[key] = shard
    return list(largest.values())


def _picture(shard: Shard, sharding: Sharding) -> Table:
    """A matrix as blocks, each with the numbers of the devices that hold it."""
    import numpy as np
    from rich.table import Table
    from rich.text import Text

    from meshtune.mesh.config import AXES

    sizes = sharding.mesh.sizes
    numbers = np.arange(sharding.mesh.devices).reshape(tuple(sizes.values()))
    spec = [*shard.spec, *[None] * (len(shard.shape) - len(shard.spec))]
    rows, columns = (() if part is None else (part,) if isinstance(part, str) else part for part in spec[-2:])
    replicas = [axis for axis in AXES if axis not in (*rows, *columns)]
    order = [AXES.index(axis) for axis in (*rows, *columns, *replicas)]
    height, width = (int(np.prod([sizes[axis] for axis in part])) for part in (rows, columns))
    blocks = numbers.transpose(order).reshape(height, width, -1)
    table = Table(show_header=False, show_lines=True)
    shown_rows, shown_columns = min(height, MAX_BLOCKS), min(width, MAX_BLOCKS)
    for r in range(shown_rows):
        cells = []
        for c in range(shown_columns):
            holders = blocks[r, c].tolist()
            text = ", ".join(map(str, holders[:4])) + (f" +{len(holders) - 4}" if len(holders) > 4 else "")
            cells.append(Text(text, style=COLORS[(r * width + c) % len(COLORS)]))
        table.add_row(*cells, *(["..."] if width > shown_columns else []))
    if height > shown_rows:
        table.add_row("...")
    return table


def _as_json(sharding: Sharding) -> dict[str, object]:
    return {
        "target": sharding.target,
        "mesh": sharding.mesh.sizes,
        "device_bytes": sharding.nbytes(),
        "device_capacity": sharding.capacity,
        "breakdown": {role: sharding.nbytes(role) for role in ROLES},
        "notes": [choice.text for choice in sharding.decisions],
        "arrays": [
            {
                "role": shard.role,
                "path": shard.path,
                "shape": shard.shape,
                "dtype": shard.dtype,
                "spec": [
                    None if part is None else part if isinstance(part, str) else list(part) for part in shard.spec
                ],
                "device_bytes": shard.nbytes,
            }
            for shard in sharding.shards
        ],
    }
