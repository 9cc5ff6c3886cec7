"""Loading a random 1.5B model in bfloat16: Meshtune in 1, 2 and 4 processes, and transformers in one.

    python benchmarks/loading/run.py [--folder /tmp/loading] [--rounds 3] [--json result.json]

Writes the model (3 GB) to the folder and removes it. Every load is a process, or several, of its own, started through
a shell, so that the kernel's figure for peak memory is its own; the kinds take turns. The files are in the page cache.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import time
from importlib import metadata
from typing import Any

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from weights.load_job import SHELL, job, write_model  # noqa: E402

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
THEIRS = """
import json, resource, sys, time
import torch, transformers
from transformers import AutoModelForCausalLM

def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

from transformers.models.llama import modeling_llama
before, began = status("VmRSS"), time.monotonic()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
ready = time.monotonic() - began
# Pages that are only mapped have not been read: touch one number of each, as the first step would. In slices, which
# take no memory of their own.
total = sum(int(p.detach().view(torch.int16).flatten()[::2048].max()) for p in model.parameters())
print(json.dumps({
    "before": before,
    "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "local": sum(p.nbytes for p in model.parameters()),
    "seconds": ready,
    "touched": time.monotonic() - began,
}))
"""


def theirs(folder: pathlib.Path) -> list[dict[str, Any]]:
    command = [*SHELL, sys.executable, "-c", THEIRS, str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(ran.stdout.splitlines()[-1])]


def ours(folder: pathlib.Path, processes: int, **order: Any) -> list[dict[str, Any]]:
    said = job(folder, processes, {"fsdp": processes}, timeout=600, **order)
    return [one | {"seconds": one["report"]["seconds"], "read": one["report"]["read"]} for one in said]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("/tmp/loading"))
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--json", type=pathlib.Path)
    options.add_argument("--keep", action="store_true", help="leave the model in the folder")
    asked = options.parse_args()
    if shutil.disk_usage(asked.folder.parent).free < 6 << 30:
        sys.exit(f"{asked.folder.parent} has less than 6 GiB left")
    kinds = {
        "meshtune, 1 process": lambda: ours(asked.folder, 1),
        "transformers": lambda: theirs(asked.folder),
        "meshtune, 2 processes": lambda: ours(asked.folder, 2),
        "meshtune, 4 processes": lambda: ours(asked.folder, 4),
        "meshtune, 4 processes, broadcast": lambda: ours(asked.folder, 4, broadcast=True),
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in kinds}
    try:
        size = write_model(asked.folder, MODEL, 4)
        for number in range(asked.rounds):
            for name, load in kinds.items():
                at = time.monotonic()
                said = load()
                found[name].append({"load": os.getloadavg()[0], "wall": time.monotonic() - at, "processes": said})
                print(number, name, f"{max(one['seconds'] for one in said):.1f} s", flush=True)
    finally:
        if not asked.keep:
            shutil.rmtree(asked.folder, ignore_errors=True)
    print(f"\nmodel: {size / 2**20:,.0f} MiB of tensors\n")
    print("| | seconds (median, best) | read, MiB a process | peak over start, MiB | and beyond the parameters, MiB |")
    print("| --- | --- | --- | --- | --- |")
    for name, rounds in found.items():
        seconds = [max(one["seconds"] for one in each["processes"]) for each in rounds]
        every = [one for each in rounds for one in each["processes"]]
        read = sorted({one["read"] >> 20 for one in every if "read" in one}) or ["(mapped)"]
        peak = max(one["peak"] - one["before"] for one in every) >> 20
        beyond = max(one["peak"] - one["before"] - one["local"] for one in every) >> 20
        touched = [
            max(one["touched"] for one in each["processes"]) for each in rounds if "touched" in each["processes"][0]
        ]
        times = f"{statistics.median(seconds):.1f}, {min(seconds):.1f}"
        times += f"; {statistics.median(touched):.1f}, {min(touched):.1f} with all pages touched" if touched else ""
        print(f"| {name} | {times} | {' or '.join(map(str, read))} | {peak:,} | {beyond:,} |")
    if asked.json:
        about = {
            "date": datetime.date.today().isoformat(),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            **{name: metadata.version(name) for name in ("jax", "transformers", "torch", "safetensors")},
        }
        for each in (each for rounds in found.values() for each in rounds):
            for one in each["processes"]:
                one.pop("line", None)
                one.pop("report", None)
        asked.json.write_text(json.dumps({"about": about, "model_bytes": size, "runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
