"""Bytes that each of two processes with dp=2 reads from files, in a real run: at its start, and as it is resumed.

    python benchmarks/loading/replicas.py STORIES260K > benchmarks/loading/replicas.json

STORIES260K is a model directory whose tokenizer is used. Full tuning of a random Llama, once with `model.load: direct`
and once with `replica`. The figures are the kernel's, `rchar` of /proc/PID/io: all bytes of read(2) and its relatives,
Python's own modules included, those of pages that were in the cache too. The last look at a process is some
hundredths of a second before its end.
"""

from __future__ import annotations

import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from typing import Any

import psutil

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from weights.load_job import write_model  # noqa: E402

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32768,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def bytes_read(command: list[str]) -> list[int]:
    """Runs `meshtune launch local -n 2 -d 1`; the bytes that each process has read."""
    line = [sys.executable, "-m", "meshtune", "launch", "local", "-n", "2", "-d", "1", *command]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false", "PYTHONUNBUFFERED": "1"}
    launcher = subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    workers: dict[int, int] = {}  # the process of each number
    read = [0, 0]
    while launcher.poll() is None:
        for child in psutil.Process(launcher.pid).children() if len(workers) < 2 else ():
            try:
                workers[int(child.environ()["MESHTUNE_PROCESS"])] = child.pid
            except (psutil.Error, KeyError):  # not yet the process that it was forked for
                continue
        for number, pid in workers.items():
            try:
                fields = pathlib.Path(f"/proc/{pid}/io").read_text().split()
                read[number] = int(fields[1])
            except (OSError, IndexError):  # it has ended
                continue
        time.sleep(0.01)
    assert launcher.stdout is not None
    output = launcher.stdout.read()
    assert launcher.returncode == 0, output[-3000:]
    print("\n".join(text for text in output.splitlines() if text.startswith(("loaded", "resuming"))), file=sys.stderr)
    return read


def main() -> None:
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        size = write_model(folder / "model", MODEL, 2)
        for file in pathlib.Path(sys.argv[1]).glob("*token*"):
            shutil.copy(file, folder / "model")
        texts = [{"text": f"Once upon a time there were {number} trees."} for number in range(16)]
        (folder / "data.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
        fields = {
            "model": str(folder / "model"),
            "data": {"train": str(folder / "data.jsonl"), "max_length": 32},
            "method": "full",
            "train": {"steps": 2, "batch_size": 2},
            "mesh": {"dp": 2},
            "sample": {"prompts": []},
        }
        (folder / "recipe.json").write_text(json.dumps(fields))
        for load in ("direct", "replica"):
            output = folder / load
            command = [str(folder / "recipe.json"), f"model.load={load}", f"output={output}"]
            started = bytes_read([*command, "train.steps=1"])
            saved = sum(file.stat().st_size for file in output.glob("checkpoints/1/**/*") if file.is_file())
            resumed = bytes_read([*command, "resume=true", "accept_changes=true"])
            runs.append({"load": load, "started": started, "resumed": resumed, "checkpoint": saved})
            shutil.rmtree(output)
    about = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("jax", "jaxlib", "numpy")},
    }
    print(json.dumps({"about": about, "model_bytes": size, "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
