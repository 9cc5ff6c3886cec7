"""The model card of a push: base, data, recipe and results of a model."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from meshtune.config import yaml_text
from meshtune.config.load import load_recipe
from meshtune.config.recipe import Recipe
from meshtune.data.registry import load_registry
from meshtune.data.sources import READERS, file_type
from meshtune.errors import UserError
from meshtune.json_text import read_bytes, read_json
from meshtune.objectives.stages import STAGES
from meshtune.runs.output import RECIPE, read_run
from meshtune.weights.hub import HUB_ID, modelscope_id

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelCardData

SNAPSHOT = re.compile(r"models--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})")
LICENCES = (
    ("apache-2.0", ("Apache License", "Version 2.0")),
    ("mit", ("MIT License", "Permission is hereby granted")),
    ("gpl-3.0", ("GNU GENERAL PUBLIC LICENSE", "Version 3")),
)
STAGE_TITLES = {
    "sft": "supervised fine-tuning",
    "pt": "continued pre-training",
    "rm": "a reward model of preference pairs",
}
LIBRARY = {"adapter": "peft", "model": "transformers", "merged": "transformers", "gguf": "gguf"}
KINDS = {
    "adapter": "A PEFT adapter for",
    "model": "A model tuned from",
    "merged": "An adapter merged into",
    "gguf": "GGUF files of a model tuned from",
}
CHAT_TEMPLATE, GENERATION = "chat_template.jinja", "generation_config.json"
ANSWER_SHOWN = 600  # characters
LOSSES_SHOWN = 12
SAMPLES_SHOWN = 3
NOT_SHOWN = ("resume", "overwrite", "accept_changes", "hub")  # commands of the run, and where it was pushed
EVALUATION = "evaluation"
COMPARED = ("## Professional ability", "## General ability")
TEMPLATE = Path(__file__).with_name("card.md.jinja")


@dataclasses.dataclass(frozen=True)
class Licence:
    """A licence by the hub's name for it; `title` and `link` belong to "other", `file` is its text."""

    id: str
    title: str | None = None
    link: str | None = None
    file: Path | None = None


@dataclasses.dataclass(frozen=True)
class Base:
    """The model that a result was tuned from.

    `path` is as the run spells it, `name` what it is called elsewhere; `hub_id` is its id on the hub, if known.
    """

    path: str
    name: str
    hub_id: str | None
    revision: str | None = None
    hash: str | None = None
    licence: Licence | None = None


def public_base(
    path: str, *, hub_id: str | None, revision: str | None, hash: str | None, directory: Path | None
) -> Base:
    """Describes the base at `path` for others; `hub_id` overrides what its folder and config say."""
    local = directory or Path(path).expanduser()
    cached = SNAPSHOT.search(local.as_posix())
    if hub_id is None and HUB_ID.match(path) and modelscope_id(path) is None and not Path(path).expanduser().is_dir():
        hub_id = path
    if hub_id is None and cached:
        hub_id, revision = f"{cached[1]}/{cached[2]}", revision or cached[3]
    if hub_id is None:
        hub_id = _named_by_config(local)
    name = hub_id or modelscope_id(path) or Path(path).expanduser().absolute().name
    return Base(path, name, hub_id, revision if hub_id else None, hash, licence_of(local))


def with_hub_licence(base: Base, api: HfApi) -> Base:
    """The base with the licence that its page on the hub states, where its folder states none."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    if base.licence is not None or base.hub_id is None:
        return base
    with contextlib.suppress(HfHubHTTPError, HTTPError, OSError):
        card = api.model_info(base.hub_id, revision=base.revision).card_data
        return dataclasses.replace(base, licence=_stated_licence(card.to_dict() if card is not None else {}, None))
    return base


def licence_of(directory: Path) -> Licence | None:
    """The licence that the README.md, config.json or LICENSE file of a model's folder states; None where none does."""
    file = next((path for path in sorted(directory.glob("LICENSE*")) if path.is_file()), None)
    for fields in (front_matter(directory / "README.md"), _json(directory / "config.json")):
        if (stated := _stated_licence(fields, file)) is not None:
            return stated
    if file is None:
        return None
    text = file.read_text(encoding="utf-8", errors="replace")[:4000]
    known = next((id for id, marks in LICENCES if all(mark in text for mark in marks)), None)
    return Licence(known, file=file) if known else Licence("other", title=file.name, file=file)


def front_matter(card: Path) -> dict[str, Any]:
    """The YAML in front of a model card; {} where there is none."""
    try:
        text = read_bytes(card).decode()
        fields = yaml_text.read(text.split("---", 2)[1], str(card)).value if text.startswith("---") else {}
    except (ValueError, IndexError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _stated_licence(fields: dict[str, Any], file: Path | None) -> Licence | None:
    licence = fields.get("license")
    if isinstance(licence, list) and licence:
        licence = licence[0]
    if not isinstance(licence, str) or not licence:
        return None
    name, link = (fields.get(key) if isinstance(fields.get(key), str) else None for key in _NAME_AND_LINK)
    return Licence(licence, name, link if link and link.startswith("http") else None, file)


_NAME_AND_LINK = ("license_name", "license_link")


def _named_by_config(directory: Path) -> str | None:
    named = _json(directory / "config.json").get("_name_or_path")
    return named if isinstance(named, str) and HUB_ID.match(named) and not Path(named).is_dir() else None


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except UserError:
        return {}


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
    """The answers of the base and, after update `step`, of the result to a prompt of the recipe."""

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
    """Returns an id of the hub unchanged, and the last part of a path."""
    local = Path(path).expanduser()
    if HUB_ID.match(path) and not local.exists() and file_type(local) not in (*READERS, ".gz"):
        return path
    return local.name


def _data_fact(source: Any, recipe: Recipe, run: Path) -> DataFact:
    if source.path is None:
        try:
            registry = load_registry(recipe.data.registry or "")
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
    steps = _spread_evenly(sorted(validation) if len(validation) > 1 else sorted(epochs), LOSSES_SHOWN)
    return [(step, epochs[step], train.get(step), validation.get(step)) for step in steps]


def _samples(file: Path) -> list[Sample]:
    """The first and the last answer to the first prompts that were answered before the first update."""
    answers: dict[tuple[str, str], dict[int, str]] = {}
    for row in _rows(file):
        if isinstance(row.get("prompt"), str) and isinstance(row.get("text"), str):
            answers.setdefault((row["prompt"], str(row.get("pictures"))), {})[row["step"]] = row["text"]
    compared = [(prompt, texts) for (prompt, _), texts in answers.items() if 0 in texts and len(texts) > 1]
    return [Sample(prompt, texts[0], max(texts), texts[max(texts)]) for prompt, texts in compared[:SAMPLES_SHOWN]]


def _rows(metrics: Path) -> list[dict[str, Any]]:
    rows = []
    for line in metrics.read_text(encoding="utf-8", errors="replace").splitlines() if metrics.is_file() else ():
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError):  # the last line of a process that was killed
            continue
    return [row for row in rows if isinstance(row, dict)]


def _spread_evenly(steps: Sequence[int], most: int) -> list[int]:
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


@dataclasses.dataclass(frozen=True)
class Subject:
    """The files of a card: `kind` is adapter, model, merged or gguf; `base` is None if it is unknown;
    `ends` are the tokens at which its texts end."""

    repository: str
    kind: str
    base: Base | None
    run: RunFacts | None
    files: Sequence[str]
    scored: bool = False
    ends: Sequence[str] = ()


def model_card(subject: Subject) -> str:
    """Returns README.md as Markdown, with the hub's metadata in front."""
    from huggingface_hub import ModelCard

    base, run, repository = subject.base, subject.run, subject.repository
    base_name = base.name if base else "BASE"
    named = subject.kind != "adapter" or base is None or base.hub_id is not None
    context = {
        "title": KINDS[subject.kind],
        "stage": STAGE_TITLES.get(run.stage, run.stage.upper()) if run else "",
        "base_name": base_name,
        "spoken": repository if named else f"{base_name} --adapter {repository}",
        "automatic": "AutoModelForSequenceClassification" if subject.scored else "AutoModelForCausalLM",
        "own_ends": subject.kind == "adapter" and GENERATION in subject.files and not subject.scored,
        "chats": CHAT_TEMPLATE in subject.files,
        "gguf": next((name for name in subject.files if name.endswith(".gguf")), "FILE.gguf"),
        "data": _data_table(run) if run else [],
        "quoted": _quote_text,
    }
    fields = {field.name: getattr(subject, field.name) for field in dataclasses.fields(subject)}
    return str(ModelCard.from_template(_metadata(subject), template_path=str(TEMPLATE), **fields | context))


def _metadata(subject: Subject) -> ModelCardData:
    from huggingface_hub import EvalResult, ModelCardData

    base, run = subject.base, subject.run
    licence = base.licence if base else None
    task = "text-classification" if subject.scored else "text-generation"
    fields: dict[str, Any] = {}
    if base and base.hub_id:
        fields |= {"base_model": base.hub_id, "base_model_relation": _relation(subject)}
    if licence:
        fields |= {"license": licence.id, "license_name": licence.title, "license_link": licence.link}
    tags = ["meshtune", *(dict.fromkeys((run.stage, run.method)) if run else ())]
    if run:
        fields["datasets"] = [fact.name for fact in run.data if fact.hub] or None
    if run and (losses := [validation for *_, validation in run.losses if validation is not None]):
        loss = EvalResult(task, "validation", "validation data of the recipe", "loss", round(losses[-1], 4))
        fields |= {"model_name": subject.repository.split("/")[1], "eval_results": [loss]}
    return ModelCardData(library_name=LIBRARY[subject.kind], tags=tags, pipeline_tag=task, **fields)


def _relation(subject: Subject) -> str:
    """The relation of a result to its base, in the hub's words ("merge" is a merge of several models)."""
    if subject.kind == "gguf" and subject.run is None:
        return "quantized"
    return "adapter" if subject.kind == "adapter" else "finetune"


def _data_table(run: RunFacts) -> list[Sequence[str]]:
    columns = {
        "source": [f"`{fact.name}`" for fact in run.data],
        "split": [fact.split for fact in run.data],
        "revision": [fact.revision for fact in run.data],
        "SHA-256 of the file": [fact.sha256 and f"`{fact.sha256}`" for fact in run.data],
    }
    shown = {name: [cell or "" for cell in cells] for name, cells in columns.items() if any(cells)}
    return [tuple(shown), *zip(*shown.values(), strict=True)]


def _quote_text(text: str) -> str:
    """Text in a block of code whose fence it cannot end."""
    shown = text.strip() if len(text.strip()) <= ANSWER_SHOWN else f"{text.strip()[:ANSWER_SHOWN]} ..."
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", shown)), default=0))
    return "\n".join(f"  {line}" for line in (f"{fence}text", *shown.splitlines(), fence)) + "\n"
