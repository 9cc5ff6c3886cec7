"""Reads a stream of two files mixed by weight, in a separate process: `million_records.py FOLDER START STOP`.

Prints a line of JSON: the records that the mixture has, those of each file and the batches that were read, a hash of
the last ones, and the most memory that the process has held since it had imported everything.
"""

from __future__ import annotations

import collections
import hashlib
import json
import pathlib
import sys

import meshtune.quickstart
from meshtune.config.load import load_recipe
from meshtune.data.prepare import prepare_data
from meshtune.data.tokenizer import load_tokenizer

TOKENIZER = pathlib.Path(meshtune.quickstart.__file__).parent / "model"
HASHED = 5  # last batches
WEIGHTS = {"often": 0.8, "seldom": 0.2}


def memory() -> int:
    """The memory of this process in bytes, without the pages of mapped files, which the system takes back at will."""
    lines = pathlib.Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def main(folder: pathlib.Path, start: int, stop: int) -> None:
    output = folder / "run"
    output.mkdir(exist_ok=True)
    fields = {
        "model": {"path": str(TOKENIZER), "chat_template": "plain"},
        "data": {
            "train": [{"path": str(folder / f"{name}.jsonl"), "weight": weight} for name, weight in WEIGHTS.items()],
            "streaming": True,
            "max_length": 512,
        },
        "train": {"steps": 10**6, "batch_size": 64},
        "output": str(output),
    }
    tokenizer = load_tokenizer(TOKENIZER, "plain")
    before = peak = memory()
    stream = prepare_data(load_recipe(fields), tokenizer, cache=folder / "cache").train
    peak = max(peak, memory())
    records: collections.Counter[str] = collections.Counter()
    distinct, positions, used = set[int](), 0, 0
    digest = hashlib.sha256()
    for batch in stream.iterate(start, stop):
        used += int((batch.arrays["segment_ids"] > 0).sum())
        positions += batch.arrays["segment_ids"].size
        for rows in batch.origins:
            for origins in rows:
                for origin in origins:
                    name = pathlib.Path(origin.source).stem
                    records[name] += 1
                    distinct.add(hash(origin))
        peak = max(peak, memory())
        if batch.step >= stop - HASHED:
            digest.update(batch.arrays["tokens"].tobytes() + batch.arrays["segment_ids"].tobytes())
    print(
        json.dumps(
            {
                "samples": len(stream.documents),
                "records": records,
                "distinct": len(distinct),
                "filled": used / positions,
                "hash": digest.hexdigest(),
                "memory": peak - before,
            }
        )
    )


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
