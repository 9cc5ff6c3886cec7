"""Online stages over devices and processes: the completions and metrics of one device.

Draws depend on the seed and a token's position only, so completions are equal as long as no two tokens are within a
rounding of each other's draw; metrics are float32 sums in other orders.
"""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
from real_runs import launch, train

from meshtune.runs.rollouts import read_rollouts
from meshtune.train.report.metrics_log import TIMINGS, parse_line

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
PATIENT = {"timeout": 1500}  # seconds of a run: simulated devices share few cores
PROMPTS = ["Once upon a time", "One day, a dog", "Lily and Tom", "The big tree", "A girl", "Tom had a red"]
# One file for all processes: each call adds a line, so a second process that scores shows.
REWARD = """
import pathlib

def letters(completions, **columns):
    with open(pathlib.Path(__file__).with_name("calls"), "a") as log:
        log.write(f"{len(completions)}\\n")
    return [text.count("e") / max(1, len(text)) for text in completions]
"""
STAGES = {
    "grpo": ({"kind": "grpo", "beta": 0.05}, {"prompts": 4, "samples": 4, "updates": 2, "iterations": 2}),
    "rloo": ({"kind": "rloo"}, {"prompts": 2, "samples": 4}),
    "online_dpo": ({"kind": "online_dpo"}, {"prompts": 4, "samples": 2}),
    "ppo": (
        {"kind": "ppo", "kl_target": 1e-3, "kl_horizon": 32, "vf_coef": 1.0},
        {"prompts": 4, "samples": 4, "iterations": 2},
    ),
}


@pytest.fixture
def recipe(tmp_path, stories260k):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    (tmp_path / "reward.py").write_text(REWARD)

    def write(stage: str) -> pathlib.Path:
        options, rollout = STAGES[stage]
        fields = {
            "model": str(stories260k),
            "data": {"train": str(tmp_path / "prompts.jsonl"), "validation": str(tmp_path / "prompts.jsonl")}
            | {"max_length": 48},
            "stage": options,
            "rollout": {"max_tokens": 12, **rollout},
            "rewards": [f"{tmp_path}/reward.py:letters"],
            "method": {"kind": "lora", "rank": 4},
            "optimizer": {"learning_rate": 0.01, "warmup_steps": 0},
            "train": {"steps": 5},
            "output": str(tmp_path / "one"),
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps(fields))
        return path

    return write


def compare(output: pathlib.Path, expected: pathlib.Path) -> None:
    columns = ("step", "prompt", "completion", "rewards", "tokens", "reason")
    rollouts = [[{name: row[name] for name in columns} for row in read_rollouts(run)] for run in (output, expected)]
    assert rollouts[0] == rollouts[1]
    lines = [(run / "metrics.jsonl").read_bytes().splitlines(keepends=True) for run in (output, expected)]
    rows, before = ([row for row in map(parse_line, part) if row] for part in lines)
    for row, other in zip(rows, before, strict=True):
        assert row.keys() - TIMINGS == other.keys() - TIMINGS
        for name in row.keys() - TIMINGS - {"kind", "tokens"}:
            np.testing.assert_allclose(
                row[name], other[name], rtol=2e-3, atol=2e-5, err_msg=f"update {row['step']}: {name}"
            )


def test_two_processes_make_the_rollouts_of_one_and_score_them_once(recipe, tmp_path):
    path = recipe("grpo")
    train(path, **PATIENT)
    calls = (tmp_path / "calls").read_text()
    launch(path, 2, 1, "mesh.fsdp=2", f"output={tmp_path / 'two'}", **PATIENT)
    assert (tmp_path / "calls").read_text() == calls * 2
    compare(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize("stage", ["rloo", "online_dpo"])
def test_a_mesh_of_four_devices_makes_the_rollouts_of_one(recipe, tmp_path, stage):
    path = recipe(stage)
    train(path, **PATIENT)
    train(path, "mesh.fsdp=2", "mesh.tp=2", f"output={tmp_path / 'four'}", devices=4, **PATIENT)
    compare(tmp_path / "four", tmp_path / "one")


MESHES = [{"dp": 2, "fsdp": 4}, {"fsdp": 2, "tp": 4}, {"dp": 2, "fsdp": 2, "tp": 2}]


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory, stories260k):
    """A run of stage rm, which prefers the longer of two stories."""
    folder = tmp_path_factory.mktemp("reward")
    pairs = [{"prompt": text, "chosen": " went home. The end.", "rejected": " sat."} for text in PROMPTS]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    fields = {"model": str(stories260k), "data": {"train": str(folder / "pairs.jsonl"), "max_length": 48}}
    fields |= {"stage": "rm", "method": {"kind": "lora", "rank": 4}, "output": str(folder / "rm")}
    fields |= {"optimizer": {"learning_rate": 0.01, "warmup_steps": 0}, "train": {"epochs": 3, "batch_size": 3}}
    (folder / "recipe.yaml").write_text(json.dumps(fields))
    train(folder / "recipe.yaml", **PATIENT)
    return folder / "rm"


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ppo_with_a_reward_model_on_eight_devices_is_that_of_one(recipe, tmp_path, reward_model, mesh):
    """With its critic, and the weight of a divergence that is steered by it."""
    path = recipe("ppo")
    fields = json.loads(path.read_text()) | {"rewards": [{"model": str(reward_model)}]}
    path.write_text(json.dumps(fields))
    train(path, **PATIENT)
    train(
        path,
        *(f"mesh.{axis}={size}" for axis, size in mesh.items()),
        f"output={tmp_path / 'eight'}",
        devices=8,
        **PATIENT,
    )
    compare(tmp_path / "eight", tmp_path / "one")
    lines = (tmp_path / "one/metrics.jsonl").read_bytes().splitlines(keepends=True)
    rows = [row for row in map(parse_line, lines) if row and row["kind"] == "train"]
    assert len({row["kl_coef"] for row in rows}) == 3
    assert len({row["loss/value_avg"] for row in rows}) == len(rows)
