"""Files of `meshtune quickstart`: a real model of 1 MB, a small data set with a visible lesson, and a recipe."""

from __future__ import annotations

import os
import pathlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshtune.config.recipe import Recipe

DIRECTORY = pathlib.Path(__file__).parent
MODEL = DIRECTORY / "model"
LESSON = DIRECTORY / "lesson.jsonl"


def recipe(output: str | os.PathLike[str], *overrides: str) -> Recipe:
    """The quickstart's recipe with its model, data and output filled in, then `key.sub=value` overrides."""
    from meshtune.config import yaml_text
    from meshtune.config.load import load_recipe

    file = DIRECTORY / "recipe.yaml"
    raw = yaml_text.read(file.read_text(encoding="utf-8"), str(file)).value
    assert isinstance(raw, dict)
    raw |= {"model": str(MODEL), "output": str(output)}
    raw["data"]["train"] = [{"path": str(LESSON), "format": "prompt_completion"}]
    return load_recipe(raw, overrides)
