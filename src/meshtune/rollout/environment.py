"""Environments: objects of the user whose methods are tools that completions call, by TRL's contract.

An environment has `reset(**columns)`, which may return text that is appended to the prompt's last message; public
methods with typed arguments and docstrings, the tools; and, if it likes, `get_reward()`, one more reward of weight 1
(https://huggingface.co/docs/trl/grpo_trainer#environments). Its objects live in process 0, one for each completion of a
rollout, and are reset before every use.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import json
import queue
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from meshtune.calls.formats import AnswerFormat, Tool, ToolCall, call_format
from meshtune.calls.reader import answer_reader
from meshtune.data.chat import template_error
from meshtune.errors import UserError, nearest
from meshtune.generate.text import chat_template, chat_text, encoded_chat, special_ids
from meshtune.rollout.generate import Completion, Episode, Turn
from meshtune.rollout.reward_functions import Completions, NamedFunction, load_callable

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerFast

    from meshtune.config.sections import RolloutSection
    from meshtune.data.prompts import PromptRecord
    from meshtune.mesh.processes import Job

COLUMN = "environment"  # of records, where a recipe has several environments by name
CONTRACT = ("reset", "get_reward")  # methods that are no tools


@dataclasses.dataclass(frozen=True)
class Environment:
    """A kind of environment. `make()` returns an object of class `type`; `tools` are its tools by name."""

    place: str
    make: Callable[[], Any]
    type: type
    tools: Mapping[str, Tool]

    @property
    def has_reward(self) -> bool:
        return callable(getattr(self.type, "get_reward", None))


class Environments:
    """The environments of a recipe, with an object for every completion of a rollout.

    `rewards` are those whose objects have `get_reward`, by class name. `files` are those that they were made of.
    Methods run in one thread, `timeout` seconds at most for the calls of a turn: what an object holds, such as a
    connection, may belong to a thread. One that does not return ends the run, as it cannot be stopped.

    Raises: UserError for a file or class that does not exist, one without `reset`, and a method that no schema can be
    made of.
    """

    def __init__(self, options: RolloutSection):
        assert options.environment is not None
        self.is_named = isinstance(options.environment, Mapping)
        texts = options.environment if isinstance(options.environment, Mapping) else {"": options.environment}
        self.max_turns, self._timeout = options.max_turns, options.tool_timeout
        self._thread = _CallThread()
        self.files: set[Path] = set()
        self._kinds: dict[str, Environment] = {}
        self._pools: dict[str, list[Any]] = {}
        for name, text in texts.items():
            where = ".".join(filter(None, ("rollout.environment", name)))
            make, place, files = load_callable(text, where, "class")
            self.files |= set(files)
            example = self._call(make, f"'{text}'", place)
            self._kinds[name] = Environment(place, make, type(example), _tools(type(example), place))
            self._pools[name] = [example]
        self.rewards: dict[str, Environment] = {}
        for name, kind in self._kinds.items():
            if kind.has_reward and kind.type not in [other.type for other in self.rewards.values()]:
                taken = kind.type.__name__ in self.rewards
                self.rewards[f"{kind.type.__name__}_{name}" if taken else kind.type.__name__] = kind
        self.instances: list[Any] = []
        self._kinds_of_instances: list[Environment] = []

    def kind_of(self, record: PromptRecord) -> Environment:
        """The environment of a record. Raises: UserError for one that names none of several."""
        return self._kinds[self._name(record)]

    def _name(self, record: PromptRecord) -> str:
        name = str(record.columns.get(COLUMN)) if self.is_named else ""
        if name not in self._kinds:
            names = ", ".join(self._kinds)
            raise UserError(
                f"the field '{COLUMN}' is {record.columns.get(COLUMN)!r}, which rollout.environment does not have",
                where=str(record.origin),
                fix=f"{nearest(name, self._kinds)}it has {names}",
            )
        return name

    def reset(self, records: Sequence[PromptRecord]) -> list[str]:
        """Takes an object for each of these completions' records, and returns the texts of their `reset`."""
        taken, texts = dict.fromkeys(self._kinds, 0), []
        self.instances, self._kinds_of_instances = [], [self.kind_of(record) for record in records]
        for record in records:
            name = self._name(record)
            kind, pool = self._kinds[name], self._pools[name]
            if taken[name] == len(pool):
                pool.append(self._call(kind.make, f"'{kind.type.__name__}'", kind.place))
            instance = pool[taken[name]]
            taken[name] += 1
            columns = {"prompt": record.prompt, **record.columns}
            columns = {key: value for key, value in columns.items() if not (self.is_named and key == COLUMN)}
            keywords, where = _accepted(instance.reset, columns), f"{record.origin}; {kind.place}"
            what = f"the environment's 'reset' ({kind.type.__name__})"
            text = self._call(functools.partial(instance.reset, **keywords), what, where)
            if text is not None and not isinstance(text, str):
                raise UserError(
                    f"{what} returned {type(text).__name__}, and not text or None",
                    where=where,
                    fix="return the text that the prompt's last message ends with, or None",
                )
            texts.append(text or "")
            self.instances.append(instance)
        return texts

    def call_tools(self, number: int, calls: Sequence[ToolCall], where: str) -> list[tuple[str, bool]]:
        """The results of the calls of completion `number`, as text, and whether each has failed.

        A failure, such as wrong arguments or an exception, is a text for the model, as in TRL.
        """
        instance, kind = self.instances[number], self._kinds_of_instances[number]

        def call(name: str, arguments: str) -> Any:
            if name not in kind.tools:
                raise ValueError(f"Tool {name} not found.")
            return getattr(instance, name)(**json.loads(arguments))

        async def gather() -> list[Any]:
            results: list[Any] = []
            for tool_call in calls:
                try:
                    results.append(call(tool_call.name, tool_call.arguments))
                except Exception as problem:  # of the user's method: the model reads it, as in trl
                    results.append(problem)
            waiting = [n for n, result in enumerate(results) if inspect.isawaitable(result)]
            awaited = await asyncio.gather(*(results[n] for n in waiting), return_exceptions=True)
            for n, result in zip(waiting, awaited, strict=True):
                results[n] = result
            return results

        tools = ", ".join(dict.fromkeys(f"'{tool_call.name}'" for tool_call in calls))
        results = self._call(gather, f"the environment's {tools}", f"{where}; {kind.place}")
        failed = [isinstance(result, BaseException) for result in results]
        texts = [str({"error": str(r)}) if wrong else str(r) for r, wrong in zip(results, failed, strict=True)]
        return list(zip(texts, failed, strict=True))

    def score(self, name: str, completions: Completions) -> list[float]:
        """The reward `get_reward` of the objects of class `name`, NaN for others. Raises: UserError as rewards do."""
        kind = self.rewards[name]
        function = NamedFunction(f"{name}.get_reward", kind.place, kind.make)
        values: list[Any] = []
        what = f"the environment's 'get_reward' ({name})"
        for instance, origin in zip(self.instances, completions.origins, strict=True):
            is_scored = type(instance) is kind.type
            values.append(self._call(instance.get_reward, what, f"{origin}; {kind.place}") if is_scored else None)
        return function.check(values, completions)

    def _call(self, function: Callable[[], Any], what: str, where: str) -> Any:
        """Calls in the thread. Raises: UserError for an exception, and where it does not return in time."""
        try:
            return self._thread.call(function, self._timeout)
        except TimeoutError as problem:
            raise UserError(
                f"{what} did not return within {self._timeout:g} seconds",
                where=where,
                fix="correct it, or raise rollout.tool_timeout",
            ) from problem
        except _RaisedError as problem:
            cause = problem.__cause__
            fix = "correct it; a tool may raise, and the model is told, but nothing else may"
            raise UserError(f"{what} raised {type(cause).__name__}: {cause}", where=where, fix=fix) from cause


class _RaisedError(Exception):
    """Its cause is what a function raised in the thread."""


class _CallThread:
    """A thread with an event loop, for functions that may be async."""

    def __init__(self):
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], list[Any], threading.Event]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[[], Any], timeout: float) -> Any:
        """The result of a function. Raises: _RaisedError; TimeoutError, after which there is a new thread."""
        if self._thread is None:
            self._calls = queue.SimpleQueue()
            self._thread = threading.Thread(target=_serve, args=(self._calls,), daemon=True)
            self._thread.start()
        outcome, ended = list[Any](), threading.Event()
        self._calls.put((function, outcome, ended))
        if not ended.wait(timeout):
            self._thread = None
            raise TimeoutError
        value, problem = outcome
        if problem is not None:
            raise _RaisedError from problem
        return value


def _serve(calls: queue.SimpleQueue[tuple[Callable[[], Any], list[Any], threading.Event]]) -> None:
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        while True:
            function, outcome, ended = calls.get()
            try:
                value = function()
                outcome += [loop.run_until_complete(_await(value)) if inspect.isawaitable(value) else value, None]
            except (Exception, SystemExit) as problem:
                outcome[:] = [None, problem]
            ended.set()


async def _await(value: Awaitable[Any]) -> Any:
    return await value


def _accepted(function: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that a function has parameters for; all if it takes any keywords."""
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in columns.items() if takes_any or name in parameters}


def _tool_names(kind: type) -> list[str]:
    """The public methods of a class that are no part of the contract."""
    methods = inspect.getmembers(kind, predicate=inspect.isfunction)
    return [name for name, _ in methods if not name.startswith("_") and name not in CONTRACT]


def _tools(kind: type, place: str) -> dict[str, Tool]:
    """The tools of a class. Raises: UserError for a class without reset, and a method that no schema can be made of."""
    if not callable(getattr(kind, "reset", None)):
        raise UserError(
            f"the environment {kind.__name__} has no method 'reset'",
            where=place,
            fix="add def reset(self, **columns), which makes the object as new and returns text for the prompt or None",
        )
    tools = {}
    for name in _tool_names(kind):
        try:
            definition = get_json_schema(getattr(kind, name))
        except (DocstringParsingException, TypeHintParsingException) as problem:
            raise UserError(
                f"the environment's method '{name}' ({kind.__name__}) cannot be a tool: {problem}",
                where=place,
                fix="give its arguments types and a docstring with a section Args: that describes each; or begin its "
                "name with _, if the model must not call it",
            ) from problem
        function = definition["function"]
        function["name"] = name
        tools[name] = Tool(name, function["parameters"], definition)
    return tools


class Episodes:
    """The completions of one rollout in their environments; `follow` is what generate() calls between turns.

    `records` has an entry for every completion. `prompt_ids` are the prompts with tools and the texts of `reset`. All
    processes read the same turns; process 0 calls the methods, for all. `most_ids` is the length that a prompt may
    have, and `tag` names the rollout.

    Raises: UserError for prompts that are no conversations, and a template that does not show tools to the model.
    """

    def __init__(
        self,
        environments: Environments,
        tokenizer: PreTrainedTokenizerFast,
        stop_ids: frozenset[int],
        records: Sequence[PromptRecord],
        job: Job,
        tag: str,
        most_ids: int,
    ):
        self._environments, self._tokenizer, self._stop_ids = environments, tokenizer, stop_ids
        self._records, self._job, self._tag, self._most_ids = records, job, tag, most_ids
        self._kinds = [environments.kind_of(record) for record in records]
        texts = environments.reset(records) if job.is_main_process else None
        texts = job.broadcast(f"environments of {tag}", texts)
        cache: dict[str, tuple[list[int], AnswerFormat]] = {}
        self._prompts, self.prompt_ids, self._formats = [], list[list[int]](), list[AnswerFormat]()
        for record, kind, text in zip(records, self._kinds, texts, strict=True):
            messages = _with_text(record, text)
            key = json.dumps([messages, list(kind.tools)], default=str)
            if key not in cache:
                cache[key] = self._render(record, kind, messages)
            ids, form = cache[key]
            self._prompts.append(messages)
            self.prompt_ids.append(ids)
            self._formats.append(form)
        self._messages: list[list[dict[str, Any]]] = [[] for _ in records]
        self._calls, self._failures, self._turns = ([0] * len(records) for _ in range(3))

    def _render(
        self, record: PromptRecord, kind: Environment, messages: list[dict[str, Any]]
    ) -> tuple[list[int], AnswerFormat]:
        tokenizer, where = self._tokenizer, str(record.origin)
        if encoded_chat(tokenizer, chat_text(tokenizer, _prompt_messages(record))) != record.ids:
            raise UserError(
                "the record has tools or variables of its own, and with rollout.environment the tools are its methods",
                where=where,
                fix="remove these fields",
            )
        definitions = [tool.definition for tool in kind.tools.values()]
        text = chat_text(tokenizer, messages, definitions)
        template = str(tokenizer.get_chat_template(None, tools=[{}] if definitions else None))
        form = AnswerFormat.of_prompt(template, text)
        if definitions and (call_format(template) is None or any(name not in text for name in kind.tools)):
            raise UserError(
                "the chat template does not show tools to the model, so it cannot call the environment's methods",
                where="model.chat_template",
                fix="set it to a template that does, such as chatml, or train a model that was made for tools",
            )
        ids = encoded_chat(tokenizer, text)
        if len(ids) > self._most_ids:
            raise UserError(
                f"a prompt of {len(ids)} tokens, with the environment's tools and text, leaves no room for a "
                f"completion: there are {self._most_ids}",
                where=where,
                fix="raise data.max_length, or lower rollout.max_tokens",
            )
        return ids, form

    def follow(self, turns: Sequence[Turn]) -> list[list[int] | None]:
        """The ids of the results of tools that each turn calls, up to where the model's next turn begins.

        None where it calls none, was cut off, is one of more than `max_turns`, or leaves no room for another turn.
        """
        calls = {turn.number: self._read(turn) for turn in turns}
        most = self._environments.max_turns
        calling = [
            turn
            for turn in turns
            if calls[turn.number] and turn.reason == "stop" and (most is None or self._turns[turn.number] < most)
        ]
        if not calling:
            return [None] * len(turns)
        results = None
        if self._job.is_main_process:
            results = {
                str(turn.number): self._environments.call_tools(
                    turn.number, calls[turn.number], str(self._records[turn.number].origin)
                )
                for turn in calling
            }
        results = self._job.broadcast(f"tools of {self._tag}", results)
        suffixes: dict[int, list[int]] = {}
        for turn in calling:
            self._turns[turn.number] += 1
            texts = results[str(turn.number)]
            self._calls[turn.number] += len(texts)
            self._failures[turn.number] += sum(failed for _, failed in texts)
            messages = [
                {"role": "tool", "name": call.name, "content": text}
                for call, (text, _) in zip(calls[turn.number], texts, strict=True)
            ]
            ids = tool_suffix_ids(self._tokenizer, messages, self._stop_ids)
            if len(ids) < turn.room:
                suffixes[turn.number] = ids
                self._messages[turn.number] += messages
        return [suffixes.get(turn.number) for turn in turns]

    def _read(self, turn: Turn) -> list[ToolCall]:
        """The calls of a turn, which becomes a message."""
        form = self._formats[turn.number]
        hidden = special_ids(self._tokenizer) - form.visible_ids(self._tokenizer)
        text = self._tokenizer.decode([id_ for id_ in turn.ids if id_ not in hidden], skip_special_tokens=False)
        reader = answer_reader(form, self._kinds[turn.number].tools, any_name=True)
        parts = [*reader.push(str(text)), *reader.finish()]
        calls = [part.call for part in parts if part.call is not None]
        message: dict[str, Any] = {"role": "assistant", "content": "".join(part.content for part in parts)}
        if reasoning := "".join(part.reasoning for part in parts):
            message["reasoning_content"] = reasoning
        if calls:
            functions = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in calls]
            message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
        self._messages[turn.number].append(message)
        return calls

    def complete(self, completions: Sequence[Completion]) -> list[Completion]:
        """The completions with their episodes."""
        parts = zip(self._prompts, self.prompt_ids, self._messages, self._calls, self._failures, strict=True)
        return [
            dataclasses.replace(completion, episode=Episode(*fields))
            for completion, fields in zip(completions, parts, strict=True)
        ]


def _prompt_messages(record: PromptRecord) -> list[dict[str, Any]]:
    if isinstance(record.prompt, str):
        raise UserError(
            "the prompt is a text, and an environment needs a conversation: its tools are shown by the chat template",
            where=str(record.origin),
            fix='give prompt as a list of messages: [{"role": "user", "content": "..."}]',
        )
    return record.prompt


def _with_text(record: PromptRecord, text: str) -> list[dict[str, Any]]:
    """The prompt's messages with a text at the end of the last one."""
    *before, last = _prompt_messages(record)
    return [*before, {**last, "content": last["content"] + text}]


def tool_suffix_ids(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, Any]], stop_ids: frozenset[int]
) -> list[int]:
    """The ids that follow a turn which calls tools and has ended by a stop id: results, and how the next turn begins.

    The template renders a short conversation with and without the results, and what comes after the end of its calls is
    theirs, so that the turn's own ids are never made of its text again (trl: GRPOTrainer._get_tool_suffix_ids).
    Raises: UserError for a template that writes the conversation before differently once results follow.
    """
    chat = chat_template(tokenizer)
    calls = [
        {"type": "function", "id": f"call_{n}", "function": {"name": message["name"], "arguments": {}}}
        for n, message in enumerate(messages)
    ]
    before = [{"role": "user", "content": "dummy"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    results = [{**message, "tool_call_id": f"call_{n}"} for n, message in enumerate(messages)]
    try:
        prefix = encoded_chat(tokenizer, chat.render(chat.adapt(before)))
        complete = encoded_chat(tokenizer, chat.render(chat.adapt([*before, *results]), generation_prompt=True))
    except chat.failures as problem:
        raise template_error(problem, where="model.chat_template") from problem
    ends = [n for n, id_ in enumerate(prefix) if id_ in stop_ids]
    if ends and not str(tokenizer.decode(prefix[ends[-1] + 1 :])).strip():
        same = [n for n, id_ in enumerate(complete) if id_ in stop_ids][len(ends) - 1]
        return complete[same + 1 :]
    if complete[: len(prefix)] != prefix:
        raise UserError(
            "the chat template writes a turn that calls tools in another way once their results follow",
            where="model.chat_template",
            fix="use a template that does not change turns that are over",
        )
    return complete[len(prefix) :]
