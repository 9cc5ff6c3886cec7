"""What a model card says of a run: its recipe and data under public names, its losses, its evaluation."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from meshtune.config.load import load_recipe
from meshtune.config.recipe import Recipe
from meshtune.data.registry import Registry
from meshtune.data.sources import READERS, file_type
from meshtune.errors import UserError
from meshtune.hub.base_model import Base
from meshtune.objectives.stages import STAGES
from meshtune.runs.output import RECIPE, read_run
from meshtune.weights.hub import HUB_ID

LOSSES_SHOWN = 12
SAMPLES_SHOWN = 3
NOT_SHOWN = ("resume", "overwrite", "accept_changes", "hub")  # commands of the run, and where it was pushed
EVALUATION = "evaluation"
COMPARED = ("## Professional ability", "## General ability")


@dataclasses.dataclass(frozen=True)
class DataFact:
    """A source of training data. `sha256` is that of a file which has not changed since the run."""

    name: str
    hub: bool
    split: str | None = None
    revision: str | None = None
    sha256: str | None = None


@dataclasses.dataclass(frozen=True)
class Sample:
    """What the base and, after update `step`, the result answered to a prompt of the recipe."""

    prompt: str
    before: str
    step: int
    after: str


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """A run, in public names. `losses` are rows of (step, epoch, training loss, validation loss)."""

    recipe: str
    stage: str
    method: str
    rank: int | None
    alpha: float | None
    data: list[DataFact]
    counts: Mapping[str, Any]
    fingerprint: str | None
    steps: int | None
    losses: list[tuple[int, float, float | None, float | None]]
    best: Mapping[str, Any] | None
    versions: Mapping[str, str]
    plot: Path | None
    evaluation: str
    samples: Sequence[Sample] = ()


def run_facts(run: Path, base: Base) -> RunFacts:
    """Reads the facts of a run from what it left in its directory. Raises UserError, DamagedError as the readers do."""
    recipe, fields = load_recipe(run / RECIPE), read_run(run)
    plot = run / "loss.png"
    return RunFacts(
        recipe=_recipe_text(recipe, base),
        stage=recipe.stage.kind,
        method=recipe.method.kind if recipe.method.kind != "lora" else getattr(recipe.method, "adapter", "lora"),
        rank=getattr(recipe.method, "rank", None),
        alpha=getattr(recipe.method, "alpha", None),
        data=[_data_fact(source, recipe, run) for source in recipe.data.train],
        counts=fields.get("trained_on") or {},
        fingerprint=fields.get("data"),
        steps=fields.get("step"),
        losses=_losses(run / "metrics.jsonl"),
        best=fields.get("best"),
        versions=fields.get("versions") or {},
        plot=plot if plot.is_file() else None,
        evaluation=_comparison(run / EVALUATION),
        samples=_samples(run / "samples.jsonl"),
    )


def _recipe_text(recipe: Recipe, base: Base) -> str:
    """The recipe without its defaults, and with names in the place of paths."""
    fields = recipe.model_dump(mode="json", exclude_defaults=True)
    for key in NOT_SHOWN:
        fields.pop(key, None)
    model, data = fields["model"], fields["data"]
    model["path"] = base.name
    for section, keys in ((model, ("tokenizer", "chat_template", "adapter")), (data, ("registry",))):
        section.update({key: public_path(section[key]) for key in keys if section.get(key)})
    if model.get("merge_adapters"):
        model["merge_adapters"] = [public_path(path) for path in model["merge_adapters"]]
    for split in ("train", "validation"):
        for source in data[split] if isinstance(data.get(split), list) else ():
            if source.get("path"):
                source["path"] = public_path(source["path"])
    if isinstance(fields.get("stage"), dict) and fields["stage"].get("reference"):
        fields["stage"]["reference"] = public_path(fields["stage"]["reference"])
    if isinstance(count := data.get("validation"), float) and count.is_integer():
        data["validation"] = int(count)
    tasks = (fields.get("evaluate") or {}).get("tasks") or {}
    tasks.update({name: public_path(path) for name, path in tasks.items() if path})
    fields["output"] = f"runs/{Path(recipe.output).name}"
    return yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)


def public_path(path: str) -> str:
    """An id of the hub as it is, and the last part of a path."""
    local = Path(path).expanduser()
    if HUB_ID.match(path) and not local.exists() and file_type(local) not in (*READERS, ".gz"):
        return path
    return local.name


def _data_fact(source: Any, recipe: Recipe, run: Path) -> DataFact:
    if source.path is None:
        try:
            registry = Registry.load(recipe.data.registry or "")
            entry = registry.source(source, STAGES[recipe.stage.kind].dataset_type)
        except UserError:  # the registry is no longer where it was
            return DataFact(source.name, False)
        return _data_fact(entry, recipe, run)
    public, file = public_path(source.path), Path(source.path).expanduser()
    if not file.exists() and public == source.path and "/" in public:
        return DataFact(public, True, source.split, source.revision)
    return DataFact(public, False, sha256=_sha256(file) if _is_older(file, run / RECIPE) else None)


def _is_older(file: Path, recipe: Path) -> bool:
    """Whether a file is in its place since before a run began. A copy may keep its time of writing (`cp -p`), and never
    that of its last change of state."""
    if not file.is_file():
        return False
    times = file.stat()
    return max(times.st_mtime, times.st_ctime) <= recipe.stat().st_mtime


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _losses(metrics: Path) -> list[tuple[int, float, float | None, float | None]]:
    """Losses by update, at most LOSSES_SHOWN of them; every row of an evaluation that is shown has both losses."""
    train, validation, epochs = {}, {}, {}
    for row in _rows(metrics):
        if isinstance(row.get("loss"), float) and isinstance(row.get("step"), int):
            (train if row.get("kind") == "train" else validation)[row["step"]] = row["loss"]
            epochs[row["step"]] = row.get("epoch", 0.0)
    steps = _spread(sorted(validation) if len(validation) > 1 else sorted(epochs), LOSSES_SHOWN)
    return [(step, epochs[step], train.get(step), validation.get(step)) for step in steps]


def _samples(file: Path) -> list[Sample]:
    """The first and the last answer to the first prompts that were answered before the first update."""
    answers: dict[str, dict[int, str]] = {}
    for row in _rows(file):
        if isinstance(row.get("prompt"), str) and isinstance(row.get("text"), str):
            answers.setdefault(row["prompt"], {})[row["step"]] = row["text"]
    compared = [(prompt, texts) for prompt, texts in answers.items() if 0 in texts and len(texts) > 1]
    return [Sample(prompt, texts[0], max(texts), texts[max(texts)]) for prompt, texts in compared[:SAMPLES_SHOWN]]


def _rows(metrics: Path) -> list[dict[str, Any]]:
    rows = []
    for line in metrics.read_text(encoding="utf-8", errors="replace").splitlines() if metrics.is_file() else ():
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError):  # the last line of a process that was killed
            continue
    return [row for row in rows if isinstance(row, dict)]


def _spread(steps: Sequence[int], most: int) -> list[int]:
    """At most `most` of `steps`, evenly spread, with the first and the last."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(index * (len(steps) - 1) / (most - 1))] for index in range(most)]


def _comparison(folder: Path) -> str:
    """The findings and tables of the newest comparison with the base, without the answers, which quote the data."""
    reports = sorted(folder.glob("*/report.md"), key=lambda path: path.stat().st_mtime)
    parts = []
    for section in reports[-1].read_text(encoding="utf-8").split("\n## ") if reports else ():
        if section.startswith("# "):
            parts += [line for line in section.splitlines() if line.startswith(("- ", "> "))]
        elif f"## {section}".startswith(COMPARED):
            parts += ["", f"#{'## ' + section}".rstrip()]
    return "\n".join(parts)
