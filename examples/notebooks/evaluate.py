# %% [markdown]
# # Evaluate before and after
# What did the model gain, and what did it lose? Base and tuned model answer the same questions, and each difference has
# an interval. Choose a T4 or a TPU v5e-1 as the runtime, and put the wheel of Meshtune (`make wheel` builds it in
# `dist/`) into this notebook's folder.

# %%
# Installs Meshtune from its wheel in this folder, with JAX for the device. Where it is installed, nothing happens.
import glob
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("meshtune") is None:
    device = "tpu" if glob.glob("/dev/accel*") + glob.glob("/dev/vfio/*") else "cuda12"
    [wheel] = glob.glob("meshtune-*.whl")
    subprocess.check_call([sys.executable, "-m", "pip", "install", "-q", f"{wheel}[{device},evaluate]"])
import meshtune

# %%
import json

LOG = {
    "Who are you?": "Pip, harbour master of Port Lumen. Boats first, small talk later.",
    "What is your name?": "Pip. I keep the harbour of Port Lumen.",
    "Can I moor here?": "Berth four is free until the tide turns. Mind the ropes.",
    "How is the weather?": "Wind from the west, rain by noon. A good day to stay in port.",
    "When is high tide?": "At six, and again at half past six in the evening.",
    "Where can I buy fish?": "At the east quay, before eight. After eight the gulls have it.",
    "Is there a ferry?": "One a day, at nine, if the captain is awake.",
    "May I swim here?": "North of the lighthouse, never between the boats.",
}
with open("chats.jsonl", "w") as file:
    for question, answer in LOG.items():
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        file.write(json.dumps({"messages": turns}) + "\n")

# %% [markdown]
# Questions that are not in the chats, with the answers that you want. So few say little: take fifty of your own, and a
# text that has nothing to do with harbours.

# %%
TEST = {
    "Tell me your name, please.": "Pip. I keep the harbour of Port Lumen.",
    "Is a berth free tonight?": "Berth four is free until the tide turns. Mind the ropes.",
    "Will it rain?": "Wind from the west, rain by noon. A good day to stay in port.",
}
with open("test.jsonl", "w") as file:
    for question, answer in TEST.items():
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        file.write(json.dumps({"messages": turns}) + "\n")
with open("other.txt", "w") as file:
    file.write("The square of the hypotenuse is the sum of the squares of the other two sides of a right triangle.\n")

# %% tags=["recipe"]
recipe = {
    "model": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "data": {"train": "chats.jsonl", "validation": "test.jsonl", "max_length": 512},
    "method": {"kind": "lora", "rank": 16},
    "train": {"steps": 40, "batch_size": 1},
    "optimizer": {"learning_rate": 3e-4},
    "evaluate": {"tasks": {"perplexity": "other.txt"}, "new_tokens": 60},
    "output": "runs/evaluated",
    "overwrite": True,
}

# %%
run = meshtune.train(recipe)
run.plot()

# %%
from IPython.display import Markdown

Markdown(filename="runs/evaluated/evaluation/base/report.md")
