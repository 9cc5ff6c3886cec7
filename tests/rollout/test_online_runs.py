"""Runs of online stages end to end: what they leave, and that a run killed anywhere ends with the same files.

Processes are really killed (SIGKILL), in a rollout, in a reward, between a rollout and its updates, between updates and
in a save; the same command then goes on.
"""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
from pictures_to_see import write_model, write_records
from random_model import save_random_model
from serving import serving

from data.stock_templates import tokenizer_of_trl
from meshtune.rollout.saved import decode_rollout, read_rollout
from meshtune.runs.rollouts import read_rollouts
from meshtune.serve.models import Models, load_served
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

    def run(name: str, when: str, environment: dict[str, str] | None = None, script: str = "", **sections) -> int:
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
            [sys.executable, str(SCRIPT), str(recipe), when, *filter(None, [script])],
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_killed_run_over_pictures_ends_with_the_same_files(live, tmp_path):
    """A rollout's file has no pixels: they are read again."""
    (tmp_path / "seen.py").write_text(
        "def length(completions, **_): return [len(c[0]['content']) for c in completions]"
    )
    options = {
        "model": str(write_model(tmp_path / "model")),
        "data": {"train": str(write_records(tmp_path / "data", 8)), "max_length": 96},
        "vision": {"train": ["projector"]},
        "rewards": [f"{tmp_path}/seen.py:length"],
        "rollout": {"prompts": 2, "samples": 3, "max_tokens": 6, "updates": 2, "iterations": 2},
        "train": {"steps": 6},
    }
    assert live("whole", "never", **options) == 0
    assert live("killed", "rollout:0", **options) == KILLED
    assert live("killed", "step:5", **options) == KILLED
    assert live("killed", "never", **options) == 0
    assert learned(tmp_path / "killed") == learned(tmp_path / "whole")


@pytest.mark.slow
def test_a_killed_run_of_ppo_continues_with_its_critic_and_the_weight_of_its_divergence(live, tmp_path):
    """Also where the rollout before is gone, and where one is on disk that no checkpoint knows."""
    stage = {"kind": "ppo", "kl_target": 1e-3, "kl_horizon": 20}
    rollout = {"prompts": 2, "samples": 3, "max_tokens": 12, "iterations": 3}
    options = {"stage": stage, "rollout": rollout, "train": {"steps": 11}}
    assert live("whole", "never", **options) == 0
    assert live("killed", "step:5", **options) == KILLED
    assert live("killed", "generate:2", **options) == KILLED
    (tmp_path / "killed/rollouts/00000001.npz").unlink()
    assert live("killed", "rollout:2", **options) == KILLED
    assert live("killed", "step:10", **options) == KILLED
    assert live("killed", "never", **options) == 0
    expected = learned(tmp_path / "whole")
    assert learned(tmp_path / "killed") == expected
    assert any(row["loss/value_avg"] > 0 for row in expected["metrics"])
    assert b"critic" not in expected["adapter"]
    coef, errors = 0.05, []
    for row in expected["metrics"][::3]:
        assert row["kl_coef"] == coef
        errors.append(min(max(row["kl"] / 1e-3 - 1, -0.2), 0.2))
        coef *= 1 + errors[-1] * 6 / 20
    assert set(errors) == {-0.2, 0.2}, "the first rollout is of the reference"


ENVIRONMENT = '''
import itertools, os, signal

made, calls = itertools.count(), itertools.count()


class Counter:
    def __init__(self):
        self.number = next(made)  # which completion of a rollout it is of

    def reset(self, start, **columns):
        self.total = start
        return f" It is {start + self.number}."

    def add(self, amount: int) -> int:
        """Adds to the count.

        Args:
            amount: What is added.
        """
        if str(next(calls)) == os.environ.get("DIE_IN_CALL"):
            os.kill(os.getpid(), signal.SIGKILL)
        self.total += amount
        return self.total

    def get_reward(self):
        return self.total % 7 / 7
'''


@pytest.mark.slow
def test_a_run_with_an_environment_that_is_killed_ends_with_the_same_files(live, tmp_path, shared):
    """In a tool's call of a later turn, in the middle of a rollout, before its updates and between them."""
    model = save_random_model(tmp_path / "random", shared)
    tokenizer_of_trl("qwen3_instruct_2507", shared).save_pretrained(model)
    (tmp_path / "counter.py").write_text(ENVIRONMENT)
    questions = [{"prompt": [{"role": "user", "content": "Count."}], "start": n} for n in range(3)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(record) + "\n" for record in questions))
    options = {
        "model": str(model),
        "data": {"train": str(tmp_path / "questions.jsonl"), "max_length": 480},
        "rollout": {"environment": f"{tmp_path}/counter.py:Counter", "prompts": 2, "samples": 2, "max_tokens": 200}
        | {"updates": 2, "iterations": 2},
        "rewards": [],
        "train": {"steps": 9},
    }
    script = str(pathlib.Path(__file__).with_name("scripted_turns.py"))
    assert live("whole", "never", script=script, **options) == 0
    assert live("killed", "never", {"DIE_IN_CALL": "6"}, script, **options) == KILLED
    assert live("killed", "rollout:0", None, script, **options) == KILLED
    assert live("killed", "generate:1", None, script, **options) == KILLED
    assert live("killed", "step:7", None, script, **options) == KILLED
    assert live("killed", "never", None, script, **options) == 0
    expected = learned(tmp_path / "whole")
    assert learned(tmp_path / "killed") == expected
    assert {row["tools/call_frequency"] for row in expected["metrics"]} == {2.0}
    assert all(len(row["completion"].split("<tool_response>")) == 3 for row in expected["rollouts"])
    assert any(row["grad_norm"] > 0 for row in expected["metrics"])


@pytest.mark.slow
def test_what_a_reward_drew_is_read_back(live, tmp_path):
    """The reward is of the process: only the file can give a resumed run the same numbers."""
    options = {"rewards": [f"{tmp_path}/reward.py:noise"], "train": {"steps": 7}}
    assert live("noisy", "step:6", **options) == KILLED
    before = decode_rollout(read_rollout(tmp_path / "noisy/rollouts", 1))
    rows = read_rollouts(tmp_path / "noisy")
    assert live("noisy", "never", **options) == 0
    assert read_rollouts(tmp_path / "noisy")[: len(rows)] == rows
    for row, values in zip(rows[6:12], before.rewards, strict=True):
        assert list(row["rewards"].values()) == values.tolist()


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("behind_an_address", [False, True])
def test_a_mixed_distillation_that_is_killed_ends_with_the_same_files(live, tmp_path, stories260k, behind_an_address):
    """Own samples and the data's answers by turns; the teacher is the model with noise on its weights."""
    from safetensors.numpy import load_file, save_file

    teacher, rng = tmp_path / "teacher", np.random.default_rng(0)
    shutil.copytree(stories260k, teacher)
    teacher.chmod(0o755)
    for file in teacher.glob("*.safetensors"):
        tensors = {name: value + 0.1 * rng.normal(size=value.shape) for name, value in load_file(file).items()}
        file.unlink()
        save_file({name: value.astype(np.float32) for name, value in tensors.items()}, file, {"format": "pt"})
    records = [{"prompt": text, "completion": " went home. The end."} for text in PROMPTS]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = {"train": str(tmp_path / "answers.jsonl"), "max_length": 48, "validation": str(tmp_path / "answers.jsonl")}
    place = contextlib.nullcontext(str(teacher))
    if behind_an_address:
        models = Models(load_served(str(teacher), "teacher", {}, dtype="float32", quantize="auto"), rows=8, queue=8)
        place = serving(models)
    with place as address:
        _compare_killed(live, tmp_path, data, f"{address}/v1" if behind_an_address else address)


def _compare_killed(live, tmp_path, data, teacher):
    sections = {
        "data": data,
        "teacher": teacher,
        "stage": {"kind": "distill", "on_policy": 0.5},
        "rollout": {"prompts": 4, "samples": 1, "max_tokens": 12, "updates": 2},
        "rewards": [],
        "train": {"steps": 8},
        "eval": {"every": 4, "at_start": True},
    }
    assert live("distilled", "never", **sections) == 0
    assert live("cut", "step:3", **sections) == KILLED
    assert live("cut", "never", **sections) == 0
    expected = learned(tmp_path / "distilled")
    assert learned(tmp_path / "cut") == expected
    own = {row["step"]: row["on_policy"] for row in expected["metrics"] if row["kind"] == "train"}
    assert set(own.values()) == {0.0, 1.0}, "seed 0 draws both kinds"
    assert {row["reason"] == "data" for row in expected["rollouts"]} == {True, False}
    assert {bool(own[row["step"]]) == (row["reason"] != "data") for row in expected["rollouts"]} == {True}
    losses = [row["loss"] for row in expected["metrics"] if row["kind"] == "eval"]
    assert losses[-1] < 0.9 * losses[0]
