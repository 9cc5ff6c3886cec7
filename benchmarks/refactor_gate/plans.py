"""What `meshtune plan --estimate` says of every recipe in examples/, recorded and compared.

The models of most recipes are on the hub. `write_configs` writes a config.json for each of them once, which a plan
needs of a model: the published one where the tests have it, else that of the family's small model in the tests.
"""

from __future__ import annotations

import fnmatch
import json
import math
import os
import pathlib
import re
import resource
import subprocess
import sys
from typing import Any

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
# Models on the hub whose configs are in examples/headline/models.
MODELS = {
    "meta-llama/Llama-3.1-70B-Instruct": "llama-3.1-70b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
}
LIMIT = 0.01  # of every number of a plan


def recipes(only: str) -> list[pathlib.Path]:
    """The recipes whose path in examples/ without its suffix matches a pattern."""
    paths = sorted(EXAMPLES.rglob("*.yaml"))
    return [path for path in paths if fnmatch.fnmatch(_name(path), only)]


def write_configs(to: pathlib.Path) -> None:
    """Writes config.json into a folder for each recipe whose model is on the hub."""
    sys.path.insert(0, str(ROOT / "tests"))
    from families.case import SMALL
    from families.cases import CASES
    from families.published_configs import PUBLISHED

    for path in recipes("*"):
        model = _model(path)
        if path.parent.name == "headline":
            continue
        family = path.stem if path.parent.name == "families" else _family(model)
        if model in MODELS:
            config = json.loads((EXAMPLES / "headline/models" / MODELS[model] / "config.json").read_text())
        elif model in PUBLISHED:
            config = dict(PUBLISHED[model])
        elif family == "baichuan":
            config = json.loads((EXAMPLES / "headline/models/baichuan2-7b/config.json").read_text())
        else:
            case_of = {"kimi_k2": "deepseek_v3"}.get(family, family)
            case = next(case for case in CASES if case.model_type == case_of)
            small = {"vocab_size": 1024, "max_position_embeddings": max(8192, SMALL["max_position_embeddings"])}
            config = json.loads(case.changed(**small).torch_config().to_json_string(use_diff=False))
            config |= {"model_type": family}
        config |= {"torch_dtype": "bfloat16", "dtype": "bfloat16"}
        folder = to / _name(path)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _family(model: str) -> str:
    """The model type of a model on the hub, by its name."""
    name = model.rpartition("/")[2].lower()
    return next(
        family for family in ("qwen3", "qwen2", "mistral", "llama") if family in name.replace("smollm2", "llama")
    )


def record(to: pathlib.Path, only: str, configs: pathlib.Path) -> None:
    """Plans each recipe with the meshtune that PYTHONPATH names, for the target that its first line names, else for as
    many H100s as its mesh has."""
    results: dict[str, Any] = {}
    for recipe in recipes(only):
        text = recipe.read_text(encoding="utf-8")
        target = re.search(r"meshtune plan \S+ (.*)", text.splitlines()[0])
        arguments = target[1].split() if target else ["--target", _machine(text), "--tokens", "1e8"]
        if recipe.parent.name != "headline":
            arguments.insert(0, f"model.path={configs / _name(recipe)}")
            small = {"kind: lora": "method.rank=4", "quantize:": "quantize.block_size=8", "galore": "optimizer.rank=4"}
            arguments[1:1] = [override for key, override in small.items() if key in text]
        command = [sys.executable, "-m", "meshtune", "plan", str(recipe.relative_to(ROOT)), *arguments]
        start = _cpu_seconds()
        process = subprocess.run(
            [*command, "--estimate", "--json"],
            cwd=ROOT, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        seconds = _cpu_seconds() - start
        assert process.stdout.strip(), f"{_name(recipe)}: {process.stderr}"
        plan = json.loads(process.stdout)
        results[_name(recipe)] = {"cpu_seconds": round(seconds, 2), "plan": plan}
        to.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(f"{_name(recipe)}: {plan['device_bytes'] / 2**30:.2f} GiB, {seconds:.1f} s of CPU", flush=True)


def _name(recipe: pathlib.Path) -> str:
    return str(recipe.relative_to(EXAMPLES).with_suffix(""))


def _model(recipe: pathlib.Path) -> str:
    model = yaml.safe_load(recipe.read_text(encoding="utf-8"))["model"]
    return model if isinstance(model, str) else model["path"]


def _machine(text: str) -> str:
    """As many H100s as the recipe's mesh has devices, eight to a machine."""
    mesh = yaml.safe_load(text).get("mesh")
    devices = math.prod(mesh.values()) if isinstance(mesh, dict) else 1
    return f"{devices // 8}x8xH100" if devices > 8 else f"{devices}xH100"


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def numbers(value: object, at: str = "") -> dict[str, float]:
    """Every number of a JSON value by its path."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return {}
    if isinstance(value, int | float):
        return {at: float(value)}
    items = value.items() if isinstance(value, dict) else enumerate(value)  # pyright: ignore[reportArgumentType]
    return {path: number for key, part in items for path, number in numbers(part, f"{at}/{key}").items()}


def compare(before: pathlib.Path, after: pathlib.Path) -> int:
    """Prints a line a recipe, with every number that moved by more than LIMIT; exit status 1 if one did."""
    first, second = (json.loads(file.read_text()) for file in (before, after))
    failed = first.keys() != second.keys()
    for name in [name for name in first if name in second]:
        expected, actual = numbers(first[name]["plan"]), numbers(second[name]["plan"])
        moved = {
            path: (expected.get(path), actual.get(path))
            for path in expected.keys() | actual.keys()
            if not (path in expected and path in actual)
            or abs(expected[path] - actual[path]) > LIMIT * max(abs(expected[path]), 1e-12)
        }
        failed |= bool(moved)
        same = "equal" if expected == actual else "within 1%"
        seconds = first[name]["cpu_seconds"], second[name]["cpu_seconds"]
        print(f"{name}: {'FAILS' if moved else same}; planned in {seconds[0]} s then, {seconds[1]} s now")
        for path, numbers_ in moved.items():
            print(f"    {path}: {numbers_[0]} then, {numbers_[1]} now")
    return int(failed)
