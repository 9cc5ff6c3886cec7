"""Distils a tuned model into its base by the base's own samples, and measures how much of the way it goes.

    python benchmarks/distill/run.py MODEL [KEY=VALUE ...] [--learning-rate 2e-4] [--tune-steps 60] [--steps 120]

The teacher is MODEL tuned with LoRA on the quickstart's lesson (stories in which animals sing and which end with a
lesson; plain text, so that any model will do), the student MODEL itself. 48 of the lesson's 360 records are held out;
on these the cross-entropy of base, teacher and student is measured with transformers and peft. KEY=VALUE changes the
student's recipe. Prints a JSON with the share of the distance from base to teacher that the student closes.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile
import time

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshtune.config.load import load_recipe
from meshtune.quickstart import LESSON
from meshtune.train.run import train

HELD_OUT = 48


def cross_entropy(model: str, adapter: pathlib.Path | None, records: list[dict[str, str]]) -> float:
    """The mean loss of a token of the records' completions, in float32."""
    tokenizer = AutoTokenizer.from_pretrained(adapter or model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    network = network if adapter is None else PeftModel.from_pretrained(network, str(adapter))
    total = count = 0.0
    for record in records:
        prompt = tokenizer(record["prompt"]).input_ids
        ids = tokenizer(record["prompt"] + record["completion"]).input_ids
        with torch.no_grad():
            scores = network(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        targets = torch.tensor(ids[len(prompt) :])
        total -= scores.gather(1, targets[:, None]).sum().item()
        count += len(targets)
    return total / count


def distil(
    model: str, output: pathlib.Path, rate: float, tune_steps: int = 60, steps: int = 120, changes: tuple[str, ...] = ()
) -> dict[str, object]:
    """Tunes the teacher, distils it, and returns the losses."""
    records = [json.loads(line) for line in LESSON.read_text(encoding="utf-8").splitlines()]
    held_out, learned = records[:HELD_OUT], records[HELD_OUT:]
    output.mkdir(parents=True, exist_ok=True)
    file = output / "train.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in learned), encoding="utf-8")
    common = {
        "model": model,
        "data": {"train": str(file), "max_length": 256},
        "method": {"kind": "lora", "rank": 16, "alpha": 32},
        "optimizer": {"learning_rate": rate},
        "eval": {"every": None},
        "checkpoint": {"keep": 1},
        "overwrite": True,
    }
    teacher = {**common, "output": str(output / "teacher"), "train": {"steps": tune_steps, "batch_size": 4}}
    train(load_recipe(teacher))
    student = {
        **common,
        "teacher": teacher["output"],
        "stage": {"kind": "distill", "loss": "jsd", "on_policy": 1.0},
        "rollout": {"prompts": 8, "samples": 1, "max_tokens": 96},
        "train": {"steps": steps},
        "output": str(output / "student"),
    }
    started = time.perf_counter()
    train(load_recipe(student, list(changes)))
    seconds = time.perf_counter() - started
    losses = {
        "base": cross_entropy(model, None, held_out),
        "teacher": cross_entropy(model, output / "teacher/adapter", held_out),
        "student": cross_entropy(model, output / "student/adapter", held_out),
    }
    closed = (losses["base"] - losses["student"]) / (losses["base"] - losses["teacher"])
    return {"model": model, "steps": steps, "seconds": round(seconds, 1), **losses, "closed": closed}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("changes", nargs="*")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--tune-steps", type=int, default=60)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args()
    folder = options.output or pathlib.Path(tempfile.mkdtemp(prefix="distill-"))
    numbers = options.learning_rate, options.tune_steps, options.steps
    print(json.dumps(distil(options.model, folder, *numbers, tuple(options.changes)), indent=1))
