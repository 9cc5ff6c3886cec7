"""Processor time of reading pictures while a run trains: from a file to the patches of a row.

    python benchmarks/vision/decoding.py MODEL PICTURE [PICTURE ...] [--max-pixels N] [--times N]

MODEL is a directory with config.json, preprocessor_config.json and the tokenizer of a model that sees. Each picture is
read as a loader's thread reads it: the file and its hash, decoding, the model's resize, normalising, and cutting into
patches. Prints the median of processor milliseconds of one thread, and the patches, for each picture, as JSON.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import time

from meshtune.config.sections import VisionSection
from meshtune.data.conversation import Picture
from meshtune.data.pictures.families import picture_reader
from meshtune.data.pictures.files import load_picture, picture_digest, read_size
from meshtune.data.tokenizer import load_tokenizer


def main() -> None:
    """Reads every picture some times, and prints what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("pictures", type=pathlib.Path, nargs="+")
    parser.add_argument("--max-pixels", type=int)
    parser.add_argument("--times", type=int, default=11)
    options = parser.parse_args()
    vision = VisionSection(max_pixels=options.max_pixels)
    reader = picture_reader(options.model, vision, load_tokenizer(str(options.model)))
    for path in options.pictures:
        data = path.read_bytes()
        picture = Picture(str(path), picture_digest(data), *read_size(data, str(path)))
        seconds = []
        for _ in range(options.times):
            started = time.process_time()
            patches, *_ = reader.patches(load_picture(picture, str(path)))
            seconds.append(time.process_time() - started)
        milliseconds = round(1000 * statistics.median(seconds), 2)
        result = {"picture": path.name, "size": picture.size, "patches": len(patches), "milliseconds": milliseconds}
        print(json.dumps(result))


if __name__ == "__main__":
    main()
