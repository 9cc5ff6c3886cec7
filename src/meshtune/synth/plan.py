"""The tasks of a recipe, before anything is asked."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from meshtune import terminal
from meshtune.config.data_recipe import DataRecipe
from meshtune.errors import UserError, amount
from meshtune.evaluate.folder import read_json
from meshtune.synth.documents import Library, describe_library, read_library, sha256_of
from meshtune.synth.filters import check_filters
from meshtune.synth.kinds import Kind, Subject, Task, make_tasks
from meshtune.synth.maker import Maker, Spent, load_rubrics
from meshtune.synth.subjects import all_subjects, read_conversations, source_digests

SOURCES = "sources.json"


@dataclasses.dataclass(frozen=True)
class Plan:
    """The tasks of a recipe, and their sources."""

    recipe: DataRecipe
    library: Library | None
    kinds: Sequence[Kind]
    subjects: Sequence[Subject]
    tasks: Sequence[Task]
    digests: Mapping[str, str]


def make_plan(recipe: DataRecipe) -> Plan:
    """Reads the sources and templates of a recipe. Raises UserError for whatever is wrong with them."""
    kinds = [Kind(section) for section in recipe.kinds]
    check_filters(recipe)
    load_rubrics(recipe)
    if recipe.mix is not None:
        for source in recipe.mix.data:
            read_conversations([source], "mix.data", first=True)
    digests = source_digests(recipe)
    library = read_library(recipe.documents, skip_bad=recipe.on_bad == "skip") if recipe.documents else None
    subjects = all_subjects(recipe, library)
    tasks = make_tasks(kinds, subjects, seed=recipe.seed, held_out=recipe.held_out, limit=recipe.limit)
    if not tasks:
        raise UserError("the shares of the kinds leave nothing to ask", where="kinds", fix="raise kinds.N.share")
    return Plan(recipe, library, kinds, subjects, tasks, digests)


def check_sources(output: pathlib.Path, digests: Mapping[str, str]) -> None:
    """Raises UserError for a document that has changed since a run began."""
    if not (output / SOURCES).is_file():
        return
    before = read_json(output / SOURCES)
    changed = [name for name, digest in digests.items() if before.get(name, digest) != digest]
    if changed:
        listed = ", ".join(changed[:4]) + (", ..." if len(changed) > 4 else "")
        fix = "restore it to go on, or begin again: --overwrite moves these records aside"
        raise UserError("a source has changed since these records were made", where=listed, fix=fix)


def changed_sources(digests: Mapping[str, str]) -> list[str]:
    """The sources whose bytes are others than those of `digests`, or that are gone."""
    changed: list[str] = []
    for name, digest in digests.items():
        try:
            unchanged = sha256_of(pathlib.Path(name)) == digest
        except UserError:
            unchanged = False
        if not unchanged:
            changed.append(name)
    return changed


def check_prompts(plan: Plan, maker: Maker, tasks: Sequence[Task]) -> None:
    """Raises UserError for the prompts that the teacher's context has no room for, before anything is asked."""
    section = plan.recipe.teacher
    for task in tasks:
        try:
            tokens = maker.prompt_tokens(task)
        except UserError as problem:
            raise UserError(problem.what, where=task.name, fix=problem.fix) from problem
        if section.context is not None and section.is_server and tokens + section.max_tokens > section.context:
            problem = (
                f"a prompt of about {tokens} tokens and an answer of {section.max_tokens} are more than the context of "
                f"{section.context} tokens"
            )
            raise UserError(problem, where=task.name, fix="lower passage_words or teacher.max_tokens")


def describe_plan(recipe: DataRecipe) -> dict[str, Any]:
    """The first prompt of each kind, and the most that all requests can take; asks nothing. Raises as make_plan does.

    {"documents": a line, "skipped": [(name, reason)], "prompts": [{"name", "messages": [(role, text)]}], "requests",
    "tokens", "dollars"}.
    """
    plan = make_plan(recipe)
    count = sum(subject.of == "passage" for subject in plan.subjects)
    maker = Maker(recipe, _Unasked(), None)  # pyright: ignore[reportArgumentType]
    first: dict[str, Task] = {}
    total = Spent()
    for task in plan.tasks:
        first.setdefault(task.kind.name, task)
        total.add_all(maker.most_spent(task))
    return {
        "documents": "" if plan.library is None else describe_library(plan.library, count),
        "skipped": [] if plan.library is None else list(plan.library.skipped),
        "prompts": [{"name": task.name, "messages": maker.first_request(task).messages} for task in first.values()],
        "requests": len(plan.tasks),
        "tokens": total.tokens,
        "dollars": total.dollars,
    }


def show_plan(recipe: DataRecipe, console: Console | None = None) -> None:
    """Prints the first prompt of each kind and the most that the requests can take; asks nothing."""
    console = console or terminal.console()
    plan = describe_plan(recipe)
    if plan["documents"]:
        console.print(plan["documents"], soft_wrap=True, markup=False)
    for name, reason in plan["skipped"]:
        console.print(f"left out: {name}: {reason}", soft_wrap=True, markup=False)
    for prompt in plan["prompts"]:
        console.rule(prompt["name"], style="dim", align="left")
        for role, text in prompt["messages"]:
            console.print(f"{role}: {text}", soft_wrap=True, markup=False, highlight=False)
    console.rule(style="dim")
    price = f", ${plan['dollars']:,.2f}" if plan["dollars"] else ""
    most = f"at most {plan['tokens']:,} tokens{price}, were every answer as long as allowed and every attempt used"
    console.print(f"{amount(plan['requests'], 'request')} for records; {most}", soft_wrap=True, markup=False)


class _Unasked:
    """A teacher that only counts."""

    name = identity = ""

    def prompt_tokens(self, request: Any) -> int:
        """About as many as there are."""
        return request.characters // 2
