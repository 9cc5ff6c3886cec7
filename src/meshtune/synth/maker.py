"""Makes the records of one task: asks the teacher, checks its answers, and lets a judge score its records.

The making of a task is a generator of the requests that it needs, one after another, which is sent their answers: so
whoever runs it decides which tasks are asked for at once.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Generator, Mapping
from typing import Any, TypeVar

from meshtune.config.data_recipe import DataRecipe, Price, Rubric, Rule, load_rubric
from meshtune.errors import UserError
from meshtune.evaluate.metrics import f1
from meshtune.synth.documents import count_words
from meshtune.synth.filters import Dropped, MadeRecord, drop, local_filters
from meshtune.synth.kinds import (
    SCORE_SCHEMA,
    Kind,
    Task,
    conversation_text,
    draw,
    environment,
    parse_answer,
    render,
)
from meshtune.synth.teachers import Answer, Request, RequestRefused, Teacher

JUDGED = ("grounded", "quality")
RUBRIC_FIELDS = ("passage", "conversation", "question")


@dataclasses.dataclass
class Spent:
    """Tokens of prompts and answers, and dollars."""

    prompt: int = 0
    answer: int = 0
    dollars: float = 0.0

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.prompt + self.answer

    def add_all(self, spent: Spent) -> None:
        """Adds what something else took."""
        self.prompt, self.answer = self.prompt + spent.prompt, self.answer + spent.answer
        self.dollars += spent.dollars

    def add(self, prompt: int, answer: int, price: Price | None) -> None:
        """Adds a request."""
        self.prompt, self.answer = self.prompt + prompt, self.answer + answer
        if price is not None:
            self.dollars += (prompt * price.prompt + answer * price.answer) / 1e6


@dataclasses.dataclass
class TaskResult:
    """The records of a task, what filters dropped, and what it took."""

    records: list[MadeRecord] = dataclasses.field(default_factory=list)
    dropped: list[Dropped] = dataclasses.field(default_factory=list)
    spent: Spent = dataclasses.field(default_factory=Spent)


class _Unusable(Exception):
    """An answer that makes no record: (filter, reason, text)."""


@dataclasses.dataclass(frozen=True)
class Question:
    """A request to a model. Equal keys have equal answers."""

    teacher: Teacher
    request: Request

    @functools.cached_property
    def key(self) -> str:
        """The SHA-256 of model, prompt and sampling."""
        request = self.request
        content = json.dumps([self.teacher.identity, request.digest, request.seed, request.temperature])
        return hashlib.sha256(content.encode()).hexdigest()


T = TypeVar("T")
Asking = Generator[Question, Answer, T]
"""Asks questions, and is sent their answers; RequestRefused is thrown for one that the model cannot answer."""


class Maker:
    """Makes the records of tasks."""

    def __init__(self, recipe: DataRecipe, teacher: Teacher, judge: Teacher | None):
        self._recipe, self._teacher, self._judge = recipe, teacher, judge or teacher
        self._judge_price = (recipe.judge or recipe.teacher).price
        self._filters = list(local_filters(recipe.filters))
        self.rubrics = load_rubrics(recipe)

    def make(self, task: Task) -> Asking[TaskResult]:
        """Makes the records of a task. A request that is refused drops them."""
        result = TaskResult()
        try:
            make = self._pair if task.kind.template.gives_pairs else self._conversations
            records = yield from make(task, result)
        except RequestRefused as problem:
            result.dropped.append(_drop_task(task, "refused request", str(problem), ""))
            return result
        except _Unusable as problem:
            result.dropped.append(_drop_task(task, *problem.args))
            return result
        for record in records:
            dropped = yield from self._filter(task, record, result)
            if dropped is not None:
                result.dropped.append(dropped)
        return result

    # Requests

    def first_request(self, task: Task) -> Request:
        """The request that a task begins with."""
        template, seed = task.kind.template, draw(task.seed, "first", 0)
        if template.prompt is None:
            assert template.answer is not None
            return self._candidate_request(task, template.answer, task.variables, 0)
        messages = [("user", render(template.prompt, task.variables))]
        if template.system is not None:
            messages.insert(0, ("system", render(template.system, task.variables)))
        schema = task.kind.schema(task.subject)
        if schema is not None and self._recipe.teacher.is_server and self._recipe.teacher.structured != "schema":
            role, text = messages[-1]
            messages[-1] = (role, f"{text}\n\nThe answer is JSON of this schema: {json.dumps(schema)}")
        return Request(tuple(messages), seed, schema, pictures=task.subject.pictures)

    def _candidate_request(self, task: Task, text: str, variables: Mapping[str, Any], number: int) -> Request:
        messages = [("user", render(text, variables))]
        if self._recipe.system is not None:
            messages.insert(0, ("system", self._recipe.system))
        return Request(tuple(messages), draw(task.seed, "candidate", number), pictures=task.subject.pictures)

    def _ask(self, request: Request, result: TaskResult, *, judge: bool = False) -> Asking[Answer]:
        answer = yield Question(self._judge if judge else self._teacher, request)
        price = self._judge_price if judge else self._recipe.teacher.price
        result.spent.add(answer.prompt_tokens, answer.answer_tokens, price)
        return answer

    def _ask_value(self, request: Request, result: TaskResult, *, judge: bool = False) -> Asking[Any]:
        """The text of a complete answer, or its JSON where the request has a schema: of several attempts, the first one
        that has it. Raises _Unusable."""
        seed, problem, text = request.seed, "", ""
        for attempt in range(self._recipe.attempts):
            again = dataclasses.replace(request, seed=draw(seed, "attempt", attempt) if attempt else seed)
            if attempt and request.temperature == 0:  # the same again, but for a seed that servers ignore then
                again = dataclasses.replace(again, temperature=0.3)
            answer = yield from self._ask(again, result, judge=judge)
            text = answer.text
            if not answer.complete:
                problem = "the answer was cut off at max_tokens"
            elif request.schema is None:
                if text.strip():
                    return text.strip()
                problem = "the answer is empty"
            else:
                try:
                    return parse_answer(text, request.schema)
                except ValueError as error:
                    problem = str(error)
        raise _Unusable("schema", problem, text)

    # Records

    def _conversations(self, task: Task, result: TaskResult) -> Asking[list[MadeRecord]]:
        request = self.first_request(task)
        answer = yield from self._ask_value(request, result)
        conversations = list(task.kind.records(answer, task.variables))[: most_records(task.kind)]
        return [self._record(task, request, {"messages": messages}) for messages in conversations]

    def _pair(self, task: Task, result: TaskResult) -> Asking[list[MadeRecord]]:
        """A preference pair: the best and the worst of several answers."""
        template, variables = task.kind.template, dict(task.variables)
        assert template.answer is not None
        request, item = self.first_request(task), None
        if template.prompt is not None:
            item = yield from self._ask_value(request, result)
            variables["item" if request.schema is not None else "text"] = item
        texts: dict[str, None] = {}
        for number in range(template.candidates):
            candidate = self._candidate_request(task, template.answer, variables, number)
            answer = yield from self._ask(candidate, result)
            if answer.complete and answer.text.strip():
                texts[answer.text.strip()] = None
        candidates = list(texts)
        if len(candidates) < 2:
            raise _Unusable("candidates", "fewer than two different answers", "".join(candidates))
        if template.rule is not None:
            scores = [float(keeps(template.rule, text)) for text in candidates]
        else:
            assert template.rubric is not None
            scores = []
            for number, text in enumerate(candidates):
                prompt = render(template.rubric, {**variables, "text": text})
                scores.append((yield from self._score(task, "candidate", prompt, number, result)))
        if min(scores) == max(scores):
            name = "candidates" if template.rule is None else "rule"
            raise _Unusable(name, f"all candidates have the score {scores[0]:g}", "\n\n".join(candidates))
        chosen, rejected = (candidates[scores.index(best)] for best in (max(scores), min(scores)))
        (prompt,) = task.kind.records(item if item is not None else "", variables)
        fields = {
            "prompt": prompt,
            "chosen": [{"role": "assistant", "content": chosen}],
            "rejected": [{"role": "assistant", "content": rejected}],
        }
        return [self._record(task, request, fields, {"chosen": max(scores), "rejected": min(scores)})]

    def _record(
        self, task: Task, request: Request, fields: dict[str, Any], scores: Mapping[str, float] | None = None
    ) -> MadeRecord:
        first = "prompt" if "prompt" in fields else "messages"
        if self._recipe.system is not None:
            fields[first] = [{"role": "system", "content": self._recipe.system}, *fields[first]]
        subject = task.subject
        if subject.tools:
            fields["tools"] = [{"type": "function", "function": tool} for tool in subject.tools]
        if subject.pictures:
            fields["images"] = [picture_copy(picture, subject.sha256) for picture in subject.pictures]
        fields["provenance"] = {
            "source": subject.source,
            "place": subject.place,
            "sha256": subject.sha256,
            "kind": task.kind.name,
            "teacher": self._teacher.name,
            "prompt_sha256": request.digest,
            "seed": request.seed,
            "scores": dict(scores or {}),
        }
        messages = [*fields[first], *fields.get("chosen", [])]
        question = "\n".join(str(message["content"]) for message in messages if message["role"] == "user")
        answer = "\n".join(str(message["content"]) for message in messages if message["role"] == "assistant")
        return MadeRecord(fields, question, answer, subject.passage, task.held_out)

    # Filters

    def _filter(self, task: Task, record: MadeRecord, result: TaskResult) -> Asking[Dropped | None]:
        """Adds a record to the result, or returns why it is dropped."""
        for name, reason_of in self._filters:
            if (reason := reason_of(record)) is not None:
                return drop(record, name, reason)
        number, scores = len(result.records) + len(result.dropped), record.fields["provenance"]["scores"]
        filters, conversation = self._recipe.filters, conversation_text(record.messages)
        fields = {"passage": record.passage, "conversation": conversation, "question": record.question}
        try:
            if filters.agreement is not None and len(record.messages) - (self._recipe.system is not None) == 2:
                prompt = render(self.rubrics["agreement"].prompt, fields)
                request = Request((("user", prompt),), draw(task.seed, "agreement", number))
                second = yield from self._ask_value(request, result)
                scores["agreement"] = f1(second, record.answer)["f1"] / 100
                if scores["agreement"] < filters.agreement:
                    return drop(record, "agreement", f"F1 {scores['agreement']:.2f} with: {second[:200]}")
            for name in JUDGED:
                section = getattr(filters, name)
                if section is None or (name == "grounded" and not record.passage):
                    continue
                prompt = render(self.rubrics[name].prompt, fields)
                score = yield from self._score(task, name, prompt, number, result)
                scores[name] = score
                if score < section.least:
                    return drop(record, name, f"score {score:g} of 5")
        except _Unusable as problem:
            return drop(record, "judge", f"no score: {problem.args[1]}")
        except RequestRefused as problem:
            return drop(record, "refused request", str(problem))
        result.records.append(record)
        return None

    def _score(self, task: Task, name: str, prompt: str, number: int, result: TaskResult) -> Asking[float]:
        request = Request((("user", prompt),), draw(task.seed, name, number), SCORE_SCHEMA, temperature=0.0)
        answer = yield from self._ask_value(request, result, judge=True)
        return float(answer["score"])

    def prompt_tokens(self, task: Task) -> int:
        """Tokens of the prompt that a task begins with. Raises UserError for one that is too long."""
        return self._teacher.prompt_tokens(self.first_request(task))

    def most_spent(self, task: Task) -> Spent:
        """The most that a task can take: every attempt used, every answer as long as allowed."""
        template, recipe = task.kind.template, self._recipe
        filters = recipe.filters
        requests = 1 if template.prompt is not None else 0
        requests += template.candidates * (1 if template.rule is not None else 2) if template.gives_pairs else 0
        checks = sum(value is not None for value in (filters.agreement, filters.grounded, filters.quality))
        requests += checks * most_records(task.kind)
        longest = max(recipe.teacher.max_tokens, (recipe.judge or recipe.teacher).max_tokens)
        count = requests * recipe.attempts
        spent = Spent()
        prices = [price for price in (recipe.teacher.price, self._judge_price) if price is not None]
        price = max(prices, key=lambda price: price.answer) if prices else None
        prompt = self.prompt_tokens(task) + (longest if requests > 1 else 0)
        spent.add(count * prompt, count * longest, price)
        return spent


def most_records(kind: Kind) -> int:
    """Records of an answer at most: as many as the template's option `count`."""
    if kind.template.for_each is None:
        return 1
    count = kind.options.get("count", 8)
    return max(1, max(count) if isinstance(count, list) else int(count))


def keeps(rule: Rule, text: str) -> bool:
    """Whether an answer keeps a rule."""
    length = count_words(text)
    return (
        length >= rule.min_words
        and (rule.max_words is None or length <= rule.max_words)
        and (rule.matches is None or re.search(rule.matches, text) is not None)
        and (rule.lacks is None or re.search(rule.lacks, text) is None)
    )


def picture_copy(picture: str, sha256: str) -> str:
    """The path, from the output's folder, of the copy of a picture."""
    return f"pictures/{sha256[:16]}{pathlib.Path(picture).suffix.lower()}"


def load_rubrics(recipe: DataRecipe) -> dict[str, Rubric]:
    """The rubrics of the recipe's filters. Raises UserError for one with an unknown field."""
    from jinja2 import TemplateError, meta

    from meshtune.config.data_recipe import JudgedFilter
    from meshtune.errors import nearest

    rubrics: dict[str, Rubric] = {}
    for name in ("agreement", *JUDGED):
        section = getattr(recipe.filters, name)
        if section is None:
            continue
        rubrics[name] = load_rubric(section if isinstance(section, JudgedFilter) else JudgedFilter(), name)
        try:
            fields = meta.find_undeclared_variables(environment().parse(rubrics[name].prompt))
        except TemplateError as problem:
            fix = "write {{ name }} for a variable"
            what = f"the rubric is no Jinja template: {problem}"
            raise UserError(what, where=f"filters.{name}", fix=fix) from problem
        for field in sorted(fields - set(RUBRIC_FIELDS)):
            fix = f"{nearest(field, RUBRIC_FIELDS)}there are: {', '.join(RUBRIC_FIELDS)}"
            raise UserError(f"the rubric has an unknown field '{field}'", where=f"filters.{name}", fix=fix)
    return rubrics


def _drop_task(task: Task, name: str, reason: str, text: str) -> Dropped:
    return Dropped(name, reason, text, task.subject.source, task.subject.place)
