"""Killed and resumed equals never interrupted: every loss, every weight, every file, bit for bit.

Processes are really killed (SIGKILL). Each scenario is one run whose command is given again after each death.
"""

import hashlib
import json
import os
import pathlib
import random
import subprocess
import sys

import pytest

from compiling import FASTER
from meshtune.train.report.metrics_log import TIMINGS

SCRIPT = pathlib.Path(__file__).with_name("run_and_die.py")
KILLED = -9


@pytest.fixture(scope="module")
def stories(tmp_path_factory) -> pathlib.Path:
    """48 short texts of different lengths."""
    path = tmp_path_factory.mktemp("data") / "stories.jsonl"
    rng, phrases = random.Random(0), ["Tom", "Lily", "the dog", "a big tree", "went home", "was happy", "saw a cake"]
    lines = [" ".join(rng.choice(phrases) for _ in range(rng.randint(4, 30))) for _ in range(48)]
    path.write_text("".join(json.dumps({"text": f"Once upon a time {line}."}) + "\n" for line in lines))
    return path


@pytest.fixture
def live(tmp_path, stories, stories260k):
    """live(name, when, **recipe) runs the recipe in a process until it ends or dies; the exit code."""

    def run(name: str, when: str, **sections) -> int:
        fields = {
            "model": {"path": str(stories260k), **sections.pop("model", {})},
            "data": {"train": str(stories), "max_length": 64, "validation": 8, **sections.pop("data", {})},
            "output": str(tmp_path / name),
            "resume": True,
            "seed": 5,
            **sections,
        }
        recipe = tmp_path / f"{name}.json"
        recipe.write_text(json.dumps(fields))
        environment = os.environ | {"XLA_FLAGS": FASTER, "MESHTUNE_CACHE": str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, str(SCRIPT), str(recipe), when], env=environment, capture_output=True, text=True
        )
        assert done.returncode in (0, KILLED, 130, 143), done.stdout[-3000:] + done.stderr[-5000:]
        return done.returncode

    return run


def what_was_learned(output: pathlib.Path) -> dict[str, object]:
    """Everything a run leaves that is not a time: metrics, samples, and every byte of the result."""
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    learned: dict[str, object] = {
        "metrics": [{key: value for key, value in row.items() if key not in TIMINGS} for row in rows],
        "samples": (output / "samples.jsonl").read_text(),
    }
    for file in sorted([*output.glob("adapter/*"), *output.glob("model/*")]):
        learned[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    assert any(name.endswith(".safetensors") for name in learned)
    return learned


PACKED = {
    "method": {"kind": "lora", "rank": 4, "dropout": 0.1},
    "train": {"steps": 14, "batch_size": 4, "micro_batch": 2},
    "optimizer": {"learning_rate": 0.01, "weight_decay": 0.01},
    "eval": {"every": 3, "early_stopping": 50},
    "checkpoint": {"every": 2, "keep": 2},
}


@pytest.fixture
def reference_run(live, tmp_path) -> dict[str, object]:
    """The same run, never interrupted."""
    assert live("whole", "never", **PACKED) == 0
    return what_was_learned(tmp_path / "whole")


def test_a_run_killed_in_its_second_epoch_ends_as_if_it_had_not_been(live, tmp_path, reference_run):
    """With packing, LoRA, dropout, accumulation and evaluation."""
    assert live("killed", "step:11", **PACKED) == KILLED
    assert not (tmp_path / "killed/adapter").exists()
    assert live("killed", "never", **PACKED) == 0
    assert what_was_learned(tmp_path / "killed") == reference_run
    epochs = [json.loads(line)["epoch"] for line in (tmp_path / "killed/metrics.jsonl").read_text().splitlines()]
    assert max(epochs) > 1, "the death was to be in a later epoch"


@pytest.mark.slow
def test_packed_lora_with_accumulation_dropout_and_evaluation(live, tmp_path, reference_run):
    """Dies while writing its first checkpoint and in the second epoch; Ctrl-C in between finishes its update."""
    assert live("killed", "save:2", **PACKED) == KILLED
    assert live("killed", "int:5", **PACKED) == 130
    assert json.loads((tmp_path / "killed/run.json").read_text())["status"] == "interrupted"
    saved = max(int(path.name) for path in (tmp_path / "killed/checkpoints").iterdir())
    assert saved in (5, 6, 7), "the update under way is finished and saved"
    assert live("killed", "step:11", **PACKED) == KILLED
    assert live("killed", "never", **PACKED) == 0
    assert what_was_learned(tmp_path / "killed") == reference_run


@pytest.mark.slow
def test_sigterm_saves_and_other_intervals_between_checkpoints_change_nothing(live, tmp_path, reference_run):
    recipe = PACKED | {"checkpoint": {"every": 100}}
    assert live("stopped", "term:9", **recipe) == 143
    assert live("stopped", "never", **recipe) == 0
    assert what_was_learned(tmp_path / "stopped") == reference_run


UNPACKED = {
    "method": "full",
    "data": {"packing": False},
    "train": {"epochs": 2, "batch_size": 8},
    "optimizer": {"name": "adafactor", "learning_rate": 0.003, "schedule": "wsd"},
    "eval": {"every": "epoch", "early_stopping": 1, "min_delta": 10.0},
    "checkpoint": {"every": 1, "keep": 1},
    "sample": {"prompts": ["Once upon"], "every": 2, "max_tokens": 8},
}


@pytest.mark.slow
def test_unpacked_full_tuning_that_stops_early(live, tmp_path):
    """Dies while an old checkpoint is half deleted, and after the evaluation that ends the run."""
    assert live("whole", "never", **UNPACKED) == 0
    for when in ("delete:1", "save:4", "step:9"):
        assert live("killed", when, **UNPACKED) == KILLED, when
    assert live("killed", "never", **UNPACKED) == 0
    assert what_was_learned(tmp_path / "killed") == what_was_learned(tmp_path / "whole")


@pytest.mark.slow
def test_deaths_at_any_time(live, tmp_path, reference_run):
    """Twelve lives of random length, so deaths come in imports, compilation, saves, evaluations and the export."""
    lengths = random.Random(1)
    for _ in range(12):
        live("killed", f"time:{lengths.uniform(2, 14):.2f}", **PACKED)
    assert live("killed", "never", **PACKED) == 0
    assert what_was_learned(tmp_path / "killed") == reference_run


# A clock of the machine that is ten years behind, right, and ten years ahead, a second each.
CLOCK = """
import time
_time, _time_ns = time.time, time.time_ns
_offset = lambda: (int(time.monotonic()) % 3 - 1) * 315360000
time.time = lambda: _time() + _offset()
time.time_ns = lambda: _time_ns() + _offset() * 10**9
"""


@pytest.mark.slow
def test_a_clock_that_jumps_changes_nothing(live, tmp_path, reference_run, monkeypatch):
    """Neither the result, nor which checkpoints are kept and resumed, nor the times that are written."""
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock/sitecustomize.py").write_text(CLOCK)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "clock"), os.environ.get("PYTHONPATH", "")]))
    assert live("jumps", "step:7", **PACKED) == KILLED
    assert live("jumps", "save:10", **PACKED) == KILLED
    assert live("jumps", "never", **PACKED) == 0
    assert what_was_learned(tmp_path / "jumps") == reference_run
    for line in (tmp_path / "jumps/metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert 0 <= row.get("seconds", 0) < 600, row
        assert 0 <= row.get("tokens_per_second", 0) < 10_000_000, row
    steps = sorted(int(path.name) for path in (tmp_path / "jumps/checkpoints").iterdir() if path.name.isdigit())
    assert steps == sorted(int(path.name) for path in (tmp_path / "whole/checkpoints").iterdir() if path.name.isdigit())


# LoRA has the base with its adapters off for a reference, full tuning the start's log-probabilities on disk.
STAGES = {
    "dpo": {"stage": {"kind": "dpo", "ld_alpha": 0.5}, "method": "full"},
    "kto": {"stage": "kto", "method": {"kind": "lora", "rank": 4}},
    "rm": {"stage": {"kind": "rm", "centre": 0.01}, "method": {"kind": "lora", "rank": 4, "dropout": 0.1}},
    "orpo": {"stage": "orpo", "method": {"kind": "freeze", "last_layers": 1}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
def test_every_kind_of_stage(name, live, tmp_path):
    """Dies while saving and in a later epoch."""
    rows = [
        {"prompt": f"Say {n}.", "chosen": f"It is {n}, said the dog.", "rejected": "No! " * (n % 3 + 1)}
        for n in range(32)
    ]
    if name == "kto":
        rows = [
            {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
            for row in rows
            for side in ("chosen", "rejected")
        ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        **STAGES[name],
        "model": {"chat_template": "chatml"},
        "data": {"train": str(tmp_path / "rows.jsonl"), "max_length": 96},
        "train": {"steps": 9, "batch_size": 4, "micro_batch": 2},
        "optimizer": {"learning_rate": 0.01},
        "eval": {"every": 3},
        "checkpoint": {"every": 2},
    }
    assert live("whole", "never", **recipe) == 0
    assert live("killed", "save:2", **recipe) == KILLED
    assert live("killed", "step:7", **recipe) == KILLED
    assert live("killed", "never", **recipe) == 0
    learned = what_was_learned(tmp_path / "killed")
    assert learned == what_was_learned(tmp_path / "whole")
    assert max(row["epoch"] for row in learned["metrics"]) > 1
