"""LoRA and QLoRA of an 8B model on one GPU: Meshtune beside transformers with peft, and beside what plan foretold.

    python benchmarks/gpu_lora/run.py [--model 8b] [--json result.json]       one call, on a machine with a GPU
    python benchmarks/gpu_lora/run.py --model tiny --length 256 --updates 4   the same on a CPU, to try the script

Each arm is a process of its own, in turn, round after round: `meshtune train` on packed texts as a user runs it, and
peft_side.py on as many rows of as many tokens. Reported of each: tokens a second and MFU of the median update after the
first ones, and the peak of device memory. MFU counts model FLOPs without recomputation: 4 a parameter and token for
LoRA, and causal attention at half the square (forward and twice that backward).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from case import MODELS, write_model, write_texts

HERE = pathlib.Path(__file__).resolve().parent
RANK = 16
FIRST = 3  # updates that warm up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--peak", type=float, help="bf16 FLOPs a second of the device; default: by its name")
    parser.add_argument("--arms", default="", help="comma-separated, such as meshtune-lora,peft-lora")
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    arms = given.arms.split(",") if given.arms else arms_here()
    with tempfile.TemporaryDirectory() as scratch:
        work = pathlib.Path(scratch)
        write_model(given.model, work / "model", "bfloat16" if has_gpu() else "float32")
        write_texts(work / "texts.jsonl", given.rows * given.length * (given.updates + 2) // 250)
        found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
        for number in range(given.rounds):
            for arm in arms:
                side, method = arm.split("-", 1)
                found[arm].append({"meshtune": meshtune, "peft": peft}[side](method, work, given, number))
                print(arm, json.dumps(found[arm][-1]), file=sys.stderr, flush=True)
    result = {"case": {k: v for k, v in vars(given).items() if k != "json"}, "device": device_name()}
    result |= {"arms": summary(found, given), "runs": found, "when": time.strftime("%Y-%m-%d")}
    text = json.dumps(result, indent=2, default=str)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")


def arms_here() -> list[str]:
    """Every arm that the installed packages allow; peft's are as good as they get here."""
    arms = ["meshtune-lora", "peft-lora"]
    if importlib.util.find_spec("liger_kernel"):
        arms.append("peft-lora-liger")
    arms.append("meshtune-nf4")
    if has_gpu() and importlib.util.find_spec("bitsandbytes"):
        arms.append("peft-nf4")
    return arms


def meshtune(method: str, work: pathlib.Path, given: argparse.Namespace, number: int) -> dict[str, Any]:
    """One `meshtune train`; its metrics and what it says of predicted and measured memory are read from its output."""
    output = work / f"meshtune-{method}-{number}"
    settings = [
        f"model={work / 'model'}",
        f"data.train={work / 'texts.jsonl'}",
        f"data.max_length={given.length}",
        f"train.batch_size={given.rows}",
        f"train.steps={given.updates}",
        "method.kind=lora",
        f"method.rank={RANK}",
        f"method.alpha={2 * RANK}",
        f"checkpoint.every={given.updates}",
        "log.every=1",
        f"output={output}",
        *(["quantize=nf4"] if method == "nf4" else []),
    ]
    done = subprocess.run([sys.executable, "-m", "meshtune", "train", *settings], text=True, capture_output=True)
    if done.returncode:
        return {"failed": (done.stdout + done.stderr)[-1500:]}
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "train"]
    found = {
        "seconds": [row["seconds"] for row in rows],
        "tokens": statistics.mean(row["tokens"] for row in rows),
        "loss": rows[-1]["loss"],
        "peak_bytes": max(row.get("machine", {}).get("device0_peak_memory", row["memory"]) for row in rows),
        "said": [line for line in done.stdout.splitlines() if "compiled" in line or "predicted" in line],
    }
    about = json.loads((output / "run.json").read_text())
    return found | ({"prediction": about["prediction"]} if "prediction" in about else {})


def peft(method: str, work: pathlib.Path, given: argparse.Namespace, _number: int) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "peft_side.py"), str(work / "model")]
    command += ["--rows", str(given.rows), "--length", str(given.length), "--updates", str(given.updates)]
    command += ["--rank", str(RANK), "--quantize", "nf4" if method == "nf4" else "none"]
    command += ["--liger"] if method.endswith("liger") else []
    done = subprocess.run(command, text=True, capture_output=True)
    if done.returncode:
        return {"failed": (done.stdout + done.stderr)[-1500:]}
    return json.loads(done.stdout.splitlines()[-1]) | {"tokens": given.rows * given.length}


def summary(found: dict[str, list[dict[str, Any]]], given: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds of each arm that ran, and Meshtune against peft."""
    flops, peak = flops_a_token(MODELS[given.model], given.length), given.peak or peak_flops(device_name())
    arms: dict[str, Any] = {}
    for arm, runs in found.items():
        good = [run for run in runs if "failed" not in run]
        if not good:
            arms[arm] = {"failed": runs[-1]["failed"]}
            continue
        speed = statistics.median(run["tokens"] / statistics.median(run["seconds"][FIRST:]) for run in good)
        arms[arm] = {"tokens_per_second": round(speed, 1), "peak_bytes": good[-1]["peak_bytes"]}
        if peak:
            arms[arm]["mfu"] = round(speed * flops / peak, 4)
    for ours, theirs in (
        ("meshtune-lora", "peft-lora"),
        ("meshtune-lora", "peft-lora-liger"),
        ("meshtune-nf4", "peft-nf4"),
    ):
        if all("tokens_per_second" in arms.get(arm, {}) for arm in (ours, theirs)):
            arms[ours][f"against {theirs}"] = round(
                arms[ours]["tokens_per_second"] / arms[theirs]["tokens_per_second"], 3
            )
    return arms


def flops_a_token(model: dict[str, Any], length: int) -> float:
    """Model FLOPs a token of LoRA (benchmarks/README.md's convention)."""
    D, F, V, L = (model[key] for key in ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers"))
    heads, kv = (model[key] * model["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    weights = L * (2 * D * heads + 2 * D * kv + 3 * D * F) + D * V
    attention = 3 * 4 * L * heads * length / 2  # scores and values, forward once and backward twice
    return 4 * weights + attention


def peak_flops(name: str) -> float | None:
    """From plan's table of devices, the first whose name is in the device's."""
    from meshtune.plan.hardware import known_devices

    squeezed = name.replace(" ", "").replace("-", "").lower()
    for device in known_devices().values():
        if device.name.replace("-", "").lower() in squeezed:
            return getattr(device, "flops_bf16", None)
    return None


def has_gpu() -> bool:
    return device_name() != "cpu"


def device_name() -> str:
    """The GPU as nvidia-smi or rocm-smi name it, or cpu. JAX and torch are left to the arms: they take the memory."""
    for command in (
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
        ["rocm-smi", "--showproductname", "--csv"],
    ):
        try:
            said = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except FileNotFoundError:
            continue
        if said.returncode == 0 and said.stdout.strip():
            return said.stdout.strip().splitlines()[-1]
    return "cpu"


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
