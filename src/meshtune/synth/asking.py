"""Asks the models for the answers that tasks need, in blocks of tasks with a journal each.

A server is asked by several threads. A model that is loaded here computes the requests that all tasks of a block wait
for from an empty batch, as the last bits of an answer depend on those that are computed with it: so the answers are
the same bits whichever process asks for which block, and however often one is killed.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import queue
import threading
from collections.abc import Callable, Sequence

from meshtune.config.data_recipe import DataRecipe
from meshtune.errors import UserError
from meshtune.evaluate.folder import Report
from meshtune.synth.journal import Journal
from meshtune.synth.maker import Maker, Question, Spent, TaskResult
from meshtune.synth.plan import Plan
from meshtune.synth.teachers import Answer, RequestFailed, RequestRefused, ServerTeacher, Stopped, Teacher

TASKS = 128  # of a block: several times the rows of a batch, so that few of them are idle at its end
PATIENCE = 4  # requests in a row that fail before nothing more is asked, and as many as are under way

Deliver = Callable[[Sequence[TaskResult]], None]
"""Takes the results of some tasks."""
Count = Callable[[TaskResult, Spent], None]
"""Takes the result of a task as soon as it is there, and what all have taken."""


def count_nothing(result: TaskResult, spent: Spent) -> None:
    """Does nothing."""


@dataclasses.dataclass
class Outcome:
    """Why tasks have no records: `failed` requests, by the task's number, and a budget that ended before a task.
    `spent` is everything that the answers took, those of the journals included."""

    within_budget: int
    failed: dict[int, str] = dataclasses.field(default_factory=dict)
    spent: Spent = dataclasses.field(default_factory=Spent)
    requested: int = 0
    replayed: int = 0


def journal_file(folder: pathlib.Path, block: int) -> pathlib.Path:
    """The file of a block's journal once all of its tasks were asked for."""
    return folder / f"{block:06}.jsonl"


def block_of(task: int) -> int:
    """The block of a task."""
    return task // TASKS


def count_blocks(tasks: int) -> int:
    """The number of blocks."""
    return -(-tasks // TASKS)


def run_tasks(
    plan: Plan,
    maker: Maker,
    teachers: Sequence[Teacher],
    journals: pathlib.Path,
    report: Report,
    *,
    deliver: Deliver,
    count: Count = count_nothing,
    blocks: Sequence[int] | None = None,
) -> Outcome:
    """Makes the records of all tasks, or of some `blocks`, and delivers them in the order of the tasks.

    The folder `journals` has the answers. `count` is called as tasks end, in any order. A task starts where the most
    that it can take is left of the budget; one that does not fit waits for those under way, so that where the budget
    ends depends on their answers only. Raises UserError of a teacher that cannot be asked.
    """
    journals.mkdir(parents=True, exist_ok=True)
    numbers = range(count_blocks(len(plan.tasks))) if blocks is None else blocks
    run = _Run(plan, maker, teachers, journals, report, deliver, count, numbers)
    try:
        (run.by_threads if all(isinstance(teacher, ServerTeacher) for teacher in teachers) else run.by_batches)()
        run.deliver(last=True)
    finally:
        run.close()
    if run.outcome.within_budget == 0:
        least = maker.most_spent(plan.tasks[0])
        price = f" and ${least.dollars:.4f}" if plan.recipe.budget.dollars is not None else ""
        problem = f"the budget is too small for one request, which can take {least.tokens:,} tokens{price}"
        raise UserError(problem, where="budget", fix="raise it, or lower teacher.max_tokens or attempts")
    return run.outcome


class _Run:
    """The state of `run_tasks`."""

    def __init__(
        self,
        plan: Plan,
        maker: Maker,
        teachers: Sequence[Teacher],
        folder: pathlib.Path,
        report: Report,
        deliver: Deliver,
        count: Count,
        blocks: Sequence[int],
    ):
        self._tasks, self._recipe, self._maker, self._teachers = plan.tasks, plan.recipe, maker, teachers
        self._folder, self._report, self._deliver, self._count = folder, report, deliver, count
        self._blocks = {number: range(len(plan.tasks))[number * TASKS : (number + 1) * TASKS] for number in blocks}
        self._waiting = list(blocks)  # those that are not delivered
        self._total, self._done = sum(map(len, self._blocks.values())), 0
        self._results: dict[int, TaskResult] = {}
        self._running: dict[int, Spent] = {}
        self._journals: dict[int, Journal] = {}
        self._failures = 0
        self.outcome = Outcome(len(plan.tasks))

    # Tasks

    def _fits(self, number: int) -> bool:
        """Whether a task fits into the rest of the budget."""
        budget, total = self._recipe.budget, self.outcome.spent
        if not has_budget(self._recipe):
            return True
        limits = [*self._running.values(), self._maker.most_spent(self._tasks[number])]
        tokens, dollars = (sum(spent.tokens for spent in limits), sum(spent.dollars for spent in limits))
        return (budget.tokens is None or total.tokens + tokens <= budget.tokens) and (
            budget.dollars is None or total.dollars + dollars <= budget.dollars
        )

    def _start(self, number: int) -> None:
        most = self._maker.most_spent(self._tasks[number]) if has_budget(self._recipe) else Spent()
        self._running[number] = most
        block = block_of(number)
        if block not in self._journals:
            self._journals[block] = Journal(journal_file(self._folder, block))

    def _end(self, number: int, result: TaskResult) -> None:
        self._running.pop(number, None)
        self._results[number], self._failures = result, 0
        self.outcome.spent.add_all(result.spent)
        self._count(result, self.outcome.spent)
        self._done += 1

    def _fail(self, number: int, failure: RequestFailed) -> None:
        """Raises UserError where too many requests have failed in a row."""
        self._running.pop(number, None)
        self.outcome.failed[number] = str(failure)
        self._failures, self._done = self._failures + 1, self._done + 1
        if self._failures >= PATIENCE + self._recipe.teacher.at_once:
            fix = "look at the server; then go on with --resume: no answer is asked for twice"
            raise UserError(f"{self._failures} requests in a row failed: {failure}", where="teacher", fix=fix)

    # Blocks

    def deliver(self, *, last: bool = False) -> None:
        """Delivers the results of complete blocks in their order, of all blocks with `last`, and closes journals."""
        while self._waiting:
            block = self._waiting[0]
            missing = [n for n in self._blocks[block] if n not in self._results and n not in self.outcome.failed]
            if missing and not last:
                return
            self._waiting.pop(0)
            self._close(block, complete=not missing)
            self._deliver([self._results.pop(n) for n in self._blocks[block] if n in self._results])

    def _close(self, block: int, *, complete: bool) -> None:
        journal = self._journals.pop(block, None)
        if journal is not None:
            journal.close(complete=complete)
            self.outcome.requested += journal.requested
            self.outcome.replayed += journal.replayed

    def close(self) -> None:
        """Closes the journals."""
        for block in list(self._journals):
            self._close(block, complete=False)

    # Servers

    def by_threads(self) -> None:
        """Runs `teacher.at_once` tasks at once, each in a thread."""
        changed, numbers = threading.Condition(), queue.SimpleQueue[int | None]()
        problems: list[BaseException] = []

        def work() -> None:
            while (number := numbers.get()) is not None:
                result: TaskResult | BaseException
                try:
                    result = self._make(number)
                except BaseException as problem:
                    result = problem
                with changed:
                    try:
                        if isinstance(result, TaskResult):
                            self._end(number, result)
                        elif isinstance(result, RequestFailed):
                            self._fail(number, result)
                        else:
                            self._running.pop(number)
                            raise result
                    except Stopped:
                        pass
                    except BaseException as problem:
                        problems.append(problem)
                    changed.notify_all()

        def wait_while(condition: Callable[[], bool]) -> None:
            while not problems and condition():
                changed.wait()
                self._report(self._done, self._total)
            if problems:
                raise problems[0]

        threads = [threading.Thread(target=work, daemon=True) for _ in range(self._recipe.teacher.at_once)]
        threads = threads[: self._total]
        for thread in threads:
            thread.start()
        try:
            for number in itertools.chain(*self._blocks.values()):
                with changed:
                    wait_while(
                        lambda number=number: (
                            len(self._running) >= len(threads) or bool(self._running and not self._fits(number))
                        )
                    )
                    if not self._fits(number):
                        self.outcome.within_budget = number
                        break
                    self._start(number)
                numbers.put(number)
                self.deliver()
            with changed:
                wait_while(lambda: bool(self._running))
        finally:
            for _ in threads:
                numbers.put(None)
            if self._running:  # an error, or Ctrl-C
                for teacher in self._teachers:
                    teacher.close()

    def _make(self, number: int) -> TaskResult:
        """Makes the records of a task. Raises as Teacher.ask does, but RequestRefused."""
        making, journal = self._maker.make(self._tasks[number]), self._journals[block_of(number)]
        try:
            question = next(making)
            while True:
                try:
                    answer = journal.get(question.key)
                    if answer is None:
                        assert isinstance(question.teacher, ServerTeacher)
                        answer = question.teacher.ask(question.request)
                        journal.append({question.key: answer})
                except RequestRefused as problem:
                    question = making.throw(problem)
                else:
                    question = making.send(answer)
        except StopIteration as end:
            return end.value

    # Models that are loaded here

    def by_batches(self) -> None:
        """Runs the tasks of one block after another, as many at once as the budget has room for."""
        for block in self._blocks.values():
            remaining = list(block)
            while remaining:
                group: list[int] = []
                while remaining and self._fits(remaining[0]):
                    group.append(remaining.pop(0))
                    self._start(group[-1])
                if not group:
                    self.outcome.within_budget = remaining[0]
                    return
                self._run_group(group)
            self.deliver()

    def _run_group(self, group: Sequence[int]) -> None:
        journal = self._journals[block_of(group[0])]
        making = {number: self._maker.make(self._tasks[number]) for number in group}
        questions: dict[int, Question] = {}

        def advance(number: int, answer: Answer | RequestRefused | None) -> None:
            """Takes a task to the next question that the journal has no answer to, or to its end."""
            try:
                while True:
                    send = making[number].throw if isinstance(answer, RequestRefused) else making[number].send
                    question = send(answer)  # pyright: ignore[reportArgumentType]
                    answer = journal.get(question.key)
                    if answer is None:
                        questions[number] = question
                        return
            except StopIteration as end:
                self._end(number, end.value)

        for number in group:
            advance(number, None)
        while questions:
            # In the order of the tasks, not in that in which answers have ended, so that a run that resumes has it too.
            batch = dict(sorted(questions.items()))
            questions.clear()
            answers: dict[str, Answer] = {}
            try:
                for teacher in self._teachers:
                    numbers = [number for number, question in batch.items() if question.teacher is teacher]
                    for place, answer in teacher.answers([batch[number].request for number in numbers]):
                        number = numbers[place]
                        if isinstance(answer, Answer):
                            answers[batch[number].key] = answer
                        if isinstance(answer, RequestFailed):
                            self._fail(number, answer)
                        else:
                            advance(number, answer)
                        self._report(self._done, self._total)
            except BaseException:
                # Of a part of a batch only what a server was asked for; the model computes the whole batch again.
                servers = {q.key for q in batch.values() if isinstance(q.teacher, ServerTeacher)}
                answers = {key: answer for key, answer in answers.items() if key in servers}
                raise
            finally:
                journal.append(answers)


def has_budget(recipe: DataRecipe) -> bool:
    """Whether the recipe limits what is spent."""
    return recipe.budget.tokens is not None or recipe.budget.dollars is not None


def missing_blocks(journals: pathlib.Path, tasks: int) -> list[int]:
    """The blocks, of any shard, whose tasks were not all asked for."""
    return [block for block in range(count_blocks(tasks)) if not journal_file(journals, block).is_file()]
