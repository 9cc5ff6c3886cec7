"""`meshtune quickstart` from its first line to the commands it ends with."""

from __future__ import annotations

import json
import os
import pathlib
import resource
import subprocess
import sys

import pytest


def meshtune(*arguments: str) -> str:
    """Returns the program's output, from a separate process with no hub and no home."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, "-m", "meshtune", *arguments], capture_output=True, text=True, env=environment
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def samples(run: pathlib.Path, step: int) -> list[str]:
    rows = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    return [row["text"] for row in rows if row["step"] == step]


def test_a_short_quickstart_shows_and_leaves_everything(tmp_path):
    run = tmp_path / "run"
    out = meshtune("quickstart", "--output", str(run), "train.steps=6", "sample.max_tokens=8", "data.max_length=256")
    for shown in ("devices", "plan", "compiled", "update 6/6", "done: 6 updates", "Try next:", "meshtune generate"):
        assert shown in out
    for left in ("adapter/adapter_model.safetensors", "metrics.jsonl", "loss.png", "samples.jsonl", "recipe.yaml"):
        assert (run / left).is_file()
    losses = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in losses if row["kind"] == "train"]
    assert losses[-1] < losses[0]
    assert samples(run, 0) != []
    log = (run / "console.log").read_text()
    for line in ("devices", "compiled the training step", "update 6/6", "done: 6 updates", str(run / "adapter")):
        assert line in log
    # One smoothed loss: on the last line of progress and in the summary; and that of the last update beside it.
    facts = json.loads((run / "run.json").read_text())
    assert f"update 6/6  smoothed loss {facts['smoothed_loss']:.4f}" in out
    assert facts["smoothed_loss"] == losses[-1], "six updates are not smoothed"
    assert f" s, loss {losses[-1]:.4f}" in " ".join(out.split()), "a narrow terminal folds the line"
    assert facts["loss"] == losses[-1]
    generate, _, _ = suggested_commands(out)
    assert ran_in_a_shell(f"{generate} -n 4") != ""


def suggested_commands(out: str) -> list[str]:
    """The commands that a quickstart prints at its end."""
    lines = out[out.index("Try next:") :].splitlines()[1:]
    return [line.strip() for line in lines if not line.strip().startswith("#")]


def ran_in_a_shell(line: str) -> str:
    """Runs a command with nothing of Meshtune on the PATH, as after `make quickstart`."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"}
    ran = subprocess.run(line, shell=True, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_the_quickstart_teaches_its_lesson_in_two_minutes_and_its_last_words_work(tmp_path):
    """The bound is two minutes on two idle cores, compilation included. Asserted is the processor's time, whatever else
    the machine does: with less than 120 s of it the run would keep the bound on one core."""
    run = tmp_path / "run"
    out = meshtune("quickstart", "--output", str(run))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert used.ru_utime + used.ru_stime < 120
    before, after = samples(run, 0), samples(run, 150)
    assert not any("la la la!" in text or "The lesson:" in text for text in before)
    assert all("la la la!" in text and "The lesson: It is good to" in text for text in after)
    generate, export, train = suggested_commands(out)
    assert "la la la!" in ran_in_a_shell(generate)
    assert "read back and compared" in ran_in_a_shell(export)
    assert "done: 2 updates" in ran_in_a_shell(f"{train} train.steps=2")
