"""A run that does not fit: the check after compiling, and smaller micro-batches for one that ran out of memory."""

from __future__ import annotations

from collections.abc import Iterator

from meshtune.errors import UserError
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.processes import Job
from meshtune.model.sharding import check_batch
from meshtune.setup.fit import MemoryCheck
from meshtune.setup.memory import free_memory
from meshtune.setup.shortage import MemoryShortage, size_in_words
from meshtune.train.run_setup import PreparedRun


class CompiledShortage(MemoryShortage):
    """A compiled step does not fit. All processes raise it; `rows` is the micro-batch that does, if any."""

    rows: int | None = None


def check_compiled(memory: MemoryCheck, arguments: int, temporary: int, job: Job) -> None:
    """Raises CompiledShortage, on all processes alike, for a step whose temporary arrays exceed the free memory of
    a device. Its arguments are there already, but for what a CPU's estimate counts of the host."""
    free = free_memory(job, memory.target.per_host).device
    figures = job.exchange("compiled memory", [arguments, temporary])
    arguments, temporary = max(figures, key=sum)
    if temporary <= free:
        return
    rows, fix = memory.micro_batch(arguments + temporary), memory.fix(arguments + temporary)
    rows, fix = job.exchange("compiled memory: fix", [rows, fix])[0]
    error = CompiledShortage(
        f"the compiled step needs {size_in_words(arguments + temporary)} of memory on each device, "
        f"{size_in_words(temporary)} of them beside what is loaded, and {size_in_words(free)} are free",
        where=memory.rows_in_words,
        fix=fix,
    )
    error.rows = rows
    raise error


def smaller_micro_batches(run: PreparedRun) -> Iterator[int]:
    """Micro-batches of at most half the rows that batch and mesh allow, largest first."""
    recipe, layout = run.recipe, run.layout
    if recipe.optimizer.in_backward:
        return
    for rows in range(run.rows // 2, 0, -1):
        if recipe.train.batch_size % rows:
            continue
        try:
            if layout is not None:
                check_batch(MeshConfig(**layout.mesh.shape), rows, run.data.train.row_length)
        except UserError:
            continue
        yield rows


def runtime_fix(run: PreparedRun, saved: int | None) -> str:
    """Suggests changes for a run that ran out of memory while it loaded or computed; `saved` is its last checkpoint."""
    recipe, compute, length = run.recipe, run.compute, run.data.train.row_length
    fixes = [f"train.micro_batch={rows} (the result stays the same)" for rows in smaller_micro_batches(run)][:1]
    if compute.remat != "full":
        fixes.append("compute.remat=full")
    if "residual" not in compute.offload and compute.platform != "cpu":
        fixes.append("compute.offload=[residual]")
    if recipe.method.adapters is not None and recipe.quantize is None:
        fixes.append("quantize=nf4")
    fixes.append(f"data.max_length below {length}")
    go_on = f"resume=true accept_changes=true goes on from update {saved}; " if saved is not None else ""
    return f"{go_on}from the mildest to the strongest: {', '.join(fixes)}"
