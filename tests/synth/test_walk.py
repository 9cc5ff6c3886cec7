"""From twelve pages to a tuned and measured model, with the real SmolLM2 as teacher."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from made_documents import write_documents

from meshtune.config.data_recipe import load_data_recipe
from meshtune.synth.run import generate_data

pytestmark = pytest.mark.slow
pytest.importorskip("markitdown", reason="the extra synth is not installed")
pytest.importorskip("jsonschema", reason="the extra synth is not installed")
MESHTUNE = [sys.executable, "-m", "meshtune"]


def write_recipe(folder: pathlib.Path, smollm2: pathlib.Path, name: str, **keys: object) -> pathlib.Path:
    """A recipe of SmolLM2 over the twelve pages; short texts, for a small model does not end by itself."""
    teacher = {"path": str(smollm2), "max_tokens": 96, "at_once": 8}
    recipe = {"documents": str(folder / "docs"), "passage_words": 60, "kinds": ["qa"], "attempts": 2, "held_out": 0.2}
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps({**recipe, "output": str(folder / name), **keys, "teacher": teacher}))
    return file


def meshtune(*arguments: object, folder: pathlib.Path) -> str:
    process = subprocess.run([*MESHTUNE, *map(str, arguments)], capture_output=True, text=True, cwd=folder)
    assert process.returncode == 0, process.stderr + process.stdout
    return process.stdout


def test_twelve_pages_become_a_tuned_and_measured_model(tmp_path: pathlib.Path, smollm2: pathlib.Path):
    write_documents(tmp_path / "docs")
    recipe = write_recipe(tmp_path, smollm2, "made", limit=10)
    meshtune("data", "generate", recipe, folder=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "made/records.jsonl").read_text().splitlines()]
    kinds = {pathlib.Path(row["provenance"]["source"]).suffix for row in rows}
    assert len(kinds) >= 3  # of four, by what the model could write
    data = ["data.train=made/records.jsonl", "data.validation=made/held-out.jsonl", "data.max_length=256"]
    inspected = meshtune("data", "inspect", f"model={smollm2}", "output=run", *data, folder=tmp_path)
    assert "trained tokens" in inspected
    steps = ["train.steps=2", "train.batch_size=2", "method.rank=4", "sample.prompts=[]"]
    meshtune("train", f"model={smollm2}", "output=run", *data, *steps, folder=tmp_path)
    meshtune("eval", "run", "--limit", 2, "--max-tokens", 8, "--output", "eval", folder=tmp_path)
    assert "f1" in (tmp_path / "eval/report.md").read_text()


def test_a_local_teacher_goes_on_to_the_record_after_kill_9(tmp_path: pathlib.Path, smollm2: pathlib.Path):
    write_documents(tmp_path / "docs")
    keys = {"limit": 6, "filters": {"quality": 1}}  # the answers of all, then the scores of all
    reference = generate_data(load_data_recipe(write_recipe(tmp_path, smollm2, "reference", **keys)))
    recipe = write_recipe(tmp_path, smollm2, "killed", **keys)
    complete = tmp_path / "killed/journal/000000.jsonl"
    journal = complete.with_suffix(".jsonl.partial")
    process = subprocess.Popen([*MESHTUNE, "data", "generate", str(recipe)], stdout=subprocess.DEVNULL)
    while process.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\n") < 1):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    answered = journal.read_bytes().count(b"\n")
    total = len((reference / "journal/000000.jsonl").read_text().splitlines())
    assert 1 <= answered < total
    generate_data(load_data_recipe(recipe), resume=True)
    for name in ("records.jsonl", "held-out.jsonl", "dropped.jsonl"):
        if (reference / name).exists():
            assert (tmp_path / "killed" / name).read_bytes() == (reference / name).read_bytes()
    assert complete.read_bytes() == (reference / "journal/000000.jsonl").read_bytes()
