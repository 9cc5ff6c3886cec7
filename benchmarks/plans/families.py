"""Writes docs/families-memory.md and the board's list of models: the memory of common models by method, estimated
without a compiler.

python benchmarks/plans/families.py
"""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

from meshtune.config.load import load_recipe
from meshtune.plan.candidate import workload_of
from meshtune.plan.hardware import find_target
from meshtune.plan.search import score

ROOT = pathlib.Path(__file__).parents[2]
MODELS = ROOT / "examples/headline/models"
GIB = 2**30
TOKENS = 4096
METHODS: dict[str, dict[str, Any]] = {
    "QLoRA": {"method": {"kind": "lora", "rank": 16, "alpha": 32}, "quantize": "nf4"},
    "LoRA": {"method": {"kind": "lora", "rank": 16, "alpha": 32}},
    "full": {"method": {"kind": "full"}},
}
CARDS = ("RTX4080", "RTX4090", "L40S", "H100", "H200", "MI300X")  # from the smallest memory to the largest
NAMES = {
    "gemma-3n-e2b": "Gemma 3n E2B", "gemma-3n-e4b": "Gemma 3n E4B", "llama-2-7b": "Llama 2 7B",
    "llama-3.1-8b": "Llama 3.1 8B", "gemma-3-27b": "Gemma 3 27B", "qwen3.5-27b": "Qwen3.5 27B",
    "qwen3-30b-a3b": "Qwen3 30B-A3B", "mixtral-8x7b": "Mixtral 8x7B",
    "llama-3.1-70b": "Llama 3.1 70B", "glm-4.5-air": "GLM-4.5-Air 106B", "qwen3-235b-a22b": "Qwen3 235B-A22B",
    "llama-3.1-405b": "Llama 3.1 405B", "deepseek-v3": "DeepSeek V3 671B",
}  # fmt: skip
BOARD = ROOT / "src/meshtune/board/models.json"
HUB = {
    "gemma-3n-e2b": ("google/gemma-3n-E2B-it", "Gemma"), "gemma-3n-e4b": ("google/gemma-3n-E4B-it", "Gemma"),
    "llama-2-7b": ("meta-llama/Llama-2-7b-hf", "Llama"), "llama-3.1-8b": ("meta-llama/Llama-3.1-8B-Instruct", "Llama"),
    "gemma-3-27b": ("google/gemma-3-27b-it", "Gemma"), "qwen3.5-27b": ("Qwen/Qwen3.5-27B", "Qwen"),
    "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B", "Qwen"),
    "mixtral-8x7b": ("mistralai/Mixtral-8x7B-Instruct-v0.1", "Mistral"),
    "llama-3.1-70b": ("meta-llama/Llama-3.1-70B-Instruct", "Llama"), "glm-4.5-air": ("zai-org/GLM-4.5-Air", "GLM"),
    "qwen3-235b-a22b": ("Qwen/Qwen3-235B-A22B", "Qwen"),
    "llama-3.1-405b": ("meta-llama/Llama-3.1-405B-Instruct", "Llama"),
    "deepseek-v3": ("deepseek-ai/DeepSeek-V3", "DeepSeek"),
}  # fmt: skip


def main() -> None:
    """Estimates every model and method, and writes the page."""
    rows = [row(folder, name) for folder, name in NAMES.items()]
    heads = ["model", *METHODS]
    lines = [
        "# Memory of common models",
        "",
        f"Made by `python benchmarks/plans/families.py`: a row of {TOKENS:,} tokens on one device, `remat: full`,",
        "mixed precision; LoRA of rank 16 on every linear layer, all experts included; full tuning with AdamW and",
        "float32 weights. Figures are those of `meshtune plan --estimate`, not of a compiler and not measured",
        "([plan.md](plan.md)). In brackets is the smallest card of 16, 24, 48, 80, 141 and 192 GB that holds it",
        "with 6% to spare, or how many of the largest would hold as many bytes. Settings that lower memory further are",
        "in [memory.md](memory.md), and recipes for these models in [examples/headline](../examples/headline).",
        "",
        "The table is estimates. Some of these models were compiled ([plans](../benchmarks/plans/RESULTS.md)): Gemma 3",
        "27B with QLoRA, and what can be on the host there, takes 17.8 GiB of an RTX 4090 by its compiler, where the",
        "estimate says 16.0: XLA splits sums over its 262,208 tokens in sixteen, for which it pads a copy of the head.",
        "",
        f"| {' | '.join(heads)} |",
        f"| {' | '.join('---' for _ in heads)} |",
        *(f"| {' | '.join(cells)} |" for cells in rows),
    ]
    (ROOT / "docs/families-memory.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    listed = [
        {"name": name, "id": HUB[folder][0], "family": HUB[folder][1]}
        | {"bytes": {method.lower(): size_of(folder, method) for method in METHODS}}
        for folder, name in NAMES.items()
    ]
    BOARD.write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")


def row(folder: str, name: str) -> list[str]:
    """The model's cells."""
    return [name, *(cell(folder, method) for method in METHODS)]


@functools.cache
def size_of(folder: str, method: str) -> int:
    """The bytes of one device."""
    data = {"train": str(ROOT / "examples/data/sharegpt.jsonl"), "max_length": TOKENS}
    fields: dict[str, object] = {
        "model": str(MODELS / folder),
        "data": data,
        "output": "runs/memory",
        **METHODS[method],
    }
    fields |= {"train": {"epochs": 1, "batch_size": 1}, "mesh": {"dp": 1}}
    recipe = load_recipe(fields | {"compute": {"precision": "mixed", "remat": "full"}})
    largest = find_target(CARDS[-1])
    return score(recipe, largest, workload_of(recipe, largest.device.backend)).estimate.device_bytes


def cell(folder: str, method: str) -> str:
    """The memory of one device, and the card that holds it."""
    size, largest = size_of(folder, method), find_target(CARDS[-1])
    for card in CARDS:
        if size <= 0.94 * find_target(card).device.memory:
            return f"{size / GIB:,.1f} GiB ({card})"
    return f"{size / GIB:,.0f} GiB ({-(-size // int(0.94 * largest.device.memory))} x {CARDS[-1]})"


if __name__ == "__main__":
    main()
