# %% [markdown]
# # GRPO: learning from rewards
# A small model learns to add: it answers each question several times, and right answers become likelier. Choose a T4 or
# a TPU v5e-1 as the runtime, and put the wheel of Meshtune (`make wheel` builds it in `dist/`) into this notebook's
# folder.

# %%
# Installs Meshtune from its wheel in this folder, with JAX for the device. Where it is installed, nothing happens.
import glob
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("meshtune") is None:
    device = "tpu" if glob.glob("/dev/accel*") + glob.glob("/dev/vfio/*") else "cuda12"
    [wheel] = glob.glob("meshtune-*.whl")
    subprocess.check_call([sys.executable, "-m", "pip", "install", "-q", f"{wheel}[{device}]"])
import meshtune

# %%
import itertools
import json

names = ("sums.jsonl", "held-out.jsonl")
files = [open(name, "w") for name in names]
for number, (a, b) in enumerate(itertools.product(range(1, 10), repeat=2)):
    question = f"What is {a} + {b}? Answer with the number only."
    record = {"prompt": [{"role": "user", "content": question}], "answer": a + b}
    files[number % 5 == 0].write(json.dumps(record) + "\n")
for file in files:
    file.close()

# %% [markdown]
# The reward `equals` is 1 where the last number of an answer is the record's `answer`. A function of yours, as TRL
# takes them, works as well: `"rewards": "reward.py:name"`.

# %% tags=["recipe"]
recipe = {
    "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "stage": "grpo",
    "data": {"train": "sums.jsonl", "validation": "held-out.jsonl", "max_length": 192},
    "rollout": {"prompts": 4, "samples": 8, "max_tokens": 12, "eval_samples": 4},
    "rewards": [{"equals": "answer"}],
    "method": {"kind": "lora", "rank": 16},
    "train": {"steps": 40},
    "eval": {"every": 20, "at_start": True},
    "optimizer": {"learning_rate": 2e-4, "schedule": "constant", "warmup_steps": 0},
    "output": "runs/grpo",
    "overwrite": True,
}

# %%
run = meshtune.train(recipe)
run

# %%
run.plot("reward")

# %%
run.report

# %%
chat = run.chat(max_tokens=12)
chat.send("What is 4 + 7? Answer with the number only.")
chat
