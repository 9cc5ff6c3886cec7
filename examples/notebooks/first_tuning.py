# %% [markdown]
# # First tuning
# A model of 260,000 parameters that tells stories learns to let animals sing: a minute on any device, and nothing is
# downloaded. Put the wheel of Meshtune (`make wheel` builds it in `dist/`) into this notebook's folder.

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

# %% [markdown]
# A recipe says what is trained, on what, and how. Everything that it leaves out has a default.

# %% tags=["recipe"]
from meshtune import quickstart

recipe = {
    "model": str(quickstart.MODEL),
    "data": {"train": str(quickstart.LESSON), "max_length": 512, "validation": 24},
    "method": {"kind": "lora", "rank": 8, "train_modules": ["embed_tokens"]},
    "train": {"steps": 150, "batch_size": 4},
    "optimizer": {"learning_rate": 1e-2},
    "eval": {"every": 50},
    "sample": {"prompts": ["There was once a brave lion named Daisy."], "max_tokens": 160},
    "output": "runs/first",
    "overwrite": True,
}

# %%
run = meshtune.train(recipe)
run

# %%
run.plot()

# %%
run.samples

# %%
print(run.model.generate("One day, a kind bear named Tom went to the park.", max_tokens=120))

# %% [markdown]
# `run.report` shows every number of the run, and `run.path` is the adapter, which peft loads too.
