"""Writes docs/families-memory.md and the board's list of models: the memory of common models by method, estimated
without a compiler.

python benchmarks/plans/families.py
"""

from __future__ import annotations

import json
import pathlib
import tempfile
from typing import Any

from meshtune.config.load import load_recipe
from meshtune.costs.hardware import find_target
from meshtune.setup.search import predict_candidate, workload_of

ROOT = pathlib.Path(__file__).parents[2]
GIB = 2**30
TOKENS = 4096
METHODS: dict[str, dict[str, Any]] = {
    "QLoRA": {"method": {"kind": "lora", "rank": 16, "alpha": 32}, "quantize": "nf4"},
    "LoRA": {"method": {"kind": "lora", "rank": 16, "alpha": 32}},
    "full": {"method": {"kind": "full"}},
}
CARDS = ("RTX4080", "RTX4090", "L40S", "H100", "H200", "MI300X")  # from the smallest memory to the largest
BOARD = ROOT / "src/meshtune/board/models.json"
# {name, id on the hub, family} and either the `folder` of its config in examples/headline/models, or its `config` and
# how many `parameters` its published checkpoint has. By size, but for those of examples/headline, which come last.
LISTED: list[dict[str, Any]] = json.loads((pathlib.Path(__file__).parent / "models.json").read_text(encoding="utf-8"))


def main() -> None:
    """Estimates every model and method, and writes the page."""
    with tempfile.TemporaryDirectory() as configs:
        sizes = {model["name"]: sizes_of(folder_of(model, pathlib.Path(configs))) for model in LISTED}
    LISTED.sort(key=lambda model: min(sizes[model["name"]].values()))
    rows = [[name := model["name"], *(cell(sizes[name].get(method)) for method in METHODS)] for model in LISTED]
    heads = ["model", *(f"{method}, GiB" for method in METHODS)]
    lines = [
        "# Memory of common models",
        "",
        f"`python benchmarks/plans/families.py` writes this page: a row of {TOKENS:,} tokens on one device, `remat:",
        "full`, mixed precision; LoRA of rank 16 on every linear layer, experts included; full tuning with AdamW",
        "and float32 weights. Figures are estimates (`meshtune plan --estimate`, [plan](plan.md)), not measured.",
        "Brackets name the smallest card of 16, 24, 48, 80, 141 or 192 GB that holds it with 6% to spare, or how",
        "many of the largest hold as many bytes. [Memory](memory.md) lists settings that need less; recipes are",
        "in [examples/headline](../examples/headline).",
        "",
        "Some models were compiled too ([plans](../benchmarks/plans/RESULTS.md)). Gemma 3 27B with QLoRA and",
        "offloading takes 17.8 GiB of an RTX 4090 by its compiler, and 16.0 by the estimate: XLA splits sums over",
        "262,208 tokens in sixteen and pads a copy of the head. gpt-oss is published in mxfp4; LoRA over these",
        "codes is its QLoRA.",
        "",
        f"| {' | '.join(heads)} |",
        f"| {' | '.join('---' for _ in heads)} |",
        *(f"| {' | '.join(cells)} |" for cells in rows),
    ]
    (ROOT / "docs/families-memory.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    listed = [
        {field: model[field] for field in ("name", "id", "family")}
        | {"bytes": {method.lower(): size for method, size in sizes[model["name"]].items()}}
        for model in LISTED
    ]
    BOARD.write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")


def folder_of(model: dict[str, Any], configs: pathlib.Path) -> pathlib.Path:
    """The folder with the config of a listed model, which is made in `configs` where the list holds it."""
    if "folder" in model:
        return ROOT / "examples/headline/models" / model["folder"]
    folder = configs / model["name"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model["config"] | {"torch_dtype": "bfloat16"}), encoding="utf-8")
    return folder


def sizes_of(folder: pathlib.Path) -> dict[str, int]:
    """The bytes of one device, by method; of a model that is published as codes those of LoRA over them, alone."""
    if "quantization_config" in json.loads((folder / "config.json").read_text(encoding="utf-8")):
        return {"QLoRA": size_of(folder, METHODS["LoRA"])}
    return {name: size_of(folder, method) for name, method in METHODS.items()}


def size_of(folder: pathlib.Path, method: dict[str, Any]) -> int:
    data = {"train": str(ROOT / "examples/data/sharegpt.jsonl"), "max_length": TOKENS}
    fields: dict[str, object] = {"model": str(folder), "data": data, "output": "runs/memory", **method}
    fields |= {"train": {"epochs": 1, "batch_size": 1}, "mesh": {"dp": 1}}
    recipe = load_recipe(fields | {"compute": {"precision": "mixed", "remat": "full"}})
    largest = find_target(CARDS[-1])
    return predict_candidate(recipe, largest, workload_of(recipe, largest.device.backend)).estimate.device_bytes


def cell(size: int | None) -> str:
    """The memory of one device, and the card that holds it."""
    if size is None:
        return "–"
    largest = find_target(CARDS[-1])
    for card in CARDS:
        if size <= 0.94 * find_target(card).device.memory:
            return f"{size / GIB:,.1f} ({card})"
    return f"{size / GIB:,.0f} ({-(-size // int(0.94 * largest.device.memory))}x{CARDS[-1]})"


if __name__ == "__main__":
    main()
