"""`meshtune rewards`, `rollouts` and `serve-rollouts`: completions and their rewards, before training and of a run, and
replicas that generate them."""

from __future__ import annotations

import math
import pathlib
from typing import Annotated

import typer

from meshtune.cli.expand import expand_options
from meshtune.cli.replicas import Sharing, run_replicas_of
from meshtune.cli.train import Arguments, split
from meshtune.options import parse_shard


def rewards(
    arguments: Arguments,
    groups: Annotated[int, typer.Option("--groups", "-n", min=1, help="Prompts to generate completions for.")] = 4,
) -> None:
    """Generate and score a few groups of completions, and train nothing: what the rewards of a recipe tell apart."""
    from meshtune.config.load import load_recipe, silent, to_stderr
    from meshtune.setup.early import check_run

    recipe_file, overrides = split(arguments)
    overrides = [*overrides, "resume=false", "overwrite=true"]  # nothing is written to the output
    check_run(load_recipe(recipe_file, overrides, notify=silent))
    recipe = load_recipe(recipe_file, overrides, notify=to_stderr)

    from meshtune.train.online import preview_rewards

    preview_rewards(recipe, groups=groups)


@expand_options()
def serve_rollouts(context: typer.Context, arguments: Arguments, *, sharing: Sharing) -> None:
    """Generate completions for the run of a recipe with rollout.replicas=true, until it ends."""
    from meshtune.config.load import load_recipe, to_stderr
    from meshtune.mesh.config import MeshConfig
    from meshtune.setup.early import check_run

    recipe = load_recipe(*split(arguments), notify=to_stderr)
    output = pathlib.Path(recipe.output).expanduser()
    if sharing.replicas > 1:
        sizes = recipe.mesh.sizes.values() if isinstance(recipe.mesh, MeshConfig) else ()
        devices = math.prod(size for size in sizes if size > 0)

        def newest() -> int:
            return max((int(file.stem) for file in output.glob("rollouts/*.npz")), default=-1)

        run_replicas_of(context, sharing, output.absolute(), devices=devices, parts=newest)
        return
    check_run(recipe.model_copy(update={"resume": False, "overwrite": True}))

    from meshtune.train.online import serve_rollouts as serve

    serve(recipe, parse_shard(sharing.shard))


def rollouts(
    run: Annotated[pathlib.Path, typer.Argument(help="The directory of a run.")],
    step: Annotated[int | None, typer.Option("--step", help="Those of this update; default: the newest.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Completions to show at most.")] = 16,
) -> None:
    """Show the completions that a run was trained on, best first in each group, with their rewards."""
    from meshtune.errors import UserError
    from meshtune.runs.output import ROLLOUTS
    from meshtune.runs.rollouts import print_rollouts, read_rollouts

    rows = read_rollouts(run)
    if not rows:
        fix = "give the directory of a run of an online stage, such as grpo, that has made an update"
        raise UserError(f"there is no {ROLLOUTS} with completions", where=str(run), fix=fix)
    steps = sorted({row["step"] for row in rows})
    if step is not None and step not in steps:
        fix = f"give one of {', '.join(map(str, steps[-12:]))}"
        raise UserError(f"no rollout begins at update {step}", where="--step", fix=fix)
    print_rollouts([row for row in rows if row["step"] == (steps[-1] if step is None else step)], limit)
