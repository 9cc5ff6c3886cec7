"""Are the stores and checkpoints of another tree read? Trains a tiny LoRA run to some update, or continues it.

    PYTHONPATH=../old/src python benchmarks/refactor_gate/resume.py FOLDER crossed 10
    PYTHONPATH=src        python benchmarks/refactor_gate/resume.py FOLDER crossed 20     continues the other tree's
    PYTHONPATH=src        python benchmarks/refactor_gate/resume.py FOLDER same 10        and its own
    PYTHONPATH=src        python benchmarks/refactor_gate/resume.py FOLDER same 20

Prints a digest of the adapter, the losses, and the stores of tokens with the times when they were written: the second
and the fourth line must agree, and no store may be written again.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys

import run
from models import write_model, write_texts, write_tokenizer


def main() -> None:
    folder, name, steps = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    os.environ["MESHTUNE_CACHE"] = str(folder / "cache")
    import meshtune

    if not (folder / "llama").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_texts(folder / "texts.jsonl")
        write_tokenizer(folder / "tokenizer")
        write_model(folder / "llama", "llama")
    recipe = run.recipe(run.Case(run.TWO_MICRO_BATCHES), folder / "llama", folder / "texts.jsonl", folder / name)
    recipe["train"] |= {"steps": steps}
    recipe["optimizer"] |= {"schedule": "constant"}  # so that a run may become longer
    recipe |= {"checkpoint": {"every": 5, "keep": 3}, "resume": True}
    meshtune.train(recipe)  # pyright: ignore[reportCallIssue]
    lines = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    losses = [float(line["loss"]).hex() for line in lines if line["kind"] == "train"]
    stores = {path.name: path.stat().st_mtime for path in (folder / "cache/tokens").iterdir()}
    print(json.dumps({"digest": run.digest(run.trained(folder / name)), "losses": losses, "stores": stores}))


if __name__ == "__main__":
    main()
