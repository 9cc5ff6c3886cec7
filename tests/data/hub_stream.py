"""Reads batches of a stream of two data sets of the hub, mixed by weight: `hub_stream.py FOLDER START STOP`.

Prints a line of JSON: how often each data set and each record of the small one was read, and a hash of each batch.
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

MODEL = pathlib.Path(meshtune.quickstart.__file__).parent / "model"


def main(folder: pathlib.Path, start: int, stop: int) -> None:
    output = folder / "run"
    output.mkdir(exist_ok=True)
    fields = {
        "model": {"path": str(MODEL), "chat_template": "plain"},
        "data": {
            "train": [{"path": "ann/lines", "weight": 3}, {"path": "ann/columns", "weight": 1}],
            "mixing": "interleave_over",
            "streaming": True,
            "max_length": 256,
        },
        "train": {"steps": 1000, "batch_size": 8},
        "output": str(output),
    }
    tokenizer = load_tokenizer(MODEL, "plain")
    stream = prepare_data(load_recipe(fields), tokenizer, cache=folder / "cache").train
    sources, records = collections.Counter[str](), set[int]()
    hashes = []
    for batch in stream.iterate(start, stop):
        hashes.append(hashlib.sha256(b"".join(array.tobytes() for array in batch.arrays.values())).hexdigest())
        origins = [origin for rows in batch.origins for row in rows for origin in row]
        sources.update(origin.source for origin in origins)
        records.update(origin.record for origin in origins if origin.source == "ann/columns")
    print(json.dumps({"sources": sources, "records": len(records), "hashes": hashes}))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
