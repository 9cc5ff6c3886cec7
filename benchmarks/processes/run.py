"""What more processes cost: the same run on four simulated devices held by 1, 2 and 4 processes.

python benchmarks/processes/run.py [--rounds 3] > benchmarks/processes/result.json

A random Llama of 9M parameters, LoRA, fsdp=4, started by `meshtune launch local`; each line of metrics.jsonl gives the
seconds of an update. The cases are run in turn, round after round.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

CASES = {1: 4, 2: 2, 4: 1}  # processes: devices of each
STEPS, FIRST = 12, 4  # the first updates warm up
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as scratch:
        recipe = written(pathlib.Path(scratch))
        found: dict[int, list[dict[str, float]]] = {processes: [] for processes in CASES}
        for number in range(rounds):
            for processes, devices in CASES.items():
                found[processes].append(measured(recipe, processes, devices, number))
                print(processes, found[processes][-1], os.getloadavg()[0], file=sys.stderr, flush=True)
    medians = {
        processes: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for processes, runs in found.items()
    }
    alone = medians[1]["step_seconds"]
    for facts in medians.values():
        facts["steps_against_one_process"] = facts["step_seconds"] / alone
    print(json.dumps({"rounds": rounds, "cores": os.cpu_count(), "processes": medians, "runs": found}, indent=2))


def written(folder: pathlib.Path) -> pathlib.Path:
    """The recipe, beside the model and the data it names."""
    import numpy as np
    from safetensors.numpy import save_file

    from meshtune.families import model_spec
    from meshtune.families import tensors as table_of
    from meshtune.quickstart import MODEL

    model, made = folder / "model", np.random.default_rng(0)
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    spec = model_spec(CONFIG, "float32")
    tensors = {entry.name: 0.02 * made.standard_normal(entry.view.tensor, np.float32) for entry in table_of(spec)}
    save_file(tensors, model / "model.safetensors")
    texts = [{"text": "Once upon a time there was a little dog. " * 20} for _ in range(256)]
    (folder / "texts.json").write_text(json.dumps(texts))
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        json.dumps(
            {
                "model": {"path": str(model), "tokenizer": str(MODEL)},
                "method": {"kind": "lora", "rank": 8},
                "data": {"train": str(folder / "texts.json"), "max_length": 256},
                "train": {"steps": STEPS, "batch_size": 8},
                "mesh": {"fsdp": 4},
                "checkpoint": {"every": STEPS},
                "output": str(folder / "run"),
            }
        )
    )
    return recipe


def measured(recipe: pathlib.Path, processes: int, devices: int, number: int) -> dict[str, float]:
    """Median seconds of an update after the first ones, and of the whole command."""
    output = recipe.parent / f"run-{processes}-{number}"
    command = [sys.executable, "-m", "meshtune", "launch", "local", "-n", str(processes), "-d", str(devices)]
    began = time.monotonic()
    subprocess.run([*command, str(recipe), f"output={output}"], check=True, stdout=sys.stderr, env=os.environ)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["seconds"] for line in lines if "loss" in line][FIRST:]
    return {"step_seconds": statistics.median(seconds), "whole_seconds": time.monotonic() - began}


if __name__ == "__main__":
    main()
