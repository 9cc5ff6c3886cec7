"""File the plans of the headline recipes: what the compilers say of each, and how long that took to find out.

python benchmarks/plans/run.py [NAME ...]     plans examples/headline/NAME.yaml (all without names) for the target that
                                              its first line gives, and writes NAME.json, NAME.png and RESULTS.md
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import time
from typing import Any

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
RECIPES = ROOT / "examples/headline"
GIB = 2**30
# GiB on a device that each is to stay below.
GOALS = {
    "405b-lora-8xMI300X-short": 105.0, "405b-lora-8xMI300X": 150.0, "405b-qlora-8xH100": 64.0, "8b-qlora": 6.5,
    "8b-lora-64k": 21.0,
}  # fmt: skip


def main(names: list[str]) -> None:
    """Plans each recipe and writes the table anew from all that is filed."""
    for recipe in sorted(RECIPES.glob("*.yaml")):
        if not names or recipe.stem in names:
            file(recipe)
    write_table()


def file(recipe: pathlib.Path) -> None:
    """One recipe's plan, as JSON with the command and the seconds it took, and its picture."""
    first = recipe.read_text(encoding="utf-8").splitlines()[0]
    given = re.search(r"meshtune plan \S+ (.*)", first)
    assert given, f"{recipe}: the first line gives no command"
    shown = ["meshtune", "plan", str(recipe.relative_to(ROOT)), *given[1].split()]
    command = [sys.executable, "-m", *shown, "--json", "--picture", str(HERE / f"{recipe.stem}.png")]
    began = time.monotonic()
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    took = time.monotonic() - began
    if not ran.stdout.strip():
        print(f"{recipe.stem}: {ran.stderr.strip()}", file=sys.stderr)
        return
    about = {
        "command": " ".join(shown),
        "seconds": round(took, 1),
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "plan": json.loads(ran.stdout),
    }
    (HERE / f"{recipe.stem}.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    print(f"{recipe.stem}: {about['plan']['device_bytes'] / GIB:.1f} GiB, {took:.0f} s", flush=True)


def write_table() -> None:
    """RESULTS.md from every filed plan."""
    lines = [
        "# Plans of the headline recipes",
        "",
        "What XLA's compilers say of the step of `meshtune train` for machines that were not there: memory is theirs,",
        "times are a roofline's (see docs/plan.md) and unproved. `python benchmarks/plans/run.py` makes this again.",
        "Seconds to the answer are of two cores, nothing in the cache of plans; llama2-70b-full beside other work.",
        "",
        "| recipe | target | tokens an update | memory of a device | goal | host memory a device | update | tokens/s "
        "| MFU | answered in |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for path in sorted(HERE.glob("*.json")):
        about = json.loads(path.read_text(encoding="utf-8"))
        lines.append(_row(path.stem, about, about["plan"]))
    (HERE / "RESULTS.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _row(name: str, about: dict[str, Any], plan: dict[str, Any]) -> str:
    goal = f"<= {GOALS[name]:g} GiB" if name in GOALS else f"fits {plan['device_capacity'] / GIB:.0f} GiB"
    source = " (estimated)" if plan["estimated"] else ""
    cells = [
        f"[{name}](../../examples/headline/{name}.yaml)",
        plan["target"],
        f"{plan['rows'] * plan['accumulation']} x {plan['row_length']:,}",
        f"{plan['device_bytes'] / GIB:.1f} GiB{source}{'' if plan['fits'] else ', does not fit'}",
        goal,
        f"{plan['host_bytes'] / GIB:.1f} GiB" if plan["host_bytes"] else "-",
        f"{plan['step_seconds']:.2f} s",
        f"{plan['tokens_per_second']:,.0f}",
        f"{100 * plan['mfu']:.0f}%",
        f"{about['seconds']:.0f} s",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main(sys.argv[1:])
