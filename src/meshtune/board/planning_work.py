"""Work of the planning process: plans a recipe, and resolves every `auto` of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from meshtune.board.data_preview import preview
from meshtune.board.planning import LOCAL, local_machine
from meshtune.board.recipe_text import content_of
from meshtune.config.data_recipe import load_data_recipe
from meshtune.config.load import load_recipe, silent
from meshtune.config.recipe import DEFAULT_EPOCHS, Recipe
from meshtune.costs.hardware import find_target
from meshtune.errors import UserError
from meshtune.plan.report import (
    PlanReport,
    Updates,
    compiler_for,
    lengths_of,
    report_for,
    to_json,
    updates_of,
    with_row_patches,
)
from meshtune.setup.choices import Decision, compute_of, optimizer_of
from meshtune.setup.machine import Machine
from meshtune.setup.search import memory_limit, predict_candidate, workload_of
from meshtune.synth.plan import describe_plan
from meshtune.translatable import Translatable, template_of


def plan(request: dict[str, Any]) -> dict[str, Any]:
    """The plan of {"recipe": YAML, "target": "here" or a name, "compile": bool, "price": float or null}."""
    recipe = load_recipe(content_of(request["recipe"]), notify=silent)
    target = local_machine() if request["target"] == LOCAL else find_target(request["target"])
    compile_step, reason = compiler_for(target) if request.get("compile") else (None, "")
    updates = _stated_updates(recipe)
    if request.get("count"):
        updates, recipe = updates_of(recipe), with_row_patches(recipe)
    price = request.get("price")
    report = report_for(
        recipe, target, compile_step, price=price, updates=updates, lengths=lengths_of(recipe), reason=reason
    )
    fields: dict[str, Any] = to_json(report) | {"reason": reason, "limit": report.best.memory_limit}
    for remedy, shown in zip(report.remedies, fields["remedies"], strict=True):
        shown["templates"] = _templates(remedy=remedy.name, cost=remedy.cost, refused=remedy.refusal)
    return {"plan": fields, "choices": [_choice(choice) for choice in choices(recipe, report)]}


def _stated_updates(recipe: Recipe) -> Updates:
    return Updates(recipe.train.steps, "train.steps" if recipe.train.steps else "")


def choices(recipe: Recipe, report: PlanReport) -> Iterable[Decision]:
    """Resolves every key that the recipe leaves open on the target of a plan, with the reason."""
    predicted, candidate = report.best.predicted, report.best.predicted.candidate
    work, device = candidate.workload, report.target.device
    precision = work.precision
    explicit = recipe.compute.precision != "auto"
    auto = Translatable("auto: {value} on {backend}", value=precision.name, backend=device.backend)
    why = Translatable("asked for") if explicit else auto
    yield Decision("compute.precision", precision.name, why)
    rate = optimizer_of(recipe, precision).learning_rate
    rate_is_set, method = recipe.optimizer.learning_rate is not None, recipe.method.kind
    yield Decision(
        "optimizer.learning_rate",
        f"{rate:g}",
        Translatable("asked for") if rate_is_set else Translatable("the default of method {method}", method=method),
    )
    if recipe.train.steps is None:
        epochs = recipe.train.epochs or DEFAULT_EPOCHS
        why = Translatable("asked for") if recipe.train.epochs else Translatable("the default")
        yield Decision("train.epochs", f"{epochs:g}", why)
    if recipe.mesh == "auto":
        value = str(predicted.mesh) if predicted.mesh.devices > 1 else Translatable("1 device")
        yield Decision("mesh", value, Translatable("auto: what is fastest and fits"))
    if recipe.train.micro_batch in ("auto", None):
        yield Decision(
            "train.micro_batch", str(candidate.rows), Translatable("{count} an update", count=candidate.accumulation)
        )
    devices = Machine(device.platform, (), device.arch)
    try:
        _, decisions = compute_of(
            predicted.recipe, work.spec, precision, candidate.rows, candidate.length, candidate.layout, devices
        )
    except UserError as error:
        decisions = [Decision("warning", error.what, error.fix or "")]
    for choice in decisions:
        fitted = choice.name == "remat" and recipe.compute.remat == "auto"
        yield Decision("compute.remat", choice.value, Translatable("auto: the faster that fits")) if fitted else choice
    yield from report.coverage


def _choice(decision: Decision) -> dict[str, Any]:
    templates = _templates(value=decision.value, reason=decision.reason)
    return {"name": decision.name, "value": decision.value, "reason": decision.reason, "templates": templates}


def _templates(**texts: str) -> dict[str, Any]:
    """Texts that the page translates, by name: a template with its values, or the text."""
    return {name: template_of(text) for name, text in texts.items()}


METHODS: dict[str, dict[str, Any]] = {
    "qlora": {"method": {"kind": "lora", "rank": 16, "alpha": 32}, "quantize": "nf4"},
    "lora": {"method": {"kind": "lora", "rank": 16, "alpha": 32}},
    "full": {"method": {"kind": "full"}},
}
ROW = 4096  # tokens, as in the list of models


def machine(_: dict[str, Any]) -> dict[str, Any]:
    """{"name", "memory"} of this machine: bytes of a device, without the reserve."""
    target = local_machine()
    return {"name": str(target), "memory": memory_limit(target)}


def methods(request: dict[str, Any]) -> dict[str, Any]:
    """The bytes of one device that each method takes for the model at {"path": ...}; a refusal in place of a number."""
    target = local_machine()
    sizes: dict[str, Any] = {}
    for name, fields in METHODS.items():
        content: dict[str, Any] = {
            "model": request["path"],
            "data": {"train": "none", "max_length": ROW},
            "output": "none",
            **fields,
        }
        content |= {"train": {"steps": 1, "batch_size": 1}, "mesh": {"dp": 1}}
        content |= {"compute": {"precision": "mixed", "remat": "full"}}
        try:
            recipe = load_recipe(content, notify=silent)
            sizes[name] = predict_candidate(
                recipe, target, workload_of(recipe, target.device.backend, target.device.arch)
            ).device_bytes
        except UserError as error:
            sizes[name] = error.what
    return {"bytes": sizes, **machine({})}


def generate(request: dict[str, Any]) -> dict[str, Any]:
    """The first prompts of {"recipe": YAML}, a recipe of data, and the most that it can take."""
    return describe_plan(load_data_recipe(content_of(request["recipe"])))


# What can be asked for, by the request's `work`. Raises: UserError, reported to the page.
WORK: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "plan": plan,
    "data": preview,
    "machine": machine,
    "methods": methods,
    "generate": generate,
}
