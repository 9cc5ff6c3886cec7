"""`meshtune data generate`: asks a teacher for records of documents, and writes those that pass the filters.

The records are a function of the recipe and of the answers, whatever order these arrive in: every request has a seed
that its subject and kind decide, and records are written in the order of their tasks. Answers are in the journal by the
hash of their request, so that a run that ended early continues without asking twice.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import pathlib
import queue
import shutil
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from meshtune import terminal
from meshtune.config.data_recipe import DataRecipe
from meshtune.data.chat import as_dicts
from meshtune.data.mixing import draw as draw_numbers
from meshtune.errors import UserError, amount
from meshtune.evaluate.folder import (
    Report,
    check_folder,
    read_json,
    replace,
    results_folder,
    show_progress,
    write_json,
    write_lines,
)
from meshtune.synth.card import CARD, COUNTS, HELD_OUT, HELD_OUT_PAIRS, PAIRS, RECORD_FILES, RECORDS, REPORT, card
from meshtune.synth.documents import Library, describe_library, read_library, sha256_of
from meshtune.synth.filters import Dropped, check_filters, drop_duplicates, drop_evaluation
from meshtune.synth.journal import Journal
from meshtune.synth.kinds import Kind, Subject, Task, make_tasks
from meshtune.synth.maker import Maker, Spent, TaskResult, load_rubrics, picture_copy
from meshtune.synth.subjects import all_subjects, read_conversations, source_digests
from meshtune.synth.teachers import RequestFailed, Stopped, Teacher, check_teacher, closing, open_teacher

JOURNAL, SOURCES, DROPPED = "journal.jsonl", "sources.json", "dropped.jsonl"
COUNTS_SECONDS = 1.0  # between two writes
EXAMPLES = 3  # of what a filter dropped
NEWEST = 3  # records that are shown while others are made
PATIENCE = 4  # requests in a row that fail before nothing more is asked, and as many as are under way


@dataclasses.dataclass(frozen=True)
class Plan:
    """The tasks of a recipe, and their sources."""

    recipe: DataRecipe
    library: Library | None
    kinds: Sequence[Kind]
    subjects: Sequence[Subject]
    tasks: Sequence[Task]
    digests: Mapping[str, str]


@dataclasses.dataclass
class Outcome:
    """The results of tasks by their number, and why tasks have none: `failed` requests, and a budget that ended.
    `spent` is everything that the answers took, those of the journal included."""

    results: dict[int, TaskResult]
    failed: dict[int, str]
    within_budget: int
    spent: Spent = dataclasses.field(default_factory=Spent)


class Counts:
    """Counts records as they are made, with examples of those that filters dropped, in a file for whoever watches. The
    filters that compare all records come last, and are not in it."""

    def __init__(self, file: pathlib.Path):
        self._file, self._written = file, float("-inf")
        self._records = 0
        self._dropped: Counter[str] = Counter()
        self._examples: dict[str, list[dict[str, str]]] = {}
        self._newest: collections.deque[Mapping[str, Any]] = collections.deque(maxlen=NEWEST)

    def add(self, result: TaskResult, spent: Spent) -> None:
        """Adds the result of a task; `spent` is what all have taken."""
        self._records += len(result.records)
        self._newest += [record.fields for record in result.records]
        for entry in result.dropped:
            self._dropped[entry.filter] += 1
            examples = self._examples.setdefault(entry.filter, [])
            if len(examples) < EXAMPLES:
                examples.append(_example(entry))
        if time.monotonic() - self._written > COUNTS_SECONDS:
            self._written = time.monotonic()
            fields = {
                "made": self._records + self._dropped.total(),
                "dropped": dict(self._dropped),
                "examples": self._examples,
                "newest": list(self._newest),
                "tokens": {"prompts": spent.prompt, "answers": spent.answer},
                "dollars": round(spent.dollars, 6),
            }
            with contextlib.suppress(OSError):  # nothing depends on it
                write_json(self._file, fields)

    def remove(self) -> None:
        """Removes the file, when the report is there."""
        self._file.unlink(missing_ok=True)


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


def generate_data(
    recipe: DataRecipe, *, resume: bool = False, overwrite: bool = False, console: Console | None = None
) -> pathlib.Path:
    """Makes the records of a recipe in its output folder, which it returns.

    Raises UserError for whatever is wrong with recipe, sources and teacher, for an output that exists, for a source
    that has changed since the run began, and where no record is left.
    """
    console = console or terminal.console()
    output = pathlib.Path(recipe.output)
    check_folder(output, resume=resume, overwrite=overwrite)
    check_teacher(recipe.teacher)
    if recipe.judge is not None:
        check_teacher(recipe.judge, "judge")
    plan = make_plan(recipe)
    if resume and not overwrite:
        check_sources(output, plan.digests)
    if plan.library is not None:
        count = sum(subject.of == "passage" for subject in plan.subjects)
        console.print(describe_library(plan.library, count), soft_wrap=True, markup=False)
    teacher = open_teacher(recipe.teacher)
    judge = open_teacher(recipe.judge, "judge") if recipe.judge is not None else None
    with closing(teacher, judge):
        settings = {
            "teacher": teacher.identity,
            "judge": judge.identity if judge is not None else None,
            "seed": recipe.seed,
        }
        with results_folder(output, settings, resume=resume, overwrite=overwrite):
            write_json(output / SOURCES, dict(plan.digests))
            journal = Journal(output / JOURNAL)
            try:
                maker = Maker(recipe, teacher, judge, journal)
                _check_prompts(plan, maker)
                if len(journal):
                    console.print(f"{amount(len(journal), 'answer')} of earlier in the journal", soft_wrap=True)
                counts = Counts(output / COUNTS)
                with show_progress(console, "generating") as report:
                    models = [teacher, *([judge] if judge is not None else [])]
                    outcome = run_tasks(plan, maker, models, report, counts)
                _write(plan, maker, teacher, outcome, output, console)
                counts.remove()
            except KeyboardInterrupt:
                console.print(
                    f"stopped: {amount(len(journal), 'answer')} in the journal; --resume goes on", soft_wrap=True
                )
                raise
            finally:
                journal.close()
    return output


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


def _check_prompts(plan: Plan, maker: Maker) -> None:
    """Raises UserError for the prompts that the teacher's context has no room for, before anything is asked."""
    section = plan.recipe.teacher
    for task in plan.tasks:
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


def run_tasks(plan: Plan, maker: Maker, teachers: Sequence[Teacher], report: Report, counts: Counts) -> Outcome:
    """Makes the records of all tasks, `teacher.at_once` of them at once.

    A task starts where the most that it can take is left of the budget; one that does not fit waits for those under
    way, so that where the budget ends depends on their answers only. Raises UserError of a teacher that cannot be
    asked.
    """
    recipe, tasks = plan.recipe, plan.tasks
    outcome = Outcome({}, {}, len(tasks))
    changed, numbers = threading.Condition(), queue.SimpleQueue[int | None]()
    problems: list[BaseException] = []
    running: dict[int, Spent] = {}
    failures = 0

    def work() -> None:
        nonlocal failures
        while (number := numbers.get()) is not None:
            result, failure, problem = None, None, None
            try:
                result = maker(tasks[number])
            except RequestFailed as error:
                failure = str(error)
            except BaseException as error:
                problem = error
            with changed:
                running.pop(number)
                if result is not None:
                    outcome.results[number], failures = result, 0
                    outcome.spent.add_all(result.spent)
                    counts.add(result, outcome.spent)
                elif failure is not None:
                    outcome.failed[number], failures = failure, failures + 1
                    if failures >= PATIENCE + recipe.teacher.at_once:
                        fix = "look at the server; then go on with --resume: no answer is asked for twice"
                        problem = UserError(f"{failures} requests in a row failed: {failure}", where="teacher", fix=fix)
                if problem is not None and not isinstance(problem, Stopped):
                    problems.append(problem)
                changed.notify_all()

    def fits(number: int) -> bool:
        """Whether a task fits into the rest of the budget."""
        budget, total = recipe.budget, outcome.spent
        if budget.tokens is None and budget.dollars is None:
            return True
        limits = [*running.values(), maker.most_spent(tasks[number])]
        tokens, dollars = (sum(spent.tokens for spent in limits), sum(spent.dollars for spent in limits))
        return (budget.tokens is None or total.tokens + tokens <= budget.tokens) and (
            budget.dollars is None or total.dollars + dollars <= budget.dollars
        )

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(recipe.teacher.at_once, len(tasks)))]
    for thread in threads:
        thread.start()
    try:
        for number in range(len(tasks)):
            with changed:
                while not problems and (len(running) >= len(threads) or (running and not fits(number))):
                    changed.wait()
                    report(len(outcome.results) + len(outcome.failed), len(tasks))
                if problems:
                    raise problems[0]
                if not fits(number):
                    outcome.within_budget = number
                    break
                running[number] = maker.most_spent(tasks[number]) if has_limits(recipe) else Spent()
            numbers.put(number)
        with changed:
            while running and not problems:
                changed.wait()
                report(len(outcome.results) + len(outcome.failed), len(tasks))
            if problems:
                raise problems[0]
    finally:
        for _ in threads:
            numbers.put(None)
        if running:  # an error, or Ctrl-C
            for teacher in teachers:
                teacher.close()
    if outcome.within_budget == 0:
        least = maker.most_spent(tasks[0])
        price = f" and ${least.dollars:.4f}" if recipe.budget.dollars is not None else ""
        problem = f"the budget is too small for one request, which can take {least.tokens:,} tokens{price}"
        raise UserError(problem, where="budget", fix="raise it, or lower teacher.max_tokens or attempts")
    return outcome


def has_limits(recipe: DataRecipe) -> bool:
    return recipe.budget.tokens is not None or recipe.budget.dollars is not None


def _write(
    plan: Plan, maker: Maker, teacher: Teacher, outcome: Outcome, output: pathlib.Path, console: Console
) -> None:
    """Compares all records, mixes general data in, and writes the files. Raises UserError where none is left."""
    recipe = plan.recipe
    results = [outcome.results[number] for number in sorted(outcome.results)]
    records = [record for result in results for record in result.records]
    dropped = [entry for result in results for entry in result.dropped]
    total = len(records) + len(dropped)
    if recipe.filters.duplicates is not None:
        records, duplicates = drop_duplicates(records, recipe.filters.duplicates)
        dropped += duplicates
    if recipe.filters.evaluation:
        records, copies = drop_evaluation(records, recipe.filters)
        dropped += copies
    general = _general(recipe, sum(not record.is_pair and not record.held_out for record in records))
    files: dict[str, list[Mapping[str, Any]]] = {name: [] for name in RECORD_FILES}
    for record in records:
        name = (
            (HELD_OUT_PAIRS if record.is_pair else HELD_OUT)
            if record.held_out
            else PAIRS
            if record.is_pair
            else RECORDS
        )
        files[name].append(record.fields)
    files[RECORDS] += general
    for subject in plan.subjects:
        for picture in subject.pictures:
            copy = output / picture_copy(picture, subject.sha256)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(picture, copy)
    for name, rows in files.items():
        if rows:
            write_lines(output / name, rows)
        else:
            (output / name).unlink(missing_ok=True)
    write_lines(output / DROPPED, [dataclasses.asdict(entry) for entry in dropped])
    spent = outcome.spent
    fields = {
        "recipe": recipe.model_dump(mode="json", exclude_defaults=True),
        "teacher": teacher.name,
        "records": {name: len(rows) for name, rows in files.items() if rows},
        "kinds": dict(Counter(record.fields["provenance"]["kind"] for record in records)),
        "sources": dict(Counter(record.fields["provenance"]["source"] for record in records)),
        "made": total,
        "dropped": dict(Counter(entry.filter for entry in dropped)),
        "examples": {name: _examples(dropped, name) for name in dict.fromkeys(entry.filter for entry in dropped)},
        "general": len(general),
        "general_share": len(general) / len(files[RECORDS]) if general else 0.0,
        "skipped_documents": [list(entry) for entry in (plan.library.skipped if plan.library is not None else ())],
        "changed_sources": changed_sources(plan.digests),
        "requests": {"asked": maker.requested, "of the journal": maker.replayed},
        "tokens": {"prompts": spent.prompt, "answers": spent.answer},
        "dollars": round(spent.dollars, 6),
        "tasks": len(plan.tasks),
        "tasks_beyond_budget": len(plan.tasks) - outcome.within_budget,
        "failed": [f"{plan.tasks[number].name}: {text}" for number, text in sorted(outcome.failed.items())],
    }
    write_json(output / REPORT, fields)
    replace(output / CARD, card(fields))
    for line in _summary(fields, output):
        console.print(line, soft_wrap=True, markup=False)
    if not records:
        counts = ", ".join(f"{name} {count}" for name, count in fields["dropped"].items()) or "no answers"
        fix = (
            f"{output / CARD} shows examples; change filters, and go on with --resume: answers are not asked for twice"
        )
        raise UserError(f"no record is left; dropped: {counts}", where=str(output), fix=fix)


def _examples(dropped: Sequence[Dropped], name: str) -> list[dict[str, str]]:
    return [_example(entry) for entry in dropped if entry.filter == name][:EXAMPLES]


def _example(entry: Dropped) -> dict[str, str]:
    return {"reason": entry.reason, "text": entry.text[:400], "source": entry.source, "place": entry.place}


def _summary(fields: Mapping[str, Any], output: pathlib.Path) -> list[str]:
    lines = [f"{output / name}: {amount(count, 'record')}" for name, count in fields["records"].items()]
    if fields["general"]:
        lines.append(f"general data: {fields['general']} records, {fields['general_share']:.0%} of {RECORDS}")
    if fields["dropped"]:
        lines.append("dropped: " + ", ".join(f"{name} {count}" for name, count in fields["dropped"].items()))
    tokens = fields["tokens"]
    price = f", ${fields['dollars']:.4f}" if fields["dollars"] else ""
    lines.append(f"tokens: {tokens['prompts']:,} of prompts, {tokens['answers']:,} of answers{price}")
    if beyond := fields["tasks_beyond_budget"]:
        lines.append(f"the budget ended before {amount(beyond, 'request')}: raise it, and go on with --resume")
    if failed := fields["failed"]:
        lines.append(f"{amount(len(failed), 'request')} failed: ask again with --resume; the first: {failed[0]}")
    if changed := fields["changed_sources"]:
        lines.append(f"changed while records were made, which are of the earlier text: {', '.join(changed)}")
    return lines


def _general(recipe: DataRecipe, count: int) -> list[Mapping[str, Any]]:
    """General conversations, enough for their share next to `count` records, or all if there are too few."""
    if recipe.mix is None or not count:
        return []
    conversations = read_conversations(recipe.mix.data, "mix.data")
    number = min(len(conversations), round(count * recipe.mix.share / (1 - recipe.mix.share)))
    chosen = draw_numbers(len(conversations), number, np.random.default_rng([recipe.seed, 0x67656E]))
    rows: list[Mapping[str, Any]] = []
    for index in chosen.tolist():
        origin = conversations[index].origin
        tools = {"tools": [dict(tool) for tool in conversations[index].tools]} if conversations[index].tools else {}
        provenance = {"source": origin.source, "place": f"record {origin.record}", "kind": "general"}
        rows.append({"messages": as_dicts(conversations[index]), **tools, "provenance": provenance})
    return rows


def describe_plan(recipe: DataRecipe) -> dict[str, Any]:
    """The first prompt of each kind, and the most that all requests can take; asks nothing. Raises as make_plan does.

    {"documents": a line, "skipped": [(name, reason)], "prompts": [{"name", "messages": [(role, text)]}], "requests",
    "tokens", "dollars"}.
    """
    plan = make_plan(recipe)
    count = sum(subject.of == "passage" for subject in plan.subjects)
    maker = Maker(recipe, _Unasked(), None, _NoJournal())  # pyright: ignore[reportArgumentType]
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


class _NoJournal:
    """A journal without answers."""


class _Unasked:
    """A teacher that only counts."""

    name = identity = ""

    def prompt_tokens(self, request: Any) -> int:
        """About as many as there are."""
        return request.characters // 2


def read_report(folder: pathlib.Path) -> dict[str, Any] | None:
    """The report of a folder that `generate_data` wrote; None for any other."""
    return read_json(folder / REPORT) if (folder / REPORT).is_file() else None


def show_generated(folder: pathlib.Path, records: int, console: Console | None = None) -> None:
    """Prints the first records of a folder with their provenance, the counts, and what filters dropped."""
    from meshtune.evaluate.folder import read_lines
    from meshtune.synth.kinds import conversation_text

    console = console or terminal.console()
    report = read_report(folder)
    assert report is not None
    for name in report["records"]:
        for row in read_lines(folder / name)[:records]:
            source = row["provenance"]
            console.rule(
                f"{name}: {source['kind']} of {source['source']}, {source['place']}", style="dim", align="left"
            )
            text = conversation_text([*row.get("prompt", ()), *row.get("messages", ())])
            for answer in ("chosen", "rejected"):
                text += f"\n{answer} {conversation_text(row[answer])}" if answer in row else ""
            console.print(text, soft_wrap=True, markup=False, highlight=False)
            console.print(json.dumps(source, ensure_ascii=False), style="dim", soft_wrap=True, markup=False)
    console.rule(style="dim")
    console.print(card(report), soft_wrap=True, markup=False, highlight=False)
