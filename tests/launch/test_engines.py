"""Commands that share their work between replicas, on a real Ray and a real Slurm of two nodes, also after kill -9: the
results are the bytes of one process. And replicas that generate for a run of GRPO."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from loopback import loopback_only
from slurm_nodes import two_nodes

QUICKSTART = pathlib.Path(__file__).parents[2] / "src/meshtune/quickstart/model"
STORY = "Once upon a time there was a dog named Max. "
MESHTUNE = [sys.executable, "-m", "meshtune"]
COMMANDS = ("predict", "eval", "generate", "prepare")
TEMPLATE = """\
about: A passage, and a word.
of: passage
prompt: "{{ passage }}"
answer_schema:
  type: object
  properties: {word: {type: string, minLength: 12, maxLength: 16}}
  required: [word]
  additionalProperties: false
messages:
  - {role: user, content: "{{ passage }}"}
  - {role: assistant, content: "{{ item.word }}"}
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@dataclasses.dataclass(frozen=True)
class Work:
    """The commands in a folder with their data, and what one process writes."""

    folder: pathlib.Path
    model: pathlib.Path

    def command(self, name: str, output: pathlib.Path) -> list[str]:
        """A command whose results are in `output`."""
        data = self.folder / "stories.jsonl"
        common = ["--data", str(data), "--metrics", "f1,chrf", "--max-tokens", "24", "--output", str(output)]
        return {
            "predict": ["predict", str(self.model), *common],
            "eval": ["eval", str(self.model), *common],
            "generate": ["data", "generate", str(self.folder / "generate.json"), f"output={output}"],
            "prepare": ["data", "prepare", str(self.folder / "train.json")],
        }[name]

    def one(self, name: str) -> pathlib.Path:
        """The results of one process, computed once."""
        output = self.folder / f"one-{name}"
        if not output.exists():
            finish(start([*MESHTUNE, *self.command(name, output)], output), output)
        return output


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, stories260k: pathlib.Path) -> Work:
    folder = tmp_path_factory.mktemp("work")
    rows = [{"prompt": STORY[: 8 + number % 30], "completion": " The end."} for number in range(600)]
    (folder / "stories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"messages": [{"role": "user", "content": f"What is {number}?"}, {"role": "assistant", "content": "It."}]}
            for number in range(9000)]  # fmt: skip
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": str(folder / "chats.jsonl"), "max_length": 64}
    recipe = {"model": {"path": str(QUICKSTART), "chat_template": "plain"}, "data": data, "output": str(folder / "run")}
    (folder / "train.json").write_text(json.dumps(recipe))
    teacher = folder / "teacher"
    shutil.copytree(QUICKSTART, teacher)
    config = json.loads((teacher / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    (teacher / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "docs").mkdir()
    for number in range(6):
        text = f"The mill number {number} grinds rye, spelt and {number} other sorts of grain. " * 2
        (folder / f"docs/{number}.md").write_text(f"# Mill {number}\n\n{text}\n")
    (folder / "go-on.yaml").write_text(TEMPLATE)
    recipe = {
        "teacher": {"path": str(teacher), "max_tokens": 64, "at_once": 8},
        "documents": str(folder / "docs"),
        "kinds": [{"template": str(folder / "go-on.yaml"), "repeat": 50}],  # 300 tasks are three blocks
        "filters": {"duplicates": None},
        "output": "given by the command",
    }
    (folder / "generate.json").write_text(json.dumps(recipe))
    return Work(folder, stories260k)


def start(command: list[str], output: pathlib.Path, **variables: str) -> subprocess.Popen[str]:
    env = os.environ | {"JAX_PLATFORMS": "cpu", "RAY_TMPDIR": "/tmp", "MESHTUNE_CACHE": f"{output}-cache"} | variables
    env = {name: value for name, value in env.items() if name != "XLA_FLAGS"}
    with open(f"{output}.log", "w") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=log, text=True)


def finish(process: subprocess.Popen[str], output: pathlib.Path) -> str:
    """Waits for the end; returns what was printed."""
    code = process.wait(timeout=600)
    text = pathlib.Path(f"{output}.log").read_text()
    logs = [f"\n--- {log}\n{log.read_text()[-2000:]}" for log in output.glob("logs/*")]
    assert code == 0, text + "".join(logs)
    return text


def results(name: str, output: pathlib.Path) -> dict[str, bytes]:
    """The files that a command has written, without times and places."""
    if name == "prepare":
        (store,) = (path.parent for path in pathlib.Path(f"{output}-cache").glob("tokens/*/manifest.json"))
        return {file.name: file.read_bytes() for file in store.iterdir()}
    names = ("predictions.jsonl", "metrics.json", "records.jsonl", "dropped.jsonl", "report.md")
    files = [file for file in output.rglob("*") if file.name in names]
    return {str(file.relative_to(output)): file.read_bytes() for file in files}


def wait(condition: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + 400
    while not condition():
        assert process is None or process.poll() is None, "it has ended"
        assert time.monotonic() < deadline, "it hangs"
        time.sleep(0.02)


def kill_replica(shard: str, output: pathlib.Path) -> None:
    """Kills a replica, wherever its engine has started it."""
    lines = [(process, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    (replica,) = [process for process, line in lines if shard in line and any(str(output) in part for part in line)]
    replica.send_signal(signal.SIGKILL)


def parts(name: str, output: pathlib.Path) -> list[pathlib.Path]:
    """The files of parts of the work that are complete, or have begun."""
    return list(output.glob("journal/*" if name == "generate" else "**/blocks/*.jsonl"))


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra ray is not installed")
@pytest.mark.parametrize("name", COMMANDS)
def test_tasks_of_ray_write_the_bytes_of_one_process_also_when_one_is_killed(work: Work, tmp_path: pathlib.Path, name):
    output = tmp_path / "many"
    options = ["--workers", "2"] if name == "prepare" else ["--replicas", "2"]
    command = [*loopback_only(), *MESHTUNE, *work.command(name, output), *options, "--executor", "ray"]
    launcher = start(command, output)
    if name in ("predict", "generate"):
        wait(lambda: parts(name, output), launcher)
        kill_replica("2/2", output)
    text = finish(launcher, output)
    assert ("replica 2 of 2 was ended by SIGKILL: its shard is done again" in text) == (name in ("predict", "generate"))
    expected = results(name, work.one(name))
    assert results(name, output) == expected
    assert max(map(len, expected.values())) > 10_000


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables by which Slurm's commands reach the two nodes."""
    with two_nodes(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables


def states(job: str, variables: dict[str, str]) -> list[str]:
    """The states of the jobs of an array."""
    shown = subprocess.run(
        ["scontrol", "-o", "show", "job", job], env=os.environ | variables, capture_output=True, text=True
    )
    return re.findall(r"JobState=(\w+)", shown.stdout)


@pytest.mark.parametrize("name", COMMANDS)
def test_jobs_of_slurm_write_the_bytes_of_one_process_also_when_one_is_killed(
    work: Work, tmp_path: pathlib.Path, slurm, name
):
    output = tmp_path / "many"
    options = ["--replicas", "2"]
    if name == "prepare":
        options = ["--workers", "2", "--option", "partition=here", "--option", "time=10:00"]
        too_much = ["--option", "mem-per-cpu=9000G", "--executor", "slurm"]
        refused = start([*MESHTUNE, *work.command(name, output), *options, *too_much], output, **slurm)
        assert refused.wait(timeout=300) == 2
        assert "Slurm does not take the job" in pathlib.Path(f"{output}.log").read_text()
    submitted = start([*MESHTUNE, *work.command(name, output), *options, "--executor", "slurm"], output, **slurm)
    match = re.search(r"job (\d+) ", " ".join(finish(submitted, output).split()))
    assert match
    if name in ("predict", "generate"):
        wait(lambda: parts(name, output))
        kill_replica("2/2", output)
        wait(lambda: "PENDING" in states(match[1], slurm))  # requeued, with a delay of two minutes by default
        time.sleep(2)  # a node refuses a job that it ended in the same second
        env = os.environ | slurm
        subprocess.run(["scontrol", "update", f"JobId={match[1]}_2", "StartTime=now"], env=env, check=True)
    wait(lambda: not {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING"} & set(states(match[1], slurm)))
    logs = [f"\n--- {log}\n{log.read_text()[-2000:]}" for log in tmp_path.rglob("*.log")]
    assert set(states(match[1], slurm)) == {"COMPLETED"}, "".join(logs)
    assert results(name, output) == results(name, work.one(name))


@pytest.mark.parametrize("executor", ["ray", "slurm"])
def test_replicas_generate_for_a_run_and_end_with_it(work: Work, tmp_path: pathlib.Path, executor, request):
    variables = request.getfixturevalue("slurm") if executor == "slurm" else {}
    namespace = loopback_only() if executor == "ray" and pytest.importorskip("ray") else []
    (tmp_path / "reward.py").write_text(
        "def short(completions, **columns):\n    return [-len(c) for c in completions]\n"
    )
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{n} dogs"}) + "\n" for n in range(4)))
    recipe, output = tmp_path / "recipe.json", tmp_path / "run"
    fields = {
        "model": str(work.model),
        "data": {"train": str(tmp_path / "prompts.jsonl"), "max_length": 32},
        "stage": "grpo",
        "rollout": {"prompts": 4, "samples": 2, "rows": 2, "max_tokens": 8, "replicas": True},
        "rewards": [f"{tmp_path}/reward.py:short"],
        "train": {"steps": 3},
        "output": str(output),
    }
    recipe.write_text(json.dumps(fields))
    serve = ["serve-rollouts", str(recipe), "--replicas", "2", "--executor", executor]
    launcher = start([*namespace, *MESHTUNE, *serve], tmp_path / "replicas", **variables)
    trainer = start([*MESHTUNE, "train", str(recipe)], tmp_path / "train")
    finish(trainer, tmp_path / "train")
    text = finish(launcher, tmp_path / "replicas")
    if match := re.search(r"job (\d+) submitted", text):
        wait(lambda: set(states(match[1], variables)) == {"COMPLETED"})
    for number in (1, 2):
        assert f"replica {number}/2 generates for {output}" in (output / f"logs/replica-{number}.log").read_text()
