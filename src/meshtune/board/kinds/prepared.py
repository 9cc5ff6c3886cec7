"""A command that was checked and can be started."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Prepared:
    """`arguments` are those of `meshtune`; in them `{job}` stands for the job's folder, where `recipe` is written to
    recipe.yaml. `output` is the absolute path of the folder that the command writes, if it has one. `secrets` are
    variables of the command's environment that no file holds."""

    name: str
    arguments: tuple[str, ...]
    output: str | None = None
    recipe: str | None = None
    secrets: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
