"""Whether a change of the code changes what is computed: records exact losses and results, and compares two records.

python benchmarks/refactor_gate/run.py record --to before.json [--only PATTERN]   the tree that PYTHONPATH names
python benchmarks/refactor_gate/run.py compare before.json after.json             exits 1 above 1e-6 relative
python benchmarks/refactor_gate/run.py configs --to configs                       models for `plans`, written once
python benchmarks/refactor_gate/run.py plans --to plans.json --configs configs    what `plan --estimate` says
python benchmarks/refactor_gate/run.py compare-plans before.json after.json       exits 1 above 1% of any number

`record` uses the public interface alone (meshtune.train, meshtune.load, Model.generate, Model.logits, the files of a
run), so that the same script runs over trees years apart. Beside FILE.json it writes FILE.npz with the arrays, from
which `compare` says how far apart two results are; without it, it can only say whether they are equal.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from models import FAMILIES, PROMPTS, write_model, write_texts, write_tokenizer

import plans as plans_of_recipes

UPDATES, LENGTH, ROWS, NEW_TOKENS = 20, 64, 8, 64
LIMIT = 1e-6  # the largest relative difference that `compare` lets pass
FLAGS = "--xla_backend_optimization_level=0"  # of LLVM: programs compile in half the time
HOST = ["residual", "optimizer", "weights"]

Fields = dict[str, Any]
Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Case:
    """One run: what its recipe says beyond the common part, and the number of devices."""

    recipe: Fields
    devices: int = 1


def _on(**mesh: int) -> Fields:
    return {"mesh": mesh}


TWO_MICRO_BATCHES: Fields = {"train": {"micro_batch": ROWS // 2}}
FULL: Fields = {"method": {"kind": "full"}}
CASES: dict[str, Case] = {
    "lora": Case(TWO_MICRO_BATCHES),
    "full": Case(FULL | TWO_MICRO_BATCHES),
    "nf4 lora": Case({"quantize": "nf4"} | TWO_MICRO_BATCHES),
    "fused, on the host": Case(
        FULL | {"optimizer": {"fused": True, "max_grad_norm": None}, "compute": {"offload": HOST}}
    ),
    "chunked": Case(
        {"compute": {"mlp_chunk": 16, "attention_chunk": 32, "loss_chunk": 16, "remat": "full"}} | TWO_MICRO_BATCHES
    ),
    "fsdp=8, lora": Case(_on(fsdp=8), 8),
    "tp=8, lora": Case(_on(tp=8), 8),
    "cp=8, lora": Case(_on(cp=8) | {"compute": {"attention": "blockwise"}}, 8),
    "fsdp=8, full": Case(FULL | _on(fsdp=8), 8),
    "dp=2 fsdp=2 tp=2, full": Case(FULL | _on(dp=2, fsdp=2, tp=2), 8),
}


def recipe(case: Case, model: pathlib.Path, texts: pathlib.Path, output: pathlib.Path) -> Fields:
    """The whole recipe of a case, with every choice that could differ between machines made."""
    full = case.recipe.get("method") == FULL["method"]
    common: Fields = {
        "model": {"path": str(model), "tokenizer": str(model.parent / "tokenizer")},
        "stage": "pt",
        "data": {"train": [{"path": str(texts), "format": "text"}], "max_length": LENGTH},
        "output": str(output),
        "method": {"kind": "lora", "rank": 4},
        "mesh": {"dp": 1},
        "train": {"steps": UPDATES, "batch_size": ROWS},
        "optimizer": {"learning_rate": 1e-3 if full else 1e-2, "warmup_steps": 2},
        "compute": {"precision": "float32", "attention": "direct", "remat": "auto"},
        "checkpoint": {"every": 1000, "keep": 1},
        "log": {"plot_every": 1000},
        "seed": 3,
    }
    for section, fields in case.recipe.items():
        merges = isinstance(fields, dict) and section not in ("mesh", "method")
        common[section] = common.get(section, {}) | fields if merges else fields
    return common


def digest(arrays: Arrays) -> str:
    """sha256 over names, dtypes, shapes and bytes."""
    total = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        total.update(f"{name} {array.dtype} {array.shape}\n".encode())
        total.update(array.tobytes())
    return total.hexdigest()


def trained(folder: pathlib.Path) -> Arrays:
    """The tensors of the adapter or model that a run wrote."""
    from safetensors.numpy import load_file

    files = sorted([*folder.glob("adapter/*.safetensors"), *folder.glob("model/*.safetensors")])
    assert files, f"{folder} has no result"
    return {name: array for file in files for name, array in load_file(file).items()}


def run_case(case: Case, family: str, work: pathlib.Path, name: str) -> tuple[Fields, Arrays]:
    """(what is recorded of a training run, its arrays)."""
    import meshtune

    output = work / "runs" / name.replace(" ", "_").replace(",", "")
    meshtune.train(recipe(case, work / family, work / "texts.jsonl", output))  # pyright: ignore[reportCallIssue]
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = [float(line["loss"]).hex() for line in lines if line["kind"] == "train"]
    assert len(losses) == UPDATES, f"{name}: {len(losses)} updates"
    arrays = trained(output)
    return {"losses": losses, "digest": digest(arrays), "tensors": len(arrays)}, arrays


def run_generation(family: str, work: pathlib.Path) -> tuple[Fields, Arrays]:
    """(the texts that greedy generation gives, the logits of all their tokens)."""
    from transformers import AutoTokenizer

    import meshtune

    model = meshtune.load(work / family, dtype="float32")
    vars(model)["tokenizer"] = AutoTokenizer.from_pretrained(str(work / "tokenizer"))  # in the place of the cached one
    texts = [model.generate(prompt, max_tokens=NEW_TOKENS) for prompt in PROMPTS]
    ids = [[int(word[1:]) for word in f"{prompt} {text}".split()] for prompt, text in zip(PROMPTS, texts, strict=True)]
    arrays = {f"logits {number}": model.logits(row) for number, row in enumerate(ids)}
    return {"texts": texts, "digest": digest(arrays), "tensors": len(arrays)}, arrays


def names(only: str) -> Iterator[tuple[str, str, str, int]]:
    """(name of the record, family, case, devices) of all that is chosen."""
    for family in FAMILIES:
        for case, devices in [*((case, value.devices) for case, value in CASES.items()), ("generate", 1)]:
            if fnmatch.fnmatch(f"{family}, {case}", only):
                yield f"{family}, {case}", family, case, devices


def record_here(to: pathlib.Path, only: str, devices: int) -> None:
    """Runs the cases of one number of devices in this process; writes after each."""
    import contextlib

    results: dict[str, Fields] = {}
    arrays: Arrays = {}
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        os.environ["MESHTUNE_CACHE"] = str(work / "cache")
        write_texts(work / "texts.jsonl")
        write_tokenizer(work / "tokenizer")
        for family in FAMILIES:
            write_model(work / family, family)
        for name, family, case, needs in names(only):
            if needs != devices:
                continue
            began = time.monotonic()
            with (work / "log").open("w") as log, contextlib.redirect_stdout(log):
                if case == "generate":
                    result, tensors = run_generation(family, work)
                else:
                    result, tensors = run_case(CASES[case], family, work, name)
            results[name] = result | {"seconds": round(time.monotonic() - began, 1)}
            arrays |= {f"{name}: {key}": value for key, value in tensors.items()}
            end = "" if case == "generate" else f", last loss {float.fromhex(result['losses'][-1]):.6f}"
            print(f"{name}: {results[name]['seconds']} s{end}", flush=True)
            to.write_text(json.dumps(results))
    np.savez(to.with_suffix(".npz"), **arrays)  # pyright: ignore[reportArgumentType] - names of arrays, not options


def record(to: pathlib.Path, only: str) -> None:
    """One process for each number of devices, and their records together."""
    began = time.monotonic()
    results: dict[str, Fields] = {}
    arrays: Arrays = {}
    with tempfile.TemporaryDirectory() as folder:
        for devices in sorted({needs for *_, needs in names(only)}):
            part = pathlib.Path(folder) / f"{devices}.json"
            flags = f"{FLAGS} --xla_force_host_platform_device_count={devices}"
            env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
            env["TRANSFORMERS_VERBOSITY"] = "error"
            command = [sys.executable, __file__, "record-here", "--to", str(part), "--only", only]
            subprocess.run([*command, "--devices", str(devices)], env=env, check=True)
            results |= json.loads(part.read_text())
            arrays |= dict(np.load(part.with_suffix(".npz")))
    import jax

    about = {"seconds": round(time.monotonic() - began), "jax": jax.__version__, "updates": UPDATES}
    to.write_text(json.dumps(about | {"cases": results}, indent=1) + "\n", encoding="utf-8")
    np.savez_compressed(to.with_suffix(".npz"), **arrays)  # pyright: ignore[reportArgumentType]
    print(f"{len(results)} cases in {about['seconds']} s")


def relative(expected: np.ndarray, actual: np.ndarray) -> float:
    """The largest difference of two arrays over the largest number of the first; inf where shapes or NaNs differ."""
    if expected.shape != actual.shape:
        return float("inf")
    if not expected.size:
        return 0.0
    difference = float(np.max(np.abs(expected.astype(np.float64) - actual.astype(np.float64))))
    return float("inf") if np.isnan(difference) else difference / max(float(np.max(np.abs(expected))), 1e-30)


def compare_case(
    before: Fields, after: Fields, before_arrays: Arrays, after_arrays: Arrays, name: str
) -> tuple[float, str]:
    """(largest relative difference, its description) of a case; inf where it cannot be known or texts differ."""
    if {**before, "seconds": 0} == {**after, "seconds": 0}:
        return 0.0, "bit-equal"
    if before.get("texts") != after.get("texts"):
        return float("inf"), "the generated texts differ"
    losses = relative(_losses(before), _losses(after))
    if before["digest"] == after["digest"]:
        return losses, f"losses {losses:.1e}, arrays equal"
    expected = {key: array for key, array in before_arrays.items() if key.startswith(f"{name}: ")}
    actual = {key: array for key, array in after_arrays.items() if key.startswith(f"{name}: ")}
    if not expected or not actual:
        return float("inf"), f"losses {losses:.1e}, arrays differ (no .npz beside both records says how far)"
    if expected.keys() != actual.keys():
        return float("inf"), f"tensor names differ: {sorted(expected.keys() ^ actual.keys())[:3]}"
    arrays, worst = max((relative(expected[key], actual[key]), key) for key in expected)
    return max(losses, arrays), f"losses {losses:.1e}, arrays {arrays:.1e} ({worst.removeprefix(f'{name}: ')})"


def _losses(result: Fields) -> np.ndarray:
    return np.array([float.fromhex(loss) for loss in result.get("losses", ())])


def compare(before: pathlib.Path, after: pathlib.Path) -> int:
    """Prints a line per case and returns the exit status."""
    expected, actual = (json.loads(file.read_text())["cases"] for file in (before, after))
    before_arrays, after_arrays = (
        dict(np.load(file)) if file.exists() else {} for file in (before.with_suffix(".npz"), after.with_suffix(".npz"))
    )
    worst = 0.0
    for name in [name for name in expected if name in actual]:
        difference, description = compare_case(expected[name], actual[name], before_arrays, after_arrays, name)
        worst = max(worst, difference)
        print(f"{'' if difference <= LIMIT else 'FAILS '}{name}: {description}")
    for name in sorted(expected.keys() ^ actual.keys()):
        print(f"only in {before if name in expected else after}: {name}")
    print(f"worst: {worst:.1e}; the limit is {LIMIT:.0e}")
    return int(worst > LIMIT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("record", "record-here", "plans", "configs"):
        options = verbs.add_parser(verb)
        options.add_argument("--to", type=pathlib.Path, required=True)
        options.add_argument("--only", default="*", help="a pattern, such as 'llama, *'")
        if verb == "record-here":
            options.add_argument("--devices", type=int, required=True)
        if verb == "plans":
            options.add_argument("--configs", type=pathlib.Path, required=True)
    for verb in ("compare", "compare-plans"):
        options = verbs.add_parser(verb)
        options.add_argument("before", type=pathlib.Path)
        options.add_argument("after", type=pathlib.Path)
    args = parser.parse_args()
    match args.verb:
        case "record":
            record(args.to, args.only)
        case "record-here":
            record_here(args.to, args.only, args.devices)
        case "plans":
            plans_of_recipes.record(args.to, args.only, args.configs.resolve())
        case "configs":
            plans_of_recipes.write_configs(args.to)
        case "compare":
            return compare(args.before, args.after)
        case "compare-plans":
            return plans_of_recipes.compare(args.before, args.after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
