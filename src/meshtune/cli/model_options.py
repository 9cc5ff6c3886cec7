"""Options that `generate`, `chat` and `serve` share: which model, how it is loaded, and when an answer ends."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshtune.errors import UserError
from meshtune.options import option

if TYPE_CHECKING:
    from meshtune.generate.api import Model
    from meshtune.mesh.config import MeshConfig

ModelPath = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A model directory, a GGUF file, a hub id, an adapter, or a run (RUN@best, RUN@STEP: a state of it).",
        show_default=False,
    ),
]


MeshSizes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[mesh.AXIS=SIZE]",
        help="Devices along the axes of a mesh, such as mesh.tp=2 mesh.fsdp=4; -1: all that are left; mesh=run: as the "
        "run was tuned. Default: one device.",
        show_default=False,
    ),
]


@dataclasses.dataclass(frozen=True)
class BaseLoading:
    """How a base is loaded."""

    revision: str | None = option(None, "Branch, tag or commit on the hub.")
    chat_template: str | None = option(None, "A Jinja file, or a template that ships with Meshtune.")
    tokenizer: str | None = option(
        None, "A directory or hub id of its tokenizer, for a model that has none or a GGUF file whose own is not read."
    )
    dtype: str | None = option(None, "float32, bfloat16 or float16; default: by device.")
    quantize: str = option("auto", "Of the base: nf4, int8, fp8, int4 or none; auto: as the adapter was trained.")


@dataclasses.dataclass(frozen=True)
class Loading(BaseLoading):
    """How a model is loaded."""

    adapter: str | None = option(None, "A PEFT adapter, or a run, to put on MODEL.")


@dataclasses.dataclass(frozen=True)
class Caching:
    """How the keys and values of earlier tokens are held while text is generated."""

    cache: str | None = option(None, "int8: keys and values of earlier tokens in 8 bits; default: in the dtype.")


@dataclasses.dataclass(frozen=True)
class Limits:
    """When an answer ends, apart from the model's own end tokens."""

    max_tokens: int | None = option(
        None, "New tokens at most; default 256.", ge=1, flags=("--max-tokens", "--max-new-tokens", "-n")
    )
    stop: tuple[str, ...] = option((), "Text that ends the answer; may be repeated.")


def parse_mesh(arguments: list[str] | None, run: str) -> MeshConfig | None:
    """The mesh that arguments such as mesh.tp=2 give, or that of `run` for mesh=run; None without any. Raises UserError
    for anything else."""
    if arguments == ["mesh=run"]:
        from meshtune.runs.sources import run_mesh

        return run_mesh(run)
    sizes: dict[str, int] = {}
    for argument in arguments or []:
        name, equals, value = argument.partition("=")
        if not (equals and name.startswith("mesh.")):
            raise UserError(
                f"'{argument}' is not mesh.AXIS=SIZE, which is all that may follow the model",
                fix="write mesh.tp=2, or mesh=run alone for the mesh of a run; see --help for the options",
            )
        axis = name.removeprefix("mesh.")
        if axis in sizes:
            raise UserError(f"{name} is given twice", where=argument, fix="give each axis once")
        try:
            sizes[axis] = int(value)
        except ValueError:
            raise UserError(
                f"'{value}' is no number of devices", where=argument, fix=f"write {name}=2, or -1 for all that are left"
            ) from None
    if not sizes:
        return None
    from meshtune.generate.api import mesh_of

    return mesh_of(sizes)


def check_source(path: str, *adapters: str | None) -> None:
    """Raises UserError for a model or run, or adapters, that are neither here nor perhaps on a hub: before JAX is
    imported, which takes seconds."""
    from meshtune.weights.hub import check_adapter, check_path

    check_path(path.partition("@")[0])
    for adapter in filter(None, adapters):
        check_adapter(adapter.partition("@")[0])


def use_model(
    use: Callable[[Model], None],
    path: str,
    loading: Loading,
    caching: Caching | None = None,
    mesh: list[str] | None = None,
) -> None:
    """Calls `use` with the model at `path`; says what of its cache is in 8 bits.

    Where several processes were launched, all of them load their part of the model, and process 0 uses it. Raises
    UserError as meshtune.load and mesh.processes.start do.
    """
    check_source(path, loading.adapter)
    config = parse_mesh(mesh, loading.adapter or path)

    from meshtune.generate.api import load_variants
    from meshtune.generate.driver import run_on_all
    from meshtune.mesh.processes import start
    from meshtune.model.model_cache import describe_cache
    from meshtune.runs.sources import find
    from meshtune.setup.program_cache import keep_programs

    with start() as job:
        keep_programs(job.process_count)
        names = ("revision", "chat_template", "tokenizer")
        source = find(path, loading.adapter, **{name: getattr(loading, name) for name in names})
        options: dict[str, Any] = vars(caching or Caching()) | {"dtype": loading.dtype, "quantize": loading.quantize}
        model = load_variants({"": source}, mesh=config, job=job, **options)[""]
        if (cache := model.compute.cache) is not None and job.is_main_process:
            print(f"note: cache: {describe_cache(model.spec, cache, model.compute.dtype)}", file=sys.stderr)
        run_on_all(job, [model], lambda: use(model))
