"""LoRA on SmolLM2-135M and alpaca records, CPU: Meshtune beside transformers' Trainer with peft, alternated.

    python benchmarks/cpu_vs_peft/run.py MODEL ALPACA_JSON [--updates 16] [--rounds 3] [--json FILE]

Every arm is a process of its own, run as a user would run it, and takes one pass over the same records with the same
rank, targets, learning rate and number of sequences an update:

- trainer, default: random order, each batch padded to its longest record
- trainer, grouped: the same with records of like length together (its best)
- meshtune, packed: packed rows, the default; as many records an update on average
- trainer, fixed and meshtune, fixed: every record padded to one length, equal shapes on both sides

Figures are medians over the rounds; ratios are made round by round, since the speed of a shared machine drifts, and the
arms of every other round run in the opposite order. With --json rounds are added to those in the file, so that a
measurement can be made of several short runs, and with --others runs beside busy programs are dropped.
Supervised tokens are those whose prediction counts in the loss.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata

HERE = pathlib.Path(__file__).resolve().parent
SEQUENCES = 8
LENGTHS = {"default": 512, "grouped": 512, "fixed": 256}  # longer records are cut
# Two packed rows of 800 tokens hold eight alpaca records on average (they have 202 tokens on average).
ROWS, ROW_LENGTH = 2, 800
ARMS = [
    ("trainer", "default"),
    ("meshtune", "packed"),
    ("trainer", "grouped"),
    ("trainer", "fixed"),
    ("meshtune", "fixed"),
]


def trainer(arm: str, model: str, data: pathlib.Path, updates: int, _work: pathlib.Path) -> dict:
    """One run of peft_side.py: a line of its output an update."""
    command = [sys.executable, str(HERE / "peft_side.py"), model, str(data), "--arm", arm]
    command += ["--updates", str(updates), "--sequences", str(SEQUENCES), "--length", str(LENGTHS[arm])]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    ends, losses, learned = [], [], 0
    for line in process.stdout:
        if line.startswith('{"loss"'):
            ends.append(time.perf_counter() - began)
            losses.append(json.loads(line)["loss"])
        elif line.startswith('{"learned'):
            learned = json.loads(line)["learned_tokens"]
    while (usage := _finished(process)) is None:
        time.sleep(0.01)
    return figures(ends, losses, learned, usage)


def meshtune(arm: str, model: str, data: pathlib.Path, _updates: int, work: pathlib.Path) -> dict:
    """One `meshtune train`: a line of its metrics.jsonl an update, timed as it appears."""
    rows, length = (ROWS, ROW_LENGTH) if arm == "packed" else (SEQUENCES, LENGTHS["fixed"])
    output = work / "run"
    settings = [
        f"model={model}",
        f"data.train={data}",
        f"output={output}",
        f"data.packing={str(arm == 'packed').lower()}",
        f"data.max_length={length}",
        "train.epochs=1",
        f"train.batch_size={rows}",
        "optimizer.learning_rate=2e-4",
        "optimizer.warmup_steps=1",
        "compute.precision=float32",
        "checkpoint.every=1000",
    ]
    environment = os.environ | {"MESHTUNE_CACHE": str(work / "cache")}  # nothing from an earlier run
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "meshtune", "train", *settings],
        stdout=subprocess.DEVNULL,
        env=environment,
    )
    log, ends, lines = output / "metrics.jsonl", [], []
    while (usage := _finished(process)) is None:
        time.sleep(0.01)
        lines = log.read_text().splitlines() if log.exists() else []
        ends += [time.perf_counter() - began] * (len(lines) - len(ends))
    steps = [json.loads(line) for line in lines]
    return figures(ends, [step["loss"] for step in steps], sum(step["learned_tokens"] for step in steps), usage)


def figures(ends: list[float], losses: list[float], learned: int, peak_bytes: int) -> dict:
    """What is reported of a run. `ends` are the seconds after its start at which updates were done."""
    steps = [after - before for before, after in itertools.pairwise(ends)]
    return {
        "updates": len(ends),
        "supervised_tokens": learned,
        "seconds": ends[-1],
        "first_update_seconds": ends[0],
        "update_seconds": statistics.median(steps),
        "tokens_per_second": learned / ends[-1],
        "steady_tokens_per_second": learned / len(ends) / statistics.mean(steps),
        "peak_bytes": peak_bytes,
        "first_loss": losses[0],
        "final_loss": statistics.mean(losses[-4:]),
    }


def _finished(process: subprocess.Popen) -> int | None:
    """The largest resident set of a process that has ended well, in bytes; None while it runs."""
    pid, status, usage = os.wait4(process.pid, os.WNOHANG)
    if pid == 0:
        return None
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"exit code {process.returncode}: {process.args}"
    return usage.ru_maxrss * 1024


class OtherPrograms:
    """The share of all cores' time that programs other than this one and its children used within the block."""

    share: float

    def __enter__(self) -> OtherPrograms:
        self._start, self._busy, self._own = time.perf_counter(), _busy_seconds(), _own_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        capacity = (time.perf_counter() - self._start) * (os.cpu_count() or 1)
        self.share = max(0.0, (_busy_seconds() - self._busy) - (_own_seconds() - self._own)) / capacity


def _busy_seconds() -> float:
    """Processor seconds of all programs since the machine started: user, nice, system, interrupts."""
    fields = pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return sum(int(fields[index]) for index in (0, 1, 2, 5, 6)) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data", type=pathlib.Path)
    parser.add_argument("--updates", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arms", default="", help="comma-separated, such as trainer-fixed,meshtune-fixed")
    parser.add_argument("--json", type=pathlib.Path, help="raw numbers; rounds in the file are kept and added to")
    parser.add_argument(
        "--others", type=float, default=1.0, help="drop runs beside which others used more of all cores"
    )
    options = parser.parse_args()
    arms = [arm for arm in ARMS if not options.arms or "-".join(arm) in options.arms.split(",")]
    records = json.loads(options.data.read_text(encoding="utf-8"))[: options.updates * SEQUENCES]
    names = ["-".join(arm) for arm in arms]
    earlier = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    if earlier and earlier["updates"] != options.updates:
        parser.error(f"{options.json} holds runs of {earlier['updates']} updates")
    results: dict[str, list[dict]] = {name: [] for name in names} | earlier.get("runs", {})
    for _ in range(options.rounds):
        number = len(results[names[0]])
        for side, arm in arms if number % 2 == 0 else reversed(arms):
            name = f"{side}-{arm}"
            with tempfile.TemporaryDirectory() as work:
                data = pathlib.Path(work) / "records.json"
                data.write_text(json.dumps(records), encoding="utf-8")
                run = {"trainer": trainer, "meshtune": meshtune}[side]
                with OtherPrograms() as other_programs:
                    measured = run(arm, options.model, data, options.updates, pathlib.Path(work))
            measured["others"] = round(other_programs.share, 3)
            print(f"round {number + 1}, {side}, {arm}: {json.dumps(measured)}", flush=True)
            if other_programs.share <= options.others:
                results[name].append(measured)
        if options.json:
            about = {"date": datetime.date.today().isoformat(), "python": platform.python_version()}
            about |= {name: metadata.version(name) for name in ("jax", "torch", "transformers", "peft")}
            content = {"about": about, "updates": options.updates, "runs": results, "summary": summary(results)}
            options.json.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(summary(results), indent=2))


def summary(results_by_arm: dict[str, list[dict]]) -> dict:
    """Medians of every arm, and ratios made round by round."""
    medians = {
        arm: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for arm, runs in results_by_arm.items()
        if runs
    }

    def ratio(ours: str, theirs: str, key: str) -> float | None:
        if not (results_by_arm.get(ours) and results_by_arm.get(theirs)):
            return None
        pairs = zip(results_by_arm[ours], results_by_arm[theirs], strict=False)  # runs may have been dropped
        return round(statistics.median(a[key] / b[key] for a, b in pairs), 3)

    ratios = {
        "end to end, against default": ratio("meshtune-packed", "trainer-default", "tokens_per_second"),
        "end to end, against grouped": ratio("meshtune-packed", "trainer-grouped", "tokens_per_second"),
        "steady, against default": ratio("meshtune-packed", "trainer-default", "steady_tokens_per_second"),
        "steady, against grouped": ratio("meshtune-packed", "trainer-grouped", "steady_tokens_per_second"),
        "equal padded shapes, steady": ratio("meshtune-fixed", "trainer-fixed", "steady_tokens_per_second"),
    }
    return {"medians": medians, "ratios": ratios}


if __name__ == "__main__":
    main()
