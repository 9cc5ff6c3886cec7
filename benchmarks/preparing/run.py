"""Prepares alpaca records beside `datasets.map` with the same tokenizer and template, alternating, in fresh processes.

    python benchmarks/preparing/run.py MODEL ALPACA.json RECORDS ROUNDS result.json [BEFORE]

BEFORE is the `src` folder of another version of Meshtune, which is measured too.
The records are copies of those of ALPACA.json with numbers appended and words exchanged. `map` renders and tokenises
with two processes; it computes no loss mask and checks nothing.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time

OURS = """
import sys
from meshtune.config.load import load_recipe
from meshtune.data.prepare import prepare_data
from meshtune.data.tokenizer import load_tokenizer
model, data, folder = sys.argv[1:]
open(folder + "/r.yaml", "w").write("model: x\\ndata: x\\noutput: x\\n")
recipe = load_recipe(folder + "/r.yaml", ["model.path=" + model, "data.train=" + data, "output=x"])
prepare_data(recipe, load_tokenizer(model), cache=folder)
"""
THEIRS = """
import sys
import datasets
from transformers import AutoTokenizer
model, data, folder = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(model)
def tokenise(batch):
    chats = [
        [{"role": "user", "content": i + ("\\n" + x if x else "")}, {"role": "assistant", "content": o}]
        for i, x, o in zip(batch["instruction"], batch["input"], batch["output"])
    ]
    texts = tokenizer.apply_chat_template(chats, tokenize=False)
    return {"input_ids": tokenizer(texts, add_special_tokens=False)["input_ids"]}
table = datasets.load_dataset("json", data_files=data, split="train", cache_dir=folder)
table.map(tokenise, batched=True, num_proc=2, remove_columns=table.column_names)
"""


def write_records(source: str, count: int, file: pathlib.Path) -> None:
    """Writes `count` changed copies of the records of `source` as JSON lines."""
    records, rng = json.loads(pathlib.Path(source).read_text()), random.Random(0)
    words = [word for record in records for word in record["output"].split()]
    with file.open("w") as stream:
        for index in range(count):
            record = dict(rng.choice(records))
            output = record["output"].split(" ")
            for _ in range(3):
                output[rng.randrange(len(output))] = rng.choice(words)
            record |= {"instruction": f"{record['instruction']} ({index})", "output": " ".join(output)}
            stream.write(json.dumps(record) + "\n")


def measure(script: str, model: str, data: pathlib.Path, source: str | None = None) -> dict[str, float]:
    """Seconds of wall clock and CPU of a fresh process and its children, imports included, with Meshtune's `source`."""
    environment = dict(os.environ) if source is None else {**os.environ, "PYTHONPATH": source}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-c", script, model, str(data), folder], check=True, capture_output=True, env=environment
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": round(time.monotonic() - start, 2), "cpu": round(cpu, 2)}


def main() -> None:
    model, source, count, rounds, result, *before = sys.argv[1:]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ("meshtune", "datasets.map", "before")}
    with tempfile.TemporaryDirectory() as folder:
        data = pathlib.Path(folder) / "alpaca.jsonl"
        write_records(source, int(count), data)
        for _ in range(int(rounds)):
            runs["meshtune"].append(measure(OURS, model, data))
            runs["datasets.map"].append(measure(THEIRS, model, data))
            for folder_before in before:
                runs["before"].append(measure(OURS, model, data, folder_before))
    medians = {
        name: {key: statistics.median(run[key] for run in several) for key in ("wall", "cpu")}
        for name, several in runs.items()
        if several
    }
    pathlib.Path(result).write_text(json.dumps({"records": int(count), "medians": medians, "runs": runs}, indent=1))
    print(medians)


if __name__ == "__main__":
    main()
