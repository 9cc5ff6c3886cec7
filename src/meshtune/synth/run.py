"""`meshtune data generate`: asks a teacher for records of documents, and writes those that pass the filters.

The records are a function of the recipe and of the answers, whatever order these arrive in: every request has a seed
that its subject and kind decide, and records are written in the order of their tasks. Answers are in journals by the
hash of their request, so that a run that ended early continues without asking twice, and one run makes the records of
the answers that several processes asked for.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from meshtune import terminal
from meshtune.config.data_recipe import DataRecipe
from meshtune.errors import UserError, amount
from meshtune.evaluate.folder import check_folder, join_complete, read_json, results_folder, show_progress, write_json
from meshtune.options import Shard
from meshtune.synth.asking import (
    TASKS,
    Count,
    Deliver,
    Outcome,
    block_of,
    count_nothing,
    has_budget,
    missing_blocks,
    run_tasks,
)
from meshtune.synth.card import COUNTS, REPORT, card
from meshtune.synth.documents import describe_library
from meshtune.synth.journal import count_answers
from meshtune.synth.maker import Maker
from meshtune.synth.plan import SOURCES, Plan, check_prompts, check_sources, make_plan
from meshtune.synth.teachers import Teacher, check_teacher, closing, open_teacher
from meshtune.synth.writing import Counts, Writer, describe_recipe

JOURNAL = "journal"  # a folder with a file for each block of tasks


def check_shared(recipe: DataRecipe) -> None:
    """Raises UserError for a recipe whose tasks cannot be shared by several processes."""
    if has_budget(recipe):
        raise UserError(
            "shards ask at once, so none of them knows what the others leave of a budget",
            where="budget",
            fix="leave it out: --dry-run says the most that all requests can take, and `limit` lowers it",
        )


def generate_data(
    recipe: DataRecipe,
    *,
    shard: Shard = Shard(),
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
) -> pathlib.Path:
    """Makes the records of a recipe in its output folder, which it returns.

    Of a shard only the answers are asked for; once no shard is missing, all records are made of them. Raises UserError
    for whatever is wrong with recipe, sources and teacher, for an output that exists, for a source that has changed
    since the run began, and where no record is left.
    """
    console = console or terminal.console()
    if shard.count > 1:
        check_shared(recipe)
    output = pathlib.Path(recipe.output)
    check_folder(output, resume=resume or shard.count > 1, overwrite=overwrite)
    check_teacher(recipe.teacher)
    if recipe.judge is not None:
        check_teacher(recipe.judge, "judge")
    plan = make_plan(recipe)
    if (resume or shard.count > 1) and not overwrite:
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
            "tasks of a block": TASKS,
        }
        with results_folder(output, settings, resume=resume, overwrite=overwrite, shard=shard):
            write_json(output / SOURCES, dict(plan.digests))
            run = _Generation(plan, [teacher, *([judge] if judge is not None else [])], output, console)
            run.check(shard)
            try:
                if shard.count == 1:
                    return run.write()
                run.ask(shard)
                return join_complete(output, shard, run.missing, run.join, console) or output
            except KeyboardInterrupt:
                answers = amount(count_answers(output / JOURNAL), "answer")
                console.print(f"stopped: {answers} in the journal; --resume goes on", soft_wrap=True)
                raise


class _Generation:
    """The parts of `generate_data` that shards do, and one process."""

    def __init__(self, plan: Plan, teachers: list[Teacher], output: pathlib.Path, console: Console):
        self._plan, self._teachers, self._output, self._console = plan, teachers, output, console
        self._journals = output / JOURNAL
        self._maker = Maker(plan.recipe, teachers[0], teachers[1] if len(teachers) > 1 else None)

    def missing(self) -> list[int]:
        """The blocks of tasks, of any shard, that were not asked for."""
        return missing_blocks(self._journals, len(self._plan.tasks))

    def check(self, shard: Shard) -> None:
        """Raises UserError for a prompt of the shard that the teacher's context has no room for."""
        tasks = [task for number, task in enumerate(self._plan.tasks) if shard.takes(block_of(number))]
        check_prompts(self._plan, self._maker, tasks)

    def ask(self, shard: Shard) -> None:
        """Asks for the answers of the blocks of a shard."""
        blocks = [block for block in self.missing() if shard.takes(block)]
        self._run("answers", lambda results: None, blocks=blocks)

    def write(self) -> pathlib.Path:
        """Asks for the answers that no journal has, and writes the records of all."""
        writer, counts = Writer(self._plan, self._output), Counts(self._output / COUNTS)
        try:
            outcome = self._run("generating", writer.add, counts.add)
            for line in writer.finish(outcome, self._teachers[0].name):
                self._console.print(line, soft_wrap=True, markup=False)
            counts.remove()
        finally:
            writer.close()
        return self._output

    def join(self) -> pathlib.Path:
        """Writes the records, where no other process has written them of the same recipe."""
        before = read_report(self._output)
        if before is not None and before["recipe"] == describe_recipe(self._plan.recipe) and not before["failed"]:
            return self._output
        return self.write()

    def _run(
        self, activity: str, deliver: Deliver, count: Count = count_nothing, blocks: Sequence[int] | None = None
    ) -> Outcome:
        plan, journals = self._plan, self._journals
        with show_progress(self._console, activity) as report:
            return run_tasks(
                plan, self._maker, self._teachers, journals, report, deliver=deliver, count=count, blocks=blocks
            )


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
