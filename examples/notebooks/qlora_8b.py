# %% [markdown]
# # QLoRA of an 8B model on one free GPU or TPU
# The base is held in 4 bits (nf4), adapters are trained over it. A T4 has no bfloat16: there Meshtune computes in
# float16 with a scaled loss. The download has 16 GB. Choose a T4 or a TPU v5e-1 as the runtime, and put the wheel of
# Meshtune (`make wheel` builds it in `dist/`) into this notebook's folder.

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

# %% tags=["recipe"]
recipe = {
    "model": "Qwen/Qwen3-8B",
    "quantize": "nf4",
    "data": {"train": "chats.jsonl", "max_length": 1024},
    "method": {"kind": "lora", "rank": 16, "alpha": 32},
    "train": {"steps": 30, "batch_size": 1},
    "optimizer": {"learning_rate": 2e-4},
    "compute": {"remat": "full"},
    "sample": {"prompts": ["Who are you?"], "every": 30, "max_tokens": 60},
    "output": "runs/qlora-8b",
    "overwrite": True,
}

# %%
run = meshtune.train(recipe)
run

# %%
run.plot()

# %%
run.samples

# %% [markdown]
# The tuned model stays in 4 bits while it answers.

# %%
chat = run.chat(max_tokens=80)
chat.send("Is there room for a small boat?")
chat
