# %% [markdown]
# # Your own chats
# A chat model of 1.7 billion parameters learns to speak as your chats do. Choose a T4 or a TPU v5e-1 as the runtime,
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
# Put your own `chats.jsonl` in its place: one conversation a line. Fifty good ones already change how a model speaks.

# %% tags=["recipe"]
recipe = {
    "model": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "data": {"train": "chats.jsonl", "max_length": 512},
    "method": {"kind": "lora", "rank": 16},
    "train": {"steps": 40, "batch_size": 1},
    "optimizer": {"learning_rate": 3e-4},
    "sample": {"prompts": ["Who are you?", "May I moor my boat tonight?"], "every": 20, "max_tokens": 60},
    "output": "runs/chats",
    "overwrite": True,
}

# %%
run = meshtune.train(recipe)
run.plot()

# %%
run.samples

# %%
chat = run.chat(max_tokens=80, temperature=0.7)
chat.send("Good morning! Is there room for a small boat?")
chat.send("And where do I eat?")
chat

# %% [markdown]
# `run.path` is the adapter: download its folder, or keep it with `!meshtune export runs/chats --to merged --merge`.
