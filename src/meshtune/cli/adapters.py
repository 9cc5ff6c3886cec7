"""`meshtune adapters`: combine adapters without training."""

from __future__ import annotations

from typing import Annotated

import typer

from meshtune.errors import UserError

app = typer.Typer(help="Combine adapters.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    """Keeps `combine` a subcommand while it is the only one."""


@app.command()
def combine(
    adapters: Annotated[
        list[str], typer.Argument(metavar="ADAPTER...", help="Adapter directories of one base.", show_default=False)
    ],
    to: Annotated[str, typer.Option("--to", help="The directory to write.", show_default=False)],
    weights: Annotated[
        str | None, typer.Option("--weights", help="One per adapter, such as 0.7,0.3; default: equal, with sum 1.")
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            help="svd, cat, linear, ties, magnitude_prune, dare_linear, dare_ties; the last four also with _svd.",
        ),
    ] = "svd",
    rank: Annotated[int | None, typer.Option("--rank", help="svd: rank of the result; default: the largest.")] = None,
    density: Annotated[
        float | None, typer.Option("--density", help="ties, dare, magnitude_prune: the share of entries to keep.")
    ] = None,
    majority_sign: Annotated[
        str,
        typer.Option("--majority-sign", help="ties: elect signs by the total of the entries, or by their frequency."),
    ] = "total",
    seed: Annotated[int, typer.Option("--seed", help="dare: seed of the random choice of entries.")] = 0,
    any_base: Annotated[bool, typer.Option("--any-base", help="Combine adapters of different bases.")] = False,
) -> None:
    """Write one LoRA adapter that is the weighted combination of several."""
    from meshtune.runs.combine import combine_checked as write

    if majority_sign not in ("total", "frequency"):
        raise UserError(f"--majority-sign is '{majority_sign}'", where="--majority-sign", fix="give total or frequency")
    shares = [1 / len(adapters)] * len(adapters) if weights is None else numbers(weights)
    options = {"rank": rank, "density": density, "seed": seed, "any_base": any_base}
    combined = write(adapters, to, shares, method, majority=majority_sign, **options)
    print(f"a LoRA adapter of rank {combined.rank} on {combined.modules} weights written to {combined.path}")


def numbers(text: str) -> list[float]:
    """0.7,0.3 as numbers. Raises UserError for anything else."""
    try:
        return [float(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise UserError(f"'{text}' is not a list of numbers", where="--weights", fix="write it as 0.7,0.3") from None
