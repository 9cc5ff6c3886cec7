"""Files the compilers' plans of the headline recipes, and how long planning took.

python benchmarks/plans/run.py [NAME ...]     plans examples/headline/NAME.yaml (without names, all) for the target in
                                              its first line, and writes NAME.json, NAME.png and RESULTS.md; of a
                                              notebook of examples/notebooks, the recipe of its cell for each target
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
import tempfile
import time
from typing import Any

import yaml

FOLDER = pathlib.Path(__file__).parent
ROOT = FOLDER.parents[1]
RECIPES = ROOT / "examples/headline"
NOTEBOOKS = ROOT / "examples/notebooks"
NOTEBOOK_TARGETS = ("T4", "TPUv5e")  # what Colab and Kaggle lend
RECIPE_CELL = re.compile(r'^# %% tags=\["recipe"\]$(.*?)(?=^# %%|\Z)', re.DOTALL | re.MULTILINE)
GIB = 2**30
GRPO_DATA = {"train": "sums.jsonl", "validation": "sums-held-out.jsonl"}
# Upper limits in GiB per device.
GOALS = {
    "405b-lora-8xMI300X-short": 105.0, "405b-lora-8xMI300X": 150.0, "405b-qlora-8xH100": 64.0, "8b-qlora": 6.5,
    "8b-lora-64k": 21.0,
}  # fmt: skip

# The least memory that others published for tuning the same model in the same way, as they state it, and where.
UNSLOTH_TABLE, UNSLOTH_EXPERTS = "unsloth.ai/docs, requirements", "unsloth.ai/docs/basics/faster-moe"
UNSLOTH_QWEN35, FACTORY = "unsloth.ai/docs/models/qwen3.5/fine-tune", "LLaMA-Factory's README, hardware requirement"
VERL_DEVICES = "verl docs/perf/device_tuning.rst"
PUBLISHED = {
    "405b-qlora-8xH100": ("Unsloth 237 GB", UNSLOTH_TABLE),
    "8b-qlora": ("Unsloth 6 GB", UNSLOTH_TABLE),
    "8b-qlora-t4": ("Unsloth 6 GB", UNSLOTH_TABLE),
    "3b-lora-t4": ("Unsloth 8 GB", UNSLOTH_TABLE),
    "8b-lora-7900xtx": ("Unsloth 22 GB", UNSLOTH_TABLE),
    "70b-qlora-spark": ("Unsloth 41 GB", UNSLOTH_TABLE),
    "70b-qlora-strix-halo": ("Unsloth 41 GB", UNSLOTH_TABLE),
    "7b-full-16gb-amd": ("LLaMA-Factory 60 GB (weights in bfloat16 too)", "its README, hardware requirement"),
    "7b-full-16gb-nvidia": ("LLaMA-Factory 60 GB (weights in bfloat16 too)", "its README, hardware requirement"),
    "gpt-oss-20b-lora-16gb-amd": ("Unsloth 12.8 GB", UNSLOTH_EXPERTS),
    "gpt-oss-20b-lora-16gb": ("Unsloth 12.8 GB, axolotl 44 GiB", f"{UNSLOTH_EXPERTS}; axolotl examples/gpt-oss"),
    "gpt-oss-20b-lora": ("Unsloth 12.8 GB, axolotl 44 GiB", f"{UNSLOTH_EXPERTS}; axolotl examples/gpt-oss"),
    "gpt-oss-120b-lora": ("Unsloth 65 GB", "unsloth.ai/blog/gpt-oss"),
    "qwen3-30b-a3b-lora": ("Unsloth 63 GB", UNSLOTH_EXPERTS),
    "qwen3-30b-a3b-qlora": ("Unsloth 17.5 GB", "qwen.readthedocs.io, training with Unsloth"),
    "mixtral-8x7b-qlora": ("LLaMA-Factory 32 GB", "its README of January 2024"),
    "glm-4.5-air-lora": ("axolotl 63.4 GiB in 4 bits on one card", "axolotl examples/glm45"),
    "qwen3.5-27b-qlora-32k": ("axolotl 47 GiB, Unsloth 22 GB (any 27B)", f"axolotl examples/qwen3.5; {UNSLOTH_TABLE}"),
    "gemma-3-27b-qlora": ("Unsloth 22 GB (any 27B)", UNSLOTH_TABLE),
    "8b-grpo-lora": (
        "Unsloth 54.3 GB, TRL 510.8 GB: 8 completions in contexts of 20,480",
        "unsloth.ai/blog/grpo, as copies of it quote the figures",
    ),
    "8b-grpo-qlora": (
        "Unsloth 24 GB to a context of 32K (Qwen3-VL 8B); verl 2 x H800 at least (7B, all weights trained)",
        f"unsloth.ai/docs, grpo-long-context; {VERL_DEVICES}",
    ),
    "32b-grpo-lora-8xMI300X": (
        "verl 8 x H20 at least (all weights trained); Unsloth 1 x H100 to a context of 6,144",
        f"{VERL_DEVICES}; docs.unsloth.ai/basics/memory-efficient-rl",
    ),
    "70b-grpo-qlora-8xH100": (
        "verl 32 x H800 at least, TRL with vLLM 8 x H100 (72B, all weights trained)",
        f"{VERL_DEVICES}; huggingface.co/blog/vllm-colocate",
    ),
    "qwen2-vl-2b-full-24gb": (
        "LLaMA-Factory 18 GB (8 GB a billion weights, its rule for bfloat16), Unsloth 20 GB (Qwen3.5 2B, four times "
        "its LoRA), ms-swift none found",
        f"{FACTORY}; {UNSLOTH_QWEN35}",
    ),
    "qwen2-vl-2b-full-40gb": (
        "LLaMA-Factory 40 GB (18 GB a billion weights, its rule), Unsloth and ms-swift none found",
        FACTORY,
    ),
    "qwen2.5-vl-7b-qlora-16gb": (
        "LLaMA-Factory 6 GB, Unsloth 5 GB (any 7B, without pictures), ms-swift none found",
        f"{FACTORY}; {UNSLOTH_TABLE}",
    ),
    "qwen3-vl-30b-a3b-lora": (
        "ms-swift 2 x 70 GiB (16 rows each), LLaMA-Factory 64 GB (any 30B), Unsloth 74 GB (Qwen3.5 35B-A3B)",
        f"ms-swift examples/models/qwen3_vl/zero2.sh; {FACTORY}; {UNSLOTH_QWEN35}",
    ),
    "internvl3-78b-lora-8xMI300X": (
        "LLaMA-Factory 160 GB (any 70B), Unsloth 192 GB (any 81B), ms-swift 2 x 75 GB (QVQ 72B, a row of 2,048)",
        f"{FACTORY}; {UNSLOTH_TABLE}; ms-swift examples/train/multimodal/ocr.sh of 2025",
    ),
    "deepseek-v3-lora-8xH200": ("Colossal-AI 24 x H100, over bfloat16", "Colossal-AI's announcement of February 2025"),
}  # fmt: skip


def main(names: list[str]) -> None:
    """Plans the recipes and rewrites the table from all filed plans."""
    for recipe in sorted(RECIPES.glob("*.yaml")):
        if not names or recipe.stem in names:
            file(recipe)
    for notebook in sorted(NOTEBOOKS.glob("*.py")):
        if not names or notebook.stem in names:
            for target in NOTEBOOK_TARGETS:
                file_notebook(notebook, target)
    write_table()


def file(recipe: pathlib.Path) -> None:
    """Files one recipe's plan: JSON with the command and its duration, and a picture."""
    first = recipe.read_text(encoding="utf-8").splitlines()[0]
    arguments = re.search(r"meshtune plan \S+ (.*)", first)
    assert arguments, f"{recipe}: the first line has no command"
    shown = ["meshtune", "plan", str(recipe.relative_to(ROOT)), *arguments[1].split()]
    command = [sys.executable, "-m", *shown, "--json", "--picture", str(FOLDER / f"{recipe.stem}.png")]
    start = time.monotonic()
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    seconds = time.monotonic() - start
    if not ran.stdout.strip():
        print(f"{recipe.stem}: {ran.stderr.strip()}", file=sys.stderr)
        return
    about = {
        "command": " ".join(shown),
        "seconds": round(seconds, 1),
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "plan": json.loads(ran.stdout),
    }
    (FOLDER / f"{recipe.stem}.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    print(f"{recipe.stem}: {about['plan']['device_bytes'] / GIB:.1f} GiB, {seconds:.0f} s", flush=True)


def notebook_recipe(notebook: pathlib.Path) -> dict[str, Any]:
    """The recipe of the notebook's cell that is tagged as one."""
    [cell] = RECIPE_CELL.findall(notebook.read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    exec(cell, names)
    return names["recipe"]


def notebook_plan(notebook: pathlib.Path, target: str) -> pathlib.Path:
    """The file of a notebook's plan."""
    return FOLDER / f"notebook-{notebook.stem}-{target.lower()}.json"


def planned_part(recipe: dict[str, Any]) -> dict[str, Any]:
    """The keys that decide the step: without data, samples, evaluation and the folders of this machine."""
    part = {name: value for name, value in recipe.items() if name not in ("sample", "eval", "evaluate", "overwrite")}
    return part | {"model": recipe["model"].rpartition("/")[2], "data": {"max_length": recipe["data"]["max_length"]}}


def file_notebook(notebook: pathlib.Path, target: str) -> None:
    """Files the plan of a notebook's recipe, with the model's config in place of its weights."""
    recipe = notebook_recipe(notebook)
    folder = RECIPES / "models" / recipe["model"].rpartition("/")[2].removesuffix("-Instruct").lower()
    data = ROOT / "examples/data" / ("pictures.jsonl" if "vision" in recipe else "sharegpt.jsonl")
    rules: dict[str, Any] = {"sample": {}, "overwrite": False, "evaluate": None}
    if folder.is_dir():
        rules |= {"model": str(folder), "data": {"train": str(data), "max_length": recipe["data"]["max_length"]}}
    if recipe.get("stage") == "grpo":
        rules["data"] = recipe["data"] | {name: str(ROOT / f"examples/grpo/{file}") for name, file in GRPO_DATA.items()}
    if isinstance(recipe.get("stage"), dict) and recipe["stage"]["kind"] == "dpo":
        rules["data"] = recipe["data"] | {"train": str(ROOT / "examples/data/pairs.json")}
    with tempfile.TemporaryDirectory() as place:
        path = pathlib.Path(place) / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe | rules), encoding="utf-8")
        command = [sys.executable, "-m", "meshtune", "plan", str(path), "--target", target, "--json"]
        start = time.monotonic()
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        seconds = time.monotonic() - start
    if not ran.stdout.strip():
        print(f"{notebook.stem}, {target}: {ran.stderr.strip()}", file=sys.stderr)
        return
    about = {
        "command": f"python benchmarks/plans/run.py {notebook.stem}",
        "recipe": planned_part(recipe),
        "seconds": round(seconds, 1),
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "plan": json.loads(ran.stdout),
    }
    notebook_plan(notebook, target).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    print(f"{notebook.stem}, {target}: {about['plan']['device_bytes'] / GIB:.1f} GiB, {seconds:.0f} s", flush=True)


def write_table() -> None:
    """Writes RESULTS.md from all filed plans."""
    lines = [
        "# Plans of the headline recipes",
        "",
        "The step of `meshtune train`, compiled by XLA for machines that were not present: memory is the compilers'",
        "figure, times are a roofline's (docs/plan.md) and not measured. `python benchmarks/plans/run.py` repeats it.",
        "Planning time is on two cores with an empty cache of plans; llama2-70b-full, models that see and notebooks",
        "were planned beside other work.",
        "",
        "| recipe | target | tokens per update | memory per device | goal | host memory per device | update | tokens/s "
        "| MFU | planned in |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    filed = {
        recipe.stem: json.loads((FOLDER / f"{recipe.stem}.json").read_text(encoding="utf-8"))
        for recipe in sorted(RECIPES.glob("*.yaml"))
        if (FOLDER / f"{recipe.stem}.json").exists()
    }
    lines += [_row(name, about, about["plan"]) for name, about in filed.items()]
    for path in sorted(FOLDER.glob("notebook-*.json")):
        about = json.loads(path.read_text(encoding="utf-8"))
        lines.append(_row(path.stem, about, about["plan"], f"notebooks/{about['command'].split()[-1]}.py"))
    lines += [
        "",
        "## Rollouts of online stages",
        "",
        "An update's memory is the compiler's; that of a rollout, with its caches, and all times are estimates. Every",
        "prompt and completion is as long as the recipe allows. Messages, `direct` attention over all slots of a",
        "cache and weights that are decoded before every product are counted; rewards are not.",
        "",
        "| recipe | mesh | completions | decoded at once | memory of update, rollout | rollout | tokens/s | update |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [_rollout_row(name, about["plan"]) for name, about in filed.items() if about["plan"].get("rollout")]
    lines += [
        "",
        "## Beside what others published",
        "",
        "Their figures are what they state, mostly for shorter rows (Unsloth's GB are 2^30 bytes in its notebooks);",
        "ours are the compilers' for the rows of the table above.",
        "",
        "| recipe | memory by plan | published | where |",
        "| --- | --- | --- | --- |",
    ]
    for name, (figure, source) in PUBLISHED.items():
        if name in filed:
            plan = filed[name]["plan"]
            memory = plan["device_bytes"]
            ours = f"{plan['target']}: {memory / GIB:.1f} GiB"
            lines.append(f"| {name} | {ours} | {figure} | {source} |")
    (FOLDER / "RESULTS.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _rollout_row(name: str, plan: dict[str, Any]) -> str:
    rollout = plan["rollout"]
    cells = [
        name,
        " x ".join(f"{axis}={size}" for axis, size in plan["mesh"].items() if size > 1) or "-",
        f"{rollout['completions']} of {rollout['lengths']['completion']:,.0f}",
        str(rollout["rows"]),
        f"{sum(plan['breakdown'].values()) / GIB:.1f}, {rollout['device_bytes'] / GIB:.1f} GiB",
        f"{rollout['seconds']:.1f} s",
        f"{rollout['tokens_per_second']:,.0f}",
        f"{plan['step_seconds']:.1f} s",
    ]
    return f"| {' | '.join(cells)} |"


def _row(name: str, about: dict[str, Any], plan: dict[str, Any], source: str = "") -> str:
    goal = f"<= {GOALS[name]:g} GiB" if name in GOALS else f"fits {plan['device_capacity'] / GIB:.0f} GiB"
    note = " (estimated)" if plan["estimated"] else ""
    cells = [
        f"[{name}](../../examples/{source or f'headline/{name}.yaml'})",
        plan["target"],
        f"{plan['rows'] * plan['accumulation']} x {plan['row_length']:,}",
        f"{plan['device_bytes'] / GIB:.1f} GiB{note}{'' if plan['fits'] else ', does not fit'}",
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
