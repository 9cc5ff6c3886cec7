"""Rollouts and updates of GRPO beside transformers and trl, in processor seconds.

    python benchmarks/rl/run.py MODEL [--rounds 3] [--updates 3] [--json result.json]

MODEL is SmolLM2-135M-Instruct as a Hugging Face directory. `generate`: 4 prompts of about 45 tokens, 8 completions of
16 tokens each, temperature 1, float32, nothing stops them. `update`: what `meshtune train` and trl's GRPOTrainer
take for a rollout of 4 x 8 completions of at most 12 tokens with its update: LoRA of rank 16 on all linear layers, the
same prompts, reward and learning rate. Every measurement is a process of its own; the two sides take turns.
Processor seconds are those of the process with its threads, after the first call or update.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

PROMPTS, SAMPLES = 4, 8
QUESTION = "What is {} + {}? Answer with the number only."
PAIRS = [(3, 4), (7, 8), (2, 9), (6, 5), (1, 8), (4, 4), (9, 3), (5, 2)]
REWARD = "def letters(completions, **columns):\n    return [c[0]['content'].count('e') / 10 for c in completions]\n"
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def conversations() -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": QUESTION.format(*pair)}] for pair in PAIRS]


def generate_ours(model: pathlib.Path, rounds: int) -> dict[str, object]:
    from transformers import AutoTokenizer

    from meshtune.config.sections import RolloutSection
    from meshtune.generate import programs
    from meshtune.model.compute import Compute
    from meshtune.rollout.generate import generate, sample_seed
    from meshtune.weights.load import load_params, load_spec

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [
        tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=True, return_dict=False)
        for c in conversations()[:PROMPTS]
    ]
    spec, _ = load_spec(model, "float32")
    params, section = load_params(model, spec), RolloutSection(max_tokens=16)
    computed, read = [], programs.read

    def counting(*arguments, **options):
        computed.append(int(options["count"].sum()))
        return read(*arguments, **options)

    programs.read = counting
    results = []
    for number in range(rounds + 1):
        computed.clear()
        start = time.process_time()
        groups = generate(
            params, spec, Compute(), prompts, SAMPLES, section, frozenset(),
            lambda prompt, sample, number=number: sample_seed(number, 0, prompt, sample), [""] * PROMPTS,
        )  # fmt: skip
        tokens = sum(len(completion.ids) for group in groups for completion in group)
        results.append(tokens / (time.process_time() - start))
    sent = SAMPLES * sum(map(len, prompts))
    return {"tokens_per_second": results[1:], "prompt_tokens_sent": sent, "prompt_tokens_computed": sum(computed)}


def generate_transformers(model: pathlib.Path, rounds: int) -> dict[str, object]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    texts = [
        tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=False) for c in conversations()[:PROMPTS]
    ]
    inputs = tokenizer([text for text in texts for _ in range(SAMPLES)], padding=True, return_tensors="pt")
    results = []
    for _ in range(rounds + 1):
        start = time.process_time()
        with torch.no_grad():
            network.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=16, min_new_tokens=16)
        results.append(PROMPTS * SAMPLES * 16 / (time.process_time() - start))
    return {"tokens_per_second": results[1:]}


def update_ours(model: pathlib.Path, updates: int) -> dict[str, object]:
    from meshtune.config.load import load_recipe
    from meshtune.train.report import metrics_log
    from meshtune.train.run import train

    at, row = [], metrics_log.train_row
    metrics_log.train_row = lambda event: at.append(time.process_time()) or row(event)
    with tempfile.TemporaryDirectory() as folder:
        data, reward = pathlib.Path(folder, "data.jsonl"), pathlib.Path(folder, "reward.py")
        data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in conversations()))
        reward.write_text(REWARD)
        train(
            load_recipe(
                {
                    "model": str(model),
                    "data": {"train": str(data), "max_length": 160},
                    "stage": "grpo",
                    "rollout": {"prompts": PROMPTS, "samples": SAMPLES, "max_tokens": 12},
                    "rewards": [f"{reward}:letters"],
                    "method": {"kind": "lora", "rank": 16},
                    "optimizer": {"learning_rate": 2e-4, "warmup_steps": 0, "schedule": "constant"},
                    "train": {"steps": updates + 1, "micro_batch": 4},
                    "output": f"{folder}/run",
                }
            )
        )
    return {"seconds": [after - before for before, after in itertools.pairwise(at)]}


def update_trl(model: pathlib.Path, updates: int) -> dict[str, object]:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    at = []

    class Clock(TrainerCallback):
        def on_step_end(self, *arguments, **options):
            at.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        namespace: dict = {}
        exec(REWARD, namespace)
        trainer = GRPOTrainer(
            model=str(model),
            reward_funcs=namespace["letters"],
            args=GRPOConfig(
                output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
                per_device_train_batch_size=PROMPTS * SAMPLES, num_generations=SAMPLES, max_completion_length=12,
                learning_rate=2e-4, lr_scheduler_type="constant", max_steps=updates + 1, save_strategy="no",
                model_init_kwargs={"dtype": torch.float32}, disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in conversations()]),
            peft_config=LoraConfig(r=16, lora_alpha=16, target_modules=LINEAR, task_type="CAUSAL_LM"),
            callbacks=[Clock()],
        )  # fmt: skip
        trainer.train()
    return {"seconds": [after - before for before, after in itertools.pairwise(at)]}


SIDES = {
    "generate": {"ours": generate_ours, "transformers": generate_transformers},
    "update": {"ours": update_ours, "trl": update_trl},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--json")
    parser.add_argument("--side", nargs=2)
    options = parser.parse_args()
    if options.side:
        task, side = options.side
        result = SIDES[task][side](options.model, options.updates)
        print("RESULT " + json.dumps(result))
        return
    record: dict[str, object] = {"load": os.getloadavg()[0]}
    for task, sides in SIDES.items():
        figures: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(options.rounds):
            for side in sides:
                command = [sys.executable, __file__, str(options.model), "--updates", str(options.updates)]
                done = subprocess.run([*command, "--side", task, side], capture_output=True, text=True)
                line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
                assert line is not None, done.stderr[-3000:]
                result = json.loads(line.removeprefix("RESULT "))
                figures[side] += result.get("tokens_per_second") or result["seconds"]
                record |= {key: value for key, value in result.items() if key.startswith("prompt_tokens")}
        first, second = (statistics.median(figures[side]) for side in sides)
        record[task] = {side: statistics.median(values) for side, values in figures.items()} | {"ratio": first / second}
    print(json.dumps(record, indent=1))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
