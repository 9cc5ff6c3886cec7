"""kill -9 amid an export, a preparation of data and a push: old files stay, and the same command continues."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from hub.fake_hub import TOKEN, running_hub
from meshtune.quickstart import MODEL, recipe
from meshtune.train.run import train

pytestmark = pytest.mark.slow
DEATHS = 4
SMALL = ("train.steps=2", "sample.prompts=[]", "data.max_length=128", "data.validation=null", "eval.every=null")


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory) -> pathlib.Path:
    run = tmp_path_factory.mktemp("runs") / "lesson"
    train(recipe(str(run), *SMALL))
    return run


def deaths(folder: pathlib.Path, *arguments: str, count: int = DEATHS, **env: str) -> list[dict]:
    """How each death and the same command after it ended; see die_at_files.py for the folders."""
    script = pathlib.Path(__file__).with_name("die_at_files.py")
    command = [sys.executable, str(script), str(folder), str(count), *arguments]
    subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"} | env, check=True, timeout=900)
    survivor = json.loads((folder / "whole.json").read_text())
    assert survivor["code"] == 0, survivor["text"]
    ended = [json.loads((folder / f"{number}.json").read_text()) for number in range(count)]
    assert all(end["first"] == -9 for end in ended), ended
    return ended


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


FORMS = {"merged": ("--merge", "--to", "out/m"), "gguf": ("--merge", "--gguf", "Q8_0", "--to", "out/m.gguf")}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("replaces", [False, True])
def test_an_export_that_is_killed(form, replaces, finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "start/run")
    arguments = ["export", "run", *FORMS[form], *["--overwrite"] * replaces]
    if replaces:
        out = tmp_path / "start/out"
        if form == "merged":
            shutil.copytree(MODEL, out / "m")
        else:
            out.mkdir()
            (out / "m.gguf").write_bytes(b"an older file")
    for number, ended in enumerate(deaths(tmp_path, *arguments)):
        dead, done, survivor = (tmp_path / name for name in (f"{number}-dead", str(number), "whole"))
        assert contents(dead / "run") == contents(tmp_path / "start/run")
        if ended["second"]:
            assert "overwrite" in ended["text"]
            assert not replaces
        left = contents(done / "out")
        if not ended["second"]:
            assert left == contents(survivor / "out"), (ended, sorted(left))
        if replaces:
            older = contents(tmp_path / "start/out")
            new = contents(survivor / "out")
            old = contents(dead / "out")
            for name, content in older.items():
                aside = [value for key, value in old.items() if key.split("/", 1)[-1] == name.split("/", 1)[-1]]
                assert content in (*aside, old.get(name)) or new.get(name) in (old.get(name), None), (ended, name)
        leftover = [name for name in left if "partial" in name or ".old-" in name]
        assert not leftover or (ended["second"] and leftover == ["m/.digests.json.partial"]), ended


def test_a_preparation_that_is_killed(tmp_path):
    start = tmp_path / "start"
    start.mkdir()
    records = [json.dumps({"text": f"Once upon a time {number} there was a day."}) for number in range(5000)]
    (start / "d.jsonl").write_text("\n".join(records))
    (start / "recipe.yaml").write_text(
        f"model: {MODEL}\ndata: {{train: d.jsonl, max_length: 64}}\nstage: pt\noutput: out\n"
        "train: {steps: 1, batch_size: 2}\n"
    )
    for number, ended in enumerate(deaths(tmp_path, "prepare", "recipe.yaml")):
        assert ended["second"] == 0, ended["text"]
        assert contents(tmp_path / str(number))["tokens.json"] == contents(tmp_path / "whole")["tokens.json"]


def test_a_push_that_is_killed(finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "start/run")
    with running_hub() as hub:
        settings = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        ended = deaths(
            tmp_path, "push", "run", "ann/lesson-{folder}", "--base-model", "org/stories", count=4, **settings
        )
        assert [end["second"] for end in ended] == [0] * 4, ended
        pushed = {name: repository.files for name, repository in hub.repositories.items()}
    numbers = (finished_run / "adapter/adapter_model.safetensors").read_bytes()[-4096:]
    for number in range(4):
        assert pushed[f"ann/lesson-{number}"].keys() == pushed["ann/lesson-whole"].keys()
        assert pushed[f"ann/lesson-{number}"]["adapter_model.safetensors"][-4096:] == numbers
        assert contents(tmp_path / str(number) / "run") == contents(tmp_path / "start/run")
