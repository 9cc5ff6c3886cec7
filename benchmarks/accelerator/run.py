"""What this accelerator makes of Meshtune: numbers first, then times beside transformers with peft, and plan's word.

    python benchmarks/accelerator/run.py                          what the stages are, and what is measured already
    python benchmarks/accelerator/run.py --stage 1 --budget 530   one stage, which ends within 530 seconds
    python benchmarks/accelerator/run.py --stage 1 --tiny         the same in small, on a CPU, to try it

Stage 1 checks numbers (tests/gpu), 2 times kernels, 3 LoRA and QLoRA of an 8B model beside peft, 4 decoding beside
transformers, 5 long rows and offloading; memory and time of 3 and 5 stand beside what `plan` says of them. Every
measurement is a process of its own. Its result is in results.json, and in table.md for people, before the next one
starts; a stage that ran out of time goes on where it stopped when it is called again. `--again` measures anew. Needs
Python 3.11 or later, JAX, torch, transformers, peft and pytest, and no network: wheels.py brings what is missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import signal
import subprocess
import sys
import time
from typing import Any

from tables import table
from wheels import PACKAGES

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MARGIN = 5.0  # seconds of a budget that are left for writing


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A command whose last line of output is its result as JSON; `least` are seconds below which it is not begun."""

    stage: int
    name: str
    command: tuple[str, ...]
    least: float = 60.0


def pytest_of(name: str, *selection: str, marks: str = "gpu", least: float = 60.0) -> Measurement:
    """Tests of tests/gpu."""
    return Measurement(1, name, (str(HERE / "check_numbers.py"), marks, *selection), least)


def measurements(tiny: bool) -> list[Measurement]:
    """All there is to measure, in order: of an 8B model, or a few in small."""
    return _tiny() if tiny else [*_numbers(), *_kernels(), *_tuning(), *_decoding(), *_long_rows()]


HOST = "compute.offload=[residual,optimizer,weights]"
TUNE, PEFT, DECODE = (str(HERE / name) for name in ("tune.py", "peft_side.py", "decode.py"))
KERNELS = str(ROOT / "benchmarks/gpu_kernels/run.py")
MODEL = ("--model", "8b")


def _tiny() -> list[Measurement]:
    model = ("--model", "tiny", "--rows", "2")
    step, prompt = (*model, "--length", "64", "--updates", "3"), (*model, "--length", "16", "--decode", "4")
    chunks = ("compute.attention_chunk=32", "compute.mlp_chunk=32", HOST, "compute.remat=full")
    quick = "not slow and not gpu and not deviceless"
    return [
        pytest_of("loss kernels", "tests/gpu/test_loss_kernels.py", marks=quick, least=0),
        Measurement(2, "attention, tiny", (KERNELS, "--tiny", "--shape", "tiny", "--json", "-"), 0),
        Measurement(3, "meshtune nf4", (TUNE, *step, "--quantize", "nf4"), 0),
        Measurement(3, "peft nf4", (PEFT, *step, "--quantize", "nf4"), 0),
        Measurement(4, "meshtune", (DECODE, *prompt), 0),
        Measurement(4, "transformers", (PEFT, *prompt), 0),
        Measurement(5, "chunks, offloaded", (TUNE, *step, "--set", *chunks), 0),
    ]


def _numbers() -> list[Measurement]:
    runs = ("lora", "full", "not lora and not full")
    by_precision = [
        (f"runs in {precision}: {cases}", f"{precision} and ({cases})")
        for precision in ("float32", "mixed")
        for cases in runs
    ]
    return [
        pytest_of("loss kernels", "tests/gpu/test_loss_kernels.py"),
        pytest_of("attention kernels", "tests/gpu/test_attention_kernels.py", least=120),
        pytest_of("quantised products", "tests/gpu/test_quantised_products.py"),
        pytest_of("memory", "tests/gpu/test_memory.py"),
        *(pytest_of(name, "tests/gpu/test_runs.py", "-k", words, least=300) for name, words in by_precision),
    ]


def _kernels() -> list[Measurement]:
    shapes = (
        "8B 4x4096",
        "8B 4x4096 packed",
        "8B 1x32768",
        "1B 8x4096, heads of 64",
        "9B 2x4096, heads of 256",
    )
    return [Measurement(2, f"attention, {shape}", (KERNELS, "--shape", shape, "--json", "-")) for shape in shapes]


def _tuning() -> list[Measurement]:
    step = (*MODEL, "--rows", "4", "--length", "4096", "--updates", "12")
    return [
        Measurement(3, "meshtune lora", (TUNE, *step), 120),
        Measurement(3, "peft lora", (PEFT, *step), 90),
        Measurement(3, "meshtune nf4", (TUNE, *step, "--quantize", "nf4"), 120),
        Measurement(3, "peft nf4", (PEFT, *step, "--quantize", "nf4"), 120),
        Measurement(3, "peft lora with liger", (PEFT, *step, "--liger"), 90),
    ]


def _decoding() -> list[Measurement]:
    prompt = (*MODEL, "--length", "512", "--decode", "128")
    return [
        *(
            Measurement(4, f"{side}, {rows} rows", (program, *prompt, "--rows", str(rows)), 90)
            for rows in (1, 16)
            for side, program in (("meshtune", DECODE), ("transformers", PEFT))
        ),
        Measurement(4, "meshtune nf4, 1 row", (DECODE, *prompt, "--rows", "1", "--quantize", "nf4"), 90),
    ]


def _long_rows() -> list[Measurement]:
    step = (TUNE, *MODEL, "--rows", "1", "--length", "32768", "--updates", "4", "--quantize", "nf4")
    return [
        Measurement(5, "rows of 32768, nf4", step, 120),
        Measurement(5, "rows of 32768, nf4, offloaded", (*step, "--set", HOST, "compute.remat=full"), 150),
    ]


class Results:
    """results.json and table.md in a folder, written anew after every measurement."""

    def __init__(self, folder: pathlib.Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._file, self._table = folder / "results.json", folder / "table.md"
        self.values: dict[str, Any] = json.loads(self._file.read_text()) if self._file.exists() else {}

    def result(self, measurement: Measurement) -> dict[str, Any] | None:
        """What is known of a measurement."""
        return self.values.get("measurements", {}).get(f"{measurement.stage}: {measurement.name}")

    def write(self, measurement: Measurement, result: dict[str, Any]) -> None:
        self.values.setdefault("machine", machine())
        self.values.setdefault("measurements", {})[f"{measurement.stage}: {measurement.name}"] = result
        draft = self._file.with_suffix(".partial")
        draft.write_text(json.dumps(self.values, indent=1) + "\n", encoding="utf-8")
        draft.replace(self._file)
        self._table.write_text(table(self.values), encoding="utf-8")


def machine() -> dict[str, Any]:
    """The accelerators as their driver names them, and what runs on them."""
    about: dict[str, Any] = {"python": platform.python_version(), "date": time.strftime("%Y-%m-%d"), "devices": []}
    for command in (
        ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"],
        ["rocm-smi", "--showproductname", "--csv"],
    ):
        try:
            process = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except FileNotFoundError:
            continue
        if process.returncode == 0:
            about["devices"] += [line.strip() for line in process.stdout.splitlines() if line.strip()]
    about["devices"] = about["devices"] or [f"CPU, {os.cpu_count()} cores"]
    return about


def measure(measurement: Measurement, seconds: float) -> dict[str, Any]:
    """The result of a command that is given so many seconds; {"failed": why} if there is none."""
    env = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    paths = [str(ROOT / "src"), str(PACKAGES), *filter(None, [env.get("PYTHONPATH")])]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    env["BUDGET_SECONDS"] = str(seconds)
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *measurement.command], cwd=ROOT, env=env, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with what it started: nothing may keep the device
        process.communicate()
        return {"failed": f"not done after {seconds:.0f} s", "wall_seconds": round(seconds, 1)}
    wall = round(time.monotonic() - start, 1)
    lines = [line for line in stdout.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        reason = (stderr.strip() or stdout.strip())[-2000:]
        return {"failed": reason or f"exit code {process.returncode}", "wall_seconds": wall}
    return json.loads(lines[-1]) | {"wall_seconds": wall}


def run_stage(stage: int, budget: float, results: Results, *, tiny: bool, again: bool) -> bool:
    """Measures what a stage still lacks while there is time; whether nothing is left to do."""
    end = time.monotonic() + budget - MARGIN
    complete = True
    for measurement in measurements(tiny):
        known = results.result(measurement)
        if measurement.stage != stage or (known is not None and "failed" not in known and not again):
            continue
        left = end - time.monotonic()
        if left < measurement.least:
            print(f"{measurement.name}: no time left in this budget; call the stage again")
            complete = False
            continue
        result = measure(measurement, left)
        results.write(measurement, result)
        outcome = result.get("failed", "done").strip().splitlines()[-1]
        print(f"{measurement.name}: {outcome} ({result['wall_seconds']} s)", flush=True)
    return complete


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=range(1, 6))
    parser.add_argument("--budget", type=float, default=530.0, help="seconds within which it ends")
    parser.add_argument("--to", type=pathlib.Path, default=HERE / "results", help="folder of results.json and table.md")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--again", action="store_true")
    args = parser.parse_args()
    results = Results(args.to)
    if args.stage is None:
        for measurement in measurements(args.tiny):
            known = results.result(measurement)
            state = "to do" if known is None else "failed" if "failed" in known else "done"
            print(f"{measurement.stage}  {measurement.name}: {state}")
        return 0
    complete = run_stage(args.stage, args.budget, results, tiny=args.tiny, again=args.again)
    print(table(results.values))
    return 0 if complete else 3


if __name__ == "__main__":
    sys.exit(main())
