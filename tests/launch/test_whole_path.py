"""A model of 1.5 billion parameters (24 layers, bfloat16, 2.8 GiB) from loading to export, sharded over processes.

Load on 4 processes x 2 devices, update, save, lose a process, resume on 2 x 2, finish, export, reload in transformers.
Measured on two busy cores: 9 minutes; at most 2.45 GiB in each of four processes and 3.25 GiB in each of two:
0.70 and 1.39 GiB of that are the model, about 0.9 GiB Python with its libraries, and the rest gathered layers and
activations.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from real_runs import environment, order, rows, start_launch, updates, wait_until, write_stories

from weights.load_job import write_model

LESSON = pathlib.Path(__file__).parents[2] / "src/meshtune/quickstart/model"
GIB = 1 << 30
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8192,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def norms_are_ones(folder: pathlib.Path) -> None:
    """Sets all norms to 1: random norms of about 0.02 would make every layer nearly zero."""
    for file in folder.glob("*.safetensors"):
        with file.open("r+b") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
            for name, entry in header.items():
                if name.endswith("norm.weight"):
                    stream.seek(8 + length + entry["data_offsets"][0])
                    stream.write(struct.pack("<H", 0x3F80) * entry["shape"][0])  # 1.0 in bfloat16


@pytest.fixture
def model(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """2.8 GiB in four files; removed at the end."""
    if shutil.disk_usage(tmp_path).free < 8 * GIB:
        pytest.skip("needs 8 GiB of disk")
    if psutil.virtual_memory().available < 13 * GIB:
        pytest.skip("needs 13 GiB of memory")
    folder = tmp_path / "model"
    try:
        size = write_model(folder, MODEL, 4)
        assert 1.45e9 < size / 2 < 1.55e9
        norms_are_ones(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(LESSON / name, folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_sharded_model_is_loaded_trained_resumed_and_exported(model: pathlib.Path, tmp_path: pathlib.Path):
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    write_stories(tmp_path / "stories.jsonl", 64, (4, 8))
    run, path = tmp_path / "run", tmp_path / "recipe.yaml"
    recipe = {
        "model": str(model),
        "data": {"train": str(tmp_path / "stories.jsonl"), "max_length": 32},
        "method": {"kind": "lora", "rank": 8},
        "train": {"steps": 3, "batch_size": 8},
        "optimizer": {"learning_rate": 1e-3},
        "compute": {"precision": "mixed"},
        "checkpoint": {"every": 1},
        "log": {"plot_every": 1000},
        "output": str(run),
    }
    path.write_text(json.dumps(recipe))
    started = time.monotonic()
    with start_launch(path, 4, 2, "mesh.fsdp=8") as first:
        try:
            wait_until(
                lambda: len(rows(run)) >= 2 and (run / "checkpoints/2").exists(),
                lambda: first.launcher.poll() is None,
                1500,
            )
        except AssertionError:
            pytest.fail(first.screen.read_text()[-6000:])
        first.members()[3].kill()
        code, output = first.ends(60)
    report("4 processes x 2 devices, killed after update 2", started, first.peaks)
    assert code == 75, output[-3000:]
    assert "process 3 of 4 was ended by SIGKILL" in output
    assert len(updates(run)) == 2
    before = order(updates(run))
    started = time.monotonic()
    with start_launch(path, 2, 2, "--resume", "mesh.fsdp=4") as second:
        code, output = second.ends(1500)
    report("2 processes x 2 devices, resumed and exported", started, second.peaks)
    assert code == 0, output[-6000:]
    assert "resuming after update 2" in output
    assert len(updates(run)) == 3
    assert order(updates(run))[:2] == before
    # A process holds its devices' share of the model. The rest is the interpreter, JAX and its compiler, the current
    # layer (gathered on each device, and in float32 inside the CPU's matmuls) and its activations.
    for processes, job in ((4, first), (2, second)):
        assert sorted(job.peaks) == list(range(processes))
        for number, peak in job.peaks.items():
            assert size / processes < peak < size / processes + 2 * GIB, f"process {number} of {processes}: {peak}"
    assert max(first.peaks.values()) < size, "no process of four holds the whole model"
    check_in_peft(model, run, tmp_path)


def check_in_peft(model: pathlib.Path, run: pathlib.Path, folder: pathlib.Path) -> None:
    """peft with transformers computes the logits that Meshtune computes, and the adapter changes them."""
    program = pathlib.Path(__file__).with_name("whole_path_logits.py")
    logits = {}
    for kind in ("meshtune", "peft", "base"):
        started, out = time.monotonic(), folder / f"{kind}.npy"
        command = [sys.executable, program, kind, model, run / "adapter", out]
        env = environment(folder / "cache") | {"OMP_NUM_THREADS": "2"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-4000:]
        logits[kind] = np.load(out)
        print(f"logits of {kind}: {time.monotonic() - started:.0f} s")
    largest = np.abs(logits["peft"]).max()
    difference = np.abs(logits["meshtune"] - logits["peft"]).max() / largest
    change = np.abs(logits["peft"] - logits["base"]).max() / largest
    print(
        f"largest logit {largest:.3f}; relative to it, difference {difference:.1e}, change by the adapter {change:.1e}"
    )
    # Float32 through 24 layers, in two implementations.
    assert difference < 1e-4
    assert change > 100 * difference
    assert change > 1e-2


def report(phase: str, started: float, peaks: dict[int, int]) -> None:
    sizes = ", ".join(f"{number}: {peak / GIB:.2f}" for number, peak in sorted(peaks.items()))
    print(f"{phase}: {time.monotonic() - started:.0f} s; peak GiB of each process {sizes}")
