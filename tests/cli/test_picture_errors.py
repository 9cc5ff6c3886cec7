"""Models and pictures that do not fit together, as a user of the command line meets them, for three families."""

from __future__ import annotations

import json
import pathlib
import re
import shutil

import pytest

import command
import meshtune.quickstart
from data.pictures import file_of, picture
from data.test_pictures import chat
from families.vision.cases import GEMMA3, INTERNVL, QWEN2_VL
from families.vision.checkpoints import write_checkpoint
from families.vision.sights import VisionCase

CASES = (INTERNVL, QWEN2_VL, GEMMA3)
TEXT_MODEL = pathlib.Path(meshtune.quickstart.__file__).parent / "model"


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def seeing(request, tmp_path_factory) -> tuple[VisionCase, pathlib.Path]:
    """A family, and a folder with its model, a picture, one that is damaged in its middle, and a record."""
    folder = tmp_path_factory.mktemp("seeing")
    write_checkpoint(request.param, folder / "model")
    (folder / "a.png").write_bytes(file_of(picture(56, 56)))
    damaged = bytearray(file_of(picture(300, 300)))
    damaged[len(damaged) // 2 : len(damaged) // 2 + 40] = bytes(40)
    (folder / "damaged.png").write_bytes(damaged)
    (folder / "data.jsonl").write_text(json.dumps(chat("a.png")))
    return request.param, folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))


def check_refused(done, *parts: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert re.search(r"^where: ", done.stderr, re.MULTILINE), done.stderr
    assert re.search(r"^  fix: ", done.stderr, re.MULTILINE), done.stderr
    for part in parts:
        assert part in done.stderr, done.stderr


def recipe_of(folder: pathlib.Path, out: pathlib.Path, model: pathlib.Path) -> pathlib.Path:
    fields = {"model": str(model), "data": {"train": str(folder / "data.jsonl"), "max_length": 256}, "vision": {}}
    fields |= {"train": {"steps": 1, "batch_size": 1}, "output": str(out / "run")}
    (out / "recipe.yaml").write_text(json.dumps(fields))
    return out / "recipe.yaml"


# Of a processor: what it makes is not what the tower of these tiny models takes, or it makes nothing.
SETTINGS = {
    "other patches": {"size": {"height": 56, "width": 56}},
    "a mean of four channels": {"image_mean": [0.5] * 4},
    "a size in words": {"size": "large"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_processor_that_does_not_fit_the_tower_is_named_before_the_first_step(seeing, tmp_path, name):
    case, folder = seeing
    model = pathlib.Path(shutil.copytree(folder / "model", tmp_path / "model"))
    file = model / "preprocessor_config.json"
    changes = {"patch_size": 5} if (case, name) == (QWEN2_VL, "other patches") else SETTINGS[name]
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    for done in (
        command.run("train", recipe_of(folder, tmp_path, model)),
        command.run("generate", model, "--image", folder / "a.png", "--prompt", "what?", "--max-tokens", 1),
    ):
        check_refused(done, "preprocessor_config.json", str(model))


def test_a_damaged_picture_of_a_question_is_named(seeing):
    _, folder = seeing
    done = command.run("generate", folder / "model", "--image", folder / "damaged.png", "--prompt", "what?")
    check_refused(done, str(folder / "damaged.png"))


def test_a_picture_for_a_text_model_is_refused_with_a_way_out(seeing, tmp_path):
    _, folder = seeing
    check_refused(command.run("generate", TEXT_MODEL, "--image", folder / "a.png", "--prompt", "a"), "text only")
    check_refused(command.run("train", recipe_of(folder, tmp_path, TEXT_MODEL)), "vision")
