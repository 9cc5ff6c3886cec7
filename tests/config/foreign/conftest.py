"""Files of other tools, translated."""

from __future__ import annotations

import pathlib

import pytest
import yaml

from meshtune.config.foreign.importer import Translation, translate
from meshtune.config.load import load_recipe, silent


@pytest.fixture
def translate_file(tmp_path: pathlib.Path):
    def run(content: dict | str, **options) -> Translation:
        file = tmp_path / "theirs.yaml"
        file.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
        return translate(str(file), **options)

    return run


@pytest.fixture
def recipe_of(translate_file, tmp_path: pathlib.Path):
    """Translates a file and reads the written recipe back."""

    def run(content: dict | str, **options):
        translation = translate_file(content, **options)
        assert not translation.refused, translation.refused
        for path, text in translation.written_files(tmp_path / "ours.yaml").items():
            path.write_text(text, encoding="utf-8")
        return load_recipe(str(tmp_path / "ours.yaml"), notify=silent)

    return run
