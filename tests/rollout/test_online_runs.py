"""Runs of online stages end to end: what they leave, and that a run killed anywhere ends with the same files.

Processes are really killed (SIGKILL), in a rollout, in a reward, between a rollout and its updates, between updates and
in a save; the same command then goes on.
"""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from meshtune.rollout.saved import decode_rollout, read_rollout
from meshtune.runs.rollouts import read_rollouts
from meshtune.train.report.metrics_log import TIMINGS, parse_line

SCRIPT = pathlib.Path(__file__).parents[1] / "train/run_and_die.py"
KILLED = -9
PROMPTS = [
    "Once upon a time",
    "One day, a dog",
    "Lily and Tom",
    "The big tree",
    "A girl",
    "Tom had a red",
    "In the park",
]
# The reward draws random numbers and dies once where it is told to: what it drew is in the rollout's file.
REWARD = """
import os, pathlib, random, signal

def letters(completions, trainer_state, **columns):
    at = os.environ.get("DIE_IN_REWARD_OF_STEP")
    if at is not None and trainer_state.global_step == int(at):
        os.kill(os.getppid(), signal.SIGKILL)
    return [text.count("e") / max(1, len(text)) for text in completions]

def noise(completions, **columns):
    return [random.Random(f"{os.getpid()} {text}").random() for text in completions]
"""


@pytest.fixture
def live(tmp_path, stories260k):
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))

    def run(name: str, when: str, environment: dict[str, str] | None = None, **sections) -> int:
        fields = {
            "model": str(stories260k),
            "data": {"train": str(tmp_path / "prompts.jsonl"), "max_length": 48},
            "stage": {"kind": "grpo", "beta": 0.05},
            "rollout": {"prompts": 2, "samples": 3, "max_tokens": 12, "updates": 2, "iterations": 2},
            "rewards": [f"{tmp_path}/reward.py:letters"],
            "method": {"kind": "lora", "rank": 4},
            "optimizer": {"learning_rate": 0.01, "warmup_steps": 0},
            "train": {"steps": 14},
            "checkpoint": {"every": 3, "keep": 2},
            "output": str(tmp_path / name),
            "resume": True,
            **sections,
        }
        recipe = tmp_path / f"{name}.json"
        recipe.write_text(json.dumps(fields))
        done = subprocess.run(
            [sys.executable, str(SCRIPT), str(recipe), when],
            env=os.environ | {"MESHTUNE_CACHE": str(tmp_path / "cache"), **(environment or {})},
            capture_output=True,
            text=True,
        )
        assert done.returncode in (0, KILLED, 130), done.stdout[-3000:] + done.stderr[-5000:]
        return done.returncode

    return run


def learned(output: pathlib.Path) -> dict[str, object]:
    """Everything that a run leaves and that is not a time."""
    rows = [parse_line(line) for line in (output / "metrics.jsonl").read_bytes().splitlines(keepends=True)]
    return {
        "metrics": [{key: value for key, value in row.items() if key not in TIMINGS} for row in rows if row],
        "rollouts": read_rollouts(output),
        "adapter": (output / "adapter/adapter_model.safetensors").read_bytes(),
    }


def test_a_run_killed_anywhere_ends_with_the_same_files(live, tmp_path):
    assert live("whole", "never") == 0
    assert live("killed", "generate:0") == KILLED
    assert live("killed", "rollout:0") == KILLED
    assert live("killed", "never", {"DIE_IN_REWARD_OF_STEP": "4"}) == KILLED
    assert live("killed", "save:6") == KILLED
    assert live("killed", "generate:2") == KILLED
    assert live("killed", "step:10") == KILLED
    assert live("killed", "never") == 0
    expected = learned(tmp_path / "whole")
    assert learned(tmp_path / "killed") == expected
    rows, metrics = expected["rollouts"], expected["metrics"]
    assert {row["step"] for row in rows} == {1, 5, 9, 13}, "a rollout serves four updates"
    assert len(rows) == 4 * 6
    assert [row["kl"] > 0 for row in metrics] == [False] + [True] * 13, "the adapter starts as the reference"
    assert any(row["ratio/distance"] > 1e-6 for row in metrics), "later updates see other weights than the sampler"
    kept = sorted(int(file.stem) for file in (tmp_path / "killed/rollouts").glob("*.npz"))
    assert kept == [2, 3], "the newest two checkpoints, of updates 12 and 14, need no others"


def test_what_a_reward_drew_is_read_back(live, tmp_path):
    """The reward is of the process: only the file can give a resumed run the same numbers."""
    reward = [f"{tmp_path}/reward.py:noise"]
    assert live("noisy", "step:6", rewards=reward) == KILLED
    before = decode_rollout(read_rollout(tmp_path / "noisy/rollouts", 1))
    rows = read_rollouts(tmp_path / "noisy")
    assert live("noisy", "never", rewards=reward) == 0
    assert read_rollouts(tmp_path / "noisy")[: len(rows)] == rows
    for row, values in zip(rows[6:12], before.rewards, strict=True):
        assert list(row["rewards"].values()) == values.tolist()


def test_equal_rewards_change_no_weight(live, tmp_path, stories260k):
    """Seven times 0.1 has another mean than 0.1 in floats, and Adam makes an update of any rounding."""
    (tmp_path / "equal.py").write_text("def tenth(completions, **columns):\n    return [0.1] * len(completions)\n")
    rollout = {"prompts": 2, "samples": 7, "max_tokens": 4}
    options = {"rewards": [f"{tmp_path}/equal.py:tenth"], "rollout": rollout, "stage": {"kind": "grpo"}}
    assert live("equal", "never", train={"steps": 2}, **options) == 0
    from safetensors.numpy import load_file

    tensors = load_file(tmp_path / "equal/adapter/adapter_model.safetensors")
    assert all(not np.any(value) for name, value in tensors.items() if "lora_B" in name)
    metrics = learned(tmp_path / "equal")["metrics"]
    assert [(row["grad_norm"], row["frac_reward_zero_std"]) for row in metrics] == [(0.0, 1.0)] * 2


CLOSE = {"rtol": 2e-4, "atol": 2e-5}  # float32 sums in another order


def compare(output: pathlib.Path, expected: dict[str, object]) -> None:
    """The same completions, and metrics that differ by rounding."""
    result = learned(output)
    columns = ("step", "prompt", "completion", "rewards", "tokens", "reason")
    rows = [[{name: row[name] for name in columns} for row in run["rollouts"]] for run in (result, expected)]
    assert rows[0] == rows[1]
    for row, before in zip(result["metrics"], expected["metrics"], strict=True):
        names = row.keys() - {"tokens"}  # a shared prompt has fewer
        assert row.keys() == before.keys()
        for name in names - {"kind"}:
            np.testing.assert_allclose(row[name], before[name], **CLOSE, err_msg=f"update {row['step']}: {name}")


def test_micro_batches_packing_and_shared_prompts_change_nothing(live, tmp_path):
    few = {"train": {"steps": 4}, "stage": {"kind": "grpo", "loss": "dr_grpo", "beta": 0.05}}
    assert live("plain", "never", **few) == 0
    expected = learned(tmp_path / "plain")
    rollout = {"prompts": 2, "samples": 3, "max_tokens": 12, "updates": 2, "iterations": 2}
    data = {"train": str(tmp_path / "prompts.jsonl"), "max_length": 96}
    splits = {
        "repeated": few | {"rollout": rollout | {"shared_prompts": False}, "train": {"steps": 4, "micro_batch": 1}},
        "longer": few | {"data": data, "train": {"steps": 4, "micro_batch": 3}},
        "padded": few | {"data": data | {"packing": False}, "train": {"steps": 4, "micro_batch": 1}},
    }
    for name, sections in splits.items():
        assert live(name, "never", **sections) == 0
        compare(tmp_path / name, expected)
