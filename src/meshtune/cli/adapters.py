"""`meshtune adapters`: what is done with adapters as they are."""

from __future__ import annotations

from typing import Annotated

import typer

from meshtune.errors import UserError

app = typer.Typer(help="Combine adapters.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """A group of verbs, of however few."""


@app.command()
def combine(
    adapters: Annotated[
        list[str], typer.Argument(metavar="ADAPTER...", help="Adapter directories of one base.", show_default=False)
    ],
    to: Annotated[str, typer.Option("--to", help="The directory to write.", show_default=False)],
    weights: Annotated[
        str | None, typer.Option("--weights", help="One for each, such as 0.7,0.3; default: equal, adding up to 1.")
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            help="svd, cat, linear, ties, magnitude_prune, dare_linear, dare_ties; the last four also with _svd.",
        ),
    ] = "svd",
    rank: Annotated[int | None, typer.Option("--rank", help="svd: of the result; default: the largest.")] = None,
    density: Annotated[
        float | None, typer.Option("--density", help="ties, dare, magnitude_prune: the share of numbers to keep.")
    ] = None,
    majority_sign: Annotated[
        str, typer.Option("--majority-sign", help="ties: by the total of the numbers, or by their frequency.")
    ] = "total",
    seed: Annotated[int, typer.Option("--seed", help="dare: of the choice of what is kept.")] = 0,
    any_base: Annotated[
        bool, typer.Option("--any-base", help="Although they were trained on different bases.")
    ] = False,
) -> None:
    """Write one LoRA adapter that is the weighted combination of several."""
    from rich.console import Console

    from meshtune.adapters.combine import combine as write

    if majority_sign not in ("total", "frequency"):
        raise UserError(f"no majority by '{majority_sign}'", where="--majority-sign", fix="total or frequency")
    shares = [1 / len(adapters)] * len(adapters) if weights is None else numbers(weights)
    options = {"rank": rank, "density": density, "seed": seed, "any_base": any_base}
    done = write(adapters, to, shares, method, majority=majority_sign, **options)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"a LoRA adapter of rank {done.rank} on {done.modules} weights written to {done.path}", markup=False)


def numbers(words: str) -> list[float]:
    """0.7,0.3 as numbers. Raises UserError for anything else."""
    try:
        return [float(word) for word in words.replace(",", " ").split()]
    except ValueError:
        raise UserError(f"'{words}' is not a list of numbers", where="--weights", fix="write it as 0.7,0.3") from None
