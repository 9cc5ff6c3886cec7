"""Tunes a model that sees on easy-vqa, and measures whether it looks: with right, blank and exchanged pictures.

    ../shared/tools/make-vlm MODEL; ../shared/tools/make-easy-vqa DATA
    python benchmarks/vision/easy_vqa.py MODEL DATA OUTPUT [--pictures right|blank|exchanged] [--mix M] [KEY=VALUE ...]

The tower is frozen; the projector, which is new, is trained in full and the language model through LoRA. Answers to
`--test` questions of the test split are greedy. Prints accuracies by kind of question as JSON, with 95 % intervals
(Wilson); the best scores without a picture are those that make-easy-vqa prints.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import random
import time

from PIL import Image

import meshtune
from meshtune.config.load import load_recipe

SHAPES = ("circle", "rectangle", "triangle")


def kind_of(answer: str) -> str:
    """The kind of question that has this answer."""
    return "yes/no" if answer in ("yes", "no") else "shape" if answer in SHAPES else "colour"


def read_records(data: pathlib.Path, split: str, pictures: str) -> list[dict[str, object]]:
    """The records of a split with absolute paths of their pictures, which are blank or exchanged if asked."""
    records = [json.loads(line) for line in (data / f"{split}.llamafactory.jsonl").read_text().splitlines()]
    paths = [str((data / record["images"][0]).resolve()) for record in records]
    if pictures == "exchanged":
        random.Random(0).shuffle(paths)
    elif pictures == "blank":
        blank = data / "blank.png"
        Image.new("RGB", (64, 64), (128, 128, 128)).save(blank)
        paths = [str(blank.resolve())] * len(paths)
    return [record | {"images": [path]} for record, path in zip(records, paths, strict=True)]


def choose(records: list[dict[str, object]], count: int, seed: int, mix: str) -> list[dict[str, object]]:
    """`count` records at random: as they are distributed (`natural`), a third of each kind of question (`thirds`), or
    half of them yes/no, each question as often with yes as with no, and a quarter each of colour and shape (`even`)."""
    records = random.Random(seed).sample(records, len(records))
    if mix == "natural":
        return records[:count]
    kinds: dict[str, list[dict[str, object]]] = {}
    for record in records:
        kinds.setdefault(kind_of(record["messages"][1]["content"]), []).append(record)
    if mix == "thirds":
        chosen = [record for same in kinds.values() for record in same[: count // 3]]
    else:
        shares = {"colour": count // 4, "shape": count // 4, "yes/no": count // 2}
        kinds["yes/no"] = as_often(kinds["yes/no"])
        chosen = [record for kind, share in shares.items() for record in kinds[kind][:share]]
    return random.Random(seed).sample(chosen, len(chosen))


def as_often(records: list[dict[str, object]]) -> list[dict[str, object]]:
    """Pairs of records that ask the same question and have different answers, in the order of the later one."""
    waiting: dict[tuple[str, str], list[dict[str, object]]] = {}
    paired = []
    for record in records:
        question, answer = (message["content"] for message in record["messages"])
        if others := waiting.get((question, "no" if answer == "yes" else "yes")):
            paired += [others.pop(), record]
        else:
            waiting.setdefault((question, answer), []).append(record)
    return paired


def interval(right: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    z, share = 1.96, right / count
    centre, scale = share + z * z / (2 * count), 1 + z * z / count
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return round((centre - half) / scale, 3), round((centre + half) / scale, 3)


def measure(model: meshtune.Model, records: list[dict[str, object]]) -> dict[str, dict[str, object]]:
    """Accuracies of greedy answers, by kind of question."""
    right: dict[str, list[bool]] = {}
    prompts = []
    for record in records:
        question = record["messages"][0]["content"].removeprefix("<image>")
        parts = [{"type": "image", "image": record["images"][0]}, {"type": "text", "text": question}]
        prompts.append([{"role": "user", "content": parts}])
    answers = model.generate(prompts, max_tokens=4, temperature=0)
    for record, answer in zip(records, answers, strict=True):
        expected = record["messages"][1]["content"]
        right.setdefault(kind_of(expected), []).append(str(answer).strip() == expected)
    return {
        kind: {"accuracy": round(sum(hits) / len(hits), 3), "interval": interval(sum(hits), len(hits)), "n": len(hits)}
        for kind, hits in sorted(right.items())
    }


def main() -> None:
    """Tunes, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data", type=pathlib.Path)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--pictures", choices=["right", "blank", "exchanged"], default="right")
    parser.add_argument("--train", type=int, default=6000, help="questions to learn from")
    parser.add_argument("--mix", choices=["natural", "thirds", "even"], default="thirds", help="see choose()")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--test", type=int, default=600)
    options = parser.parse_intermixed_args()
    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / "train.jsonl"
    records = read_records(options.data, "train", options.pictures)
    records = choose(records, options.train, options.seed, options.mix)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    recipe = {
        "model": options.model,
        "data": {"train": str(file), "max_length": 256},
        "vision": {"train": ["projector"], "media_dir": str(options.data.resolve())},
        "method": {"kind": "lora", "rank": 16},
        "train": {"epochs": 1, "batch_size": 1},
        "optimizer": {"learning_rate": 1e-3, "projector_learning_rate": 2e-4, "beta2": 0.99},
        "compute": {"remat": "none", "loss_chunk": 16},  # most positions are not learned
        "seed": options.seed,
        "output": str(options.output / "run"),
        "resume": True,
    }
    started = time.process_time()
    meshtune.train(load_recipe(recipe, options.changes))
    seconds = time.process_time() - started
    tested = read_records(options.data, "test", options.pictures)[: options.test]
    scores = measure(meshtune.load(options.output / "run"), tested)
    result = {"pictures": options.pictures, "seed": options.seed, "questions": len(records)}
    result |= {"mix": options.mix, "changes": options.changes}
    print(json.dumps(result | {"processor_seconds": round(seconds), "test": scores}, indent=1))


if __name__ == "__main__":
    main()
