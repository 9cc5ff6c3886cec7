"""Whether a step waits for pixels: photographs of 12 megapixels, and a model so small that nothing else takes time.

    python benchmarks/vision/loading.py MODEL FOLDER [--pictures 40] [--max-pixels 196000] [--decoders 1 2]

MODEL is a directory of a small model that sees, with weights. FOLDER is written: JPEGs of 4,000 x 3,000 with structure
of every size, and a record about each. First the loader alone makes every batch, with each number of decoding threads;
then five epochs are trained. Prints seconds of wall and processor time, and those of each update, as JSON.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time

import numpy as np
from PIL import Image

from meshtune.config.load import load_recipe
from meshtune.data.loader import Loader
from meshtune.data.pictures import rows
from meshtune.data.prepare import prepare_data
from meshtune.data.tokenizer import load_tokenizer
from meshtune.train.run import train

SIZE = 4000, 3000


def write_picture(file: pathlib.Path, seed: int) -> None:
    """A photograph of noise whose amplitude falls with its frequency, as that of photographs does."""
    rng, pixels = np.random.default_rng(seed), np.full((SIZE[1], SIZE[0], 3), 128, np.float32)
    for octave in range(10):
        coarse = rng.normal(size=(3 * 2**octave, 4 * 2**octave, 3)) * 60 / 1.7**octave
        parts = [Image.fromarray(coarse[..., c].astype(np.float32)).resize(SIZE, 2) for c in range(3)]
        pixels += np.stack([np.asarray(part) for part in parts], -1)
    pixels += rng.normal(0, 5, pixels.shape)  # of a sensor
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(file, quality=90)


def write_pictures(folder: pathlib.Path, count: int) -> pathlib.Path:
    """Photographs, and their records."""
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for number in range(count):
        if not (folder / f"{number}.jpg").exists():
            write_picture(folder / f"{number}.jpg", number)
        turns = [("user", "<image>what is it?"), ("assistant", "a circle")]
        messages = [{"role": role, "content": text} for role, text in turns]
        records.append({"messages": messages, "images": [f"{number}.jpg"]})
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder / "data.jsonl"


def main() -> None:
    """Writes the pictures, loads them, and trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--pictures", type=int, default=40)
    parser.add_argument("--max-pixels", type=int, default=196_000)
    parser.add_argument("--decoders", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    fields = {"model": str(options.model), "data": {"train": str(write_pictures(options.folder, options.pictures))}}
    fields["data"] |= {"max_length": 512, "packing": False}
    fields |= {"vision": {"max_pixels": options.max_pixels}, "train": {"epochs": 5, "batch_size": 4}}
    fields |= {"output": str(options.folder / "run"), "overwrite": True, "log": {"every": 1}}
    recipe = load_recipe(fields)
    loader = prepare_data(recipe, load_tokenizer(options.model)).train
    assert isinstance(loader, Loader)
    steps = loader.steps_per_epoch(0)
    next(loader.iterate(0, 1))  # imports
    for decoders in options.decoders:
        rows.DECODERS = decoders
        rows._decoders.cache_clear()
        wall, processor = time.perf_counter(), time.process_time()
        for _ in loader.iterate(0, steps):
            pass
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        print(json.dumps({"decoders": decoders, "wall": round(wall, 2), "processor": round(processor, 2)}), flush=True)
    wall, processor = time.perf_counter(), time.process_time()
    train(recipe)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    lines = [json.loads(line) for line in (options.folder / "run/metrics.jsonl").read_text().splitlines()]
    print(json.dumps({"run": {"wall": round(wall, 2), "processor": round(processor, 2)}}))
    print(json.dumps({"updates": [round(line["seconds"], 2) for line in lines if line.get("kind") == "train"]}))


if __name__ == "__main__":
    main()
