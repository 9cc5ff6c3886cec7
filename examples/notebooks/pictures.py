# %% [markdown]
# # Pictures
# A model that sees learns to answer questions about your pictures. Choose a T4 or a TPU v5e-1 as the runtime, and put
# the wheel of Meshtune (`make wheel` builds it in `dist/`) into this notebook's folder.

# %%
# Installs Meshtune from its wheel in this folder, with JAX for the device. Where it is installed, nothing happens.
import glob
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("meshtune") is None:
    device = "tpu" if glob.glob("/dev/accel*") + glob.glob("/dev/vfio/*") else "cuda12"
    [wheel] = glob.glob("meshtune-*.whl")
    subprocess.check_call([sys.executable, "-m", "pip", "install", "-q", f"{wheel}[{device},images]"])
import meshtune

# %%
import json
import os

from PIL import Image, ImageDraw

os.makedirs("shapes", exist_ok=True)
with open("shapes/train.jsonl", "w") as file:
    for colour in ("red", "blue", "green", "black", "orange"):
        for shape in ("ellipse", "rectangle"):
            picture = Image.new("RGB", (168, 168), "white")
            getattr(ImageDraw.Draw(picture), shape)((30, 40, 140, 130), fill=colour)
            picture.save(f"shapes/{colour}-{shape}.png")
            question = {"role": "user", "content": "<image>What is this?"}
            answer = {"role": "assistant", "content": f"Card: {shape}, {colour}."}
            record = {"messages": [question, answer], "images": [f"{colour}-{shape}.png"]}
            file.write(json.dumps(record) + "\n")
Image.open("shapes/orange-ellipse.png")

# %% [markdown]
# Your own photographs: one record for each question, with the name of the picture, as in `shapes/train.jsonl`.

# %% tags=["recipe"]
prompt = [{"type": "image", "image": "shapes/blue-ellipse.png"}, {"type": "text", "text": "What is this?"}]
recipe = {
    "model": "Qwen/Qwen2-VL-2B-Instruct",
    "data": {"train": "shapes/train.jsonl", "max_length": 512},
    "vision": {"max_pixels": 200_000},
    "method": {"kind": "lora", "rank": 16},
    "train": {"steps": 40, "batch_size": 1},
    "optimizer": {"learning_rate": 2e-4},
    "sample": {"prompts": [prompt], "every": 20, "max_tokens": 40},
    "output": "runs/pictures",
    "overwrite": True,
}

# %%
run = meshtune.train(recipe)
run.plot()

# %%
run.samples

# %%
chat = run.chat(max_tokens=40)
chat.send("What is this?", ["shapes/green-rectangle.png"])
chat
