"""What `meshtune plan --estimate` says of every headline recipe, recorded and compared."""

from __future__ import annotations

import fnmatch
import json
import os
import pathlib
import re
import resource
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECIPES = ROOT / "examples/headline"
LIMIT = 0.01  # of the memory of a device


def record(to: pathlib.Path, only: str) -> None:
    """Plans each recipe for the target that its first line names, with the meshtune that PYTHONPATH names."""
    results: dict[str, Any] = {}
    for recipe in sorted(RECIPES.glob("*.yaml")):
        if not fnmatch.fnmatch(recipe.stem, only):
            continue
        target = re.search(r"meshtune plan \S+ (.*)", recipe.read_text(encoding="utf-8").splitlines()[0])
        assert target, f"{recipe}: the first line gives no command"
        command = [sys.executable, "-m", "meshtune", "plan", str(recipe.relative_to(ROOT)), *target[1].split()]
        start = _cpu_seconds()
        process = subprocess.run(
            [*command, "--estimate", "--json"],
            cwd=ROOT, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
        seconds = _cpu_seconds() - start
        assert process.stdout.strip(), f"{recipe.stem}: {process.stderr}"
        results[recipe.stem] = {"cpu_seconds": round(seconds, 2), "plan": json.loads(process.stdout)}
        print(f"{recipe.stem}: {results[recipe.stem]['plan']['device_bytes'] / 2**30:.2f} GiB, {seconds:.1f} s of CPU")
    to.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


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
    """Prints a line a recipe, with every part that moved by more than LIMIT; exit status 1 if device_bytes did."""
    first, second = (json.loads(file.read_text()) for file in (before, after))
    failed = False
    for name in first:
        expected, actual = numbers(first[name]["plan"]), numbers(second[name]["plan"])
        moved = {
            path: (expected[path], actual.get(path))
            for path in expected
            if path not in actual or abs(expected[path] - actual[path]) > LIMIT * max(abs(expected[path]), 1e-12)
        }
        memory = expected["/device_bytes"], actual["/device_bytes"]
        failed |= abs(memory[0] - memory[1]) > LIMIT * memory[0]
        seconds = first[name]["cpu_seconds"], second[name]["cpu_seconds"]
        print(f"{name}: {memory[1] / memory[0] - 1:+.3%} of the memory, {seconds[0]} s then, {seconds[1]} s now")
        for path, (old, new) in moved.items():
            print(f"    {path}: {old:g} then, {new if new is None else format(new, 'g')} now")
    return int(failed)
