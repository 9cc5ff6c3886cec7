"""Short runs of a tiny model on the platform that JAX finds: `run_cases.py MODEL OUT.json PRECISION CASE ...`.

Each result is written as it comes, so that one case that fails does not take the others with it.
"""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import sys
import tempfile
import traceback
from typing import Any

UPDATES, LENGTH, NEW_TOKENS = 3, 256, 32
LORA_KINDS = {
    "lora": ["method.rank=8", "method.rslora=true"],
    "dora": ["method.rank=8"],
    "pissa": ["method.rank=8"],
    "oft": ["method.oft_block_size=16"],
    "vera": ["method.rank=16", "optimizer.learning_rate=0.1"],
}
FORMATS = ("nf4", "int8", "fp8", "int4")
OPTIMIZERS = (
    "adamw", "adamw8bit", "adam_mini", "muon", "galore", "apollo", "badam", "schedule_free", "prodigy", "sophia",
    "adafactor", "lion", "sgd",
)  # fmt: skip
OPTIMIZER_OPTIONS = {
    "galore": ["optimizer.rank=16"],
    "apollo": ["optimizer.rank=16"],
    "badam": ["optimizer.switch_every=1"],
    "schedule_free": ["optimizer.schedule=constant"],
    "prodigy": ["optimizer.learning_rate=1.0"],
    "sophia": ["optimizer.curvature_every=2"],
    "lion": ["optimizer.learning_rate=1e-4"],
    "sgd": ["optimizer.learning_rate=0.1"],
}
LAYERWISE = ["optimizer.in_backward=true", "optimizer.max_grad_norm=null", "method=full"]
HOST = "compute.offload=[residual,optimizer,weights]"
CASES: dict[str, list[str]] = {
    **{kind: [f"method.adapter={kind}", *options] for kind, options in LORA_KINDS.items()},
    "loftq on int8": ["method.adapter=loftq", "quantize=int8"],
    "full": ["method=full"],
    "freeze": ["method.kind=freeze", "method.last_layers=1"],
    "llama_pro": ["method.kind=llama_pro", "method.blocks=2"],
    "lora and embeddings": ["method.train_modules=[embed_tokens]"],
    **{f"lora on {name}": [f"quantize={name}"] for name in FORMATS},
    **{
        f"{name}, full": ["method=full", f"optimizer.name={name}", *OPTIMIZER_OPTIONS.get(name, ())]
        for name in OPTIMIZERS
    },
    "layer by layer": LAYERWISE,
    "chunks": ["compute.attention_chunk=64", "compute.mlp_chunk=64", "compute.loss_chunk=32", "compute.remat=full"],
    "offloaded lora": [HOST, "compute.remat=full"],
    "offloaded lora on nf4": [HOST, "compute.remat=full", "quantize=nf4"],
    "offloaded full": [HOST, *LAYERWISE],
    "dpo": ["stage.kind=dpo"],
}
PROMPTS = ("Once upon a time", "Tom", "A big dog went to the park and saw a")


def run(name: str, model: pathlib.Path, precision: str, work: pathlib.Path) -> dict[str, Any]:
    """Losses and gradient norms of the updates, logits of the tuned model, and text that it continues greedily."""
    import numpy as np

    import meshtune
    from meshtune.config.load import load_recipe
    from meshtune.train.run import train

    data = work / "data.jsonl"
    if name == "dpo":
        pairs = [{"prompt": f"Count to {n}.", "chosen": f"Tom has {n} hats.", "rejected": "No."} for n in range(40)]
        data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    else:
        texts = [f"Once upon a time number {n} went to the park {n % 7} times." * (1 + n % 4) for n in range(60)]
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    fields: dict[str, Any] = {
        "model": str(model),
        "data": {"train": [{"path": str(data)}], "max_length": LENGTH},
        "output": str(work / "run"),
        "train": {"steps": UPDATES, "batch_size": 4},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 0, "schedule": "constant"},
        "compute": {"precision": precision},
        "checkpoint": {"every": 1000},
    }
    result = train(load_recipe(fields, CASES[name]))
    lines = [json.loads(line) for line in (result.output / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if line["kind"] == "train"]
    tuned = meshtune.load(result.output, dtype="float32")
    ids = np.arange(1, 41).reshape(2, 20)
    return {
        "losses": [line["loss"] for line in updates],
        "grad_norms": [line["grad_norm"] for line in updates],
        "logits": tuned.logits(ids).astype(float).round(7).tolist(),
        "texts": tuned.generate(list(PROMPTS), max_tokens=NEW_TOKENS),
    }


def main(model: str, out: str, precision: str, names: list[str]) -> None:
    results: dict[str, Any] = {}
    for name in names:
        log = io.StringIO()
        with tempfile.TemporaryDirectory() as work, contextlib.redirect_stdout(log):
            try:
                results[name] = run(name, pathlib.Path(model), precision, pathlib.Path(work))
            except Exception:  # the other cases go on, and the test of this one shows it
                results[name] = {"failed": f"{log.getvalue()[-1000:]}\n{traceback.format_exc()[-3000:]}"}
        pathlib.Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
