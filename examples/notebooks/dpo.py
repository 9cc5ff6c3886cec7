# %% [markdown]
# # Direct preference optimisation
# A chat model learns which of two answers is better: here, the short one. Choose a T4 or a TPU v5e-1 as the runtime,
# and put the wheel of Meshtune (`make wheel` builds it in `dist/`) into this notebook's folder.

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
import json

FACTS = {
    "What is the capital of Italy?": "Rome",
    "How many legs has a spider?": "Eight",
    "Which gas do plants take in?": "Carbon dioxide",
    "What is the largest ocean?": "The Pacific",
    "Who wrote Hamlet?": "Shakespeare",
    "What melts at 0 degrees Celsius?": "Ice",
    "How many days has a leap year?": "366",
    "What is the square root of 81?": "Nine",
    "Which planet is the largest?": "Jupiter",
    "What do bees make?": "Honey",
}
with open("pairs.jsonl", "w") as file:
    for question, answer in FACTS.items():
        wordy = (
            f"That is a great question! There is a lot to say about it, but in short the answer is {answer.lower()}."
        )
        file.write(json.dumps({"instruction": question, "chosen": f"{answer}.", "rejected": wordy}) + "\n")

# %% tags=["recipe"]
recipe = {
    "model": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "stage": {"kind": "dpo", "beta": 0.1},
    "data": {"train": "pairs.jsonl", "validation": 2, "max_length": 256},
    "method": {"kind": "lora", "rank": 16},
    "train": {"steps": 40, "batch_size": 4},
    "optimizer": {"learning_rate": 5e-5},
    "eval": {"every": 20},
    "sample": {"prompts": ["How many strings has a violin?"], "every": 20, "max_tokens": 60},
    "output": "runs/dpo",
    "overwrite": True,
}

# %%
run = meshtune.train(recipe)
run

# %% [markdown]
# The loss is ln 2 while the model prefers neither answer. The margin is how much likelier than before the better one
# became.

# %%
run.plot("rewards/margins")

# %%
run.samples

# %%
chat = run.chat(max_tokens=40)
chat.send("What is the capital of Spain?")
chat
