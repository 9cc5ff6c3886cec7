"""Kinds of records: the subjects that a request is about, and templates that make prompts of them and records of
answers."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import json
import re
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from jinja2 import StrictUndefined, TemplateError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshtune.config.data_recipe import KindSection, MessageTemplate, Template, Turn, load_template
from meshtune.errors import UserError, nearest, pip_install

VARIABLES: dict[str, tuple[str, ...]] = {
    "passage": ("passage", "heading", "source", "place"),
    "example": ("question", "answer", "conversation", "source", "place"),
    "tool": ("tool", "tools", "source", "place"),
    "picture": ("source", "place"),
}
ANSWER = ("item", "text")
JUDGED = ("passage", "conversation", *ANSWER)
SCORE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"reason": {"type": "string"}, "score": {"type": "integer", "enum": [1, 2, 3, 4, 5]}},
    "required": ["reason", "score"],
    "additionalProperties": False,
}


@dataclasses.dataclass(frozen=True)
class Subject:
    """A passage, an example, a tool or a picture. `source` and `place` say where it is from; `sha256` is the source's.
    `variables` are those of prompts, `passage` the text that answers must be grounded in, if there is one."""

    of: str
    source: str
    place: str
    sha256: str
    variables: Mapping[str, Any]
    passage: str = ""
    pictures: tuple[str, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()

    @functools.cached_property
    def id(self) -> str:
        """A hash of its content and place, on which draws depend. Its folder may be moved."""
        content = json.dumps([self.of, self.place, self.sha256, self.variables], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


def draw(seed: int, *names: object) -> int:
    """A number below 2**31 that depends on the seed and on names only."""
    content = "\0".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") % 2**31


def environment() -> ImmutableSandboxedEnvironment:
    """The environment of templates: an unknown variable is an error."""
    templates = ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    templates.filters["json"] = lambda value: json.dumps(value, ensure_ascii=False, indent=1)
    return templates


ENVIRONMENT = environment()


class Kind:
    """A kind of a recipe with its template, None: that which the section names. Its variables are checked."""

    def __init__(self, section: KindSection, template: Template | None = None):
        self.section, self.name = section, section.template
        self.template: Template = template or load_template(section.template)
        if self.template.answer_schema is not None:
            check_schema(self.template.answer_schema, f"{self.name}, answer_schema", ("#/$defs/call",))
        self.options = dict(self.template.options)
        for option, value in section.options.items():
            if option not in self.options:
                known = ", ".join(self.options) or "none"
                fix = f"{nearest(option, self.options)}its options: {known}"
                raise UserError(f"the template {self.name} has no option '{option}'", where="kinds", fix=fix)
            self.options[option] = value
        known = (*VARIABLES[self.template.of], *self.options)
        template = self.template
        for field, text in (("system", template.system), ("prompt", template.prompt)):
            self._check(field, text, known)
        for option, value in self.options.items():
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str):
                    self._check(f"options.{option}", text, tuple(self.options))
        after = (*known, *ANSWER) if template.prompt is not None else known
        schema = template.answer_schema or {}
        for field, text in (("answer", template.answer), ("rubric", template.rubric)):
            self._check(field, text, (*after, "text"), schema)
        if template.for_each is not None:
            schema = self._entries(schema, template.for_each, "for_each")
        self._check_messages(template.messages, after, schema, "messages")

    def _check_messages(
        self, messages: Sequence[Turn], known: Sequence[str], schema: Mapping[str, Any], where: str
    ) -> None:
        for number, message in enumerate(messages):
            if isinstance(message, MessageTemplate) and message.for_each is not None:
                entries = self._entries(schema, message.for_each, f"{where}.{number}.for_each")
                self._check_messages(message.messages, known, entries, f"{where}.{number}.messages")
            if message.tool_calls is not None:
                self._entries(schema, message.tool_calls, f"{where}.{number}.tool_calls")
            self._check(f"{where}.{number}.content", message.content, known, schema)

    def _entries(self, schema: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
        """The schema of the entries of a list of the answer. Raises UserError for a name that is no list."""
        properties = schema.get("properties") or {}
        if name not in properties or properties[name].get("type") != "array":
            lists = [entry for entry, value in properties.items() if value.get("type") == "array"]
            fix = f"{nearest(name, lists)}lists of answer_schema: {', '.join(lists) or 'none'}"
            raise UserError(f"the answer has no list '{name}'", where=f"{self.name}, {where}", fix=fix)
        return properties[name].get("items") or {}

    def _check(
        self, field: str, text: str | None, known: Sequence[str], schema: Mapping[str, Any] | None = None
    ) -> None:
        """Raises UserError for a text that is no template, and for an unknown variable, or field of `item`."""
        if text is None:
            return
        where = f"{self.name}, {field}"
        try:
            tree = ENVIRONMENT.parse(text)
        except TemplateError as problem:
            fix = "write {{ name }} for a variable; copy a template: meshtune data template qa"
            raise UserError(f"this is no Jinja template: {problem}", where=where, fix=fix) from problem
        for name in sorted(meta.find_undeclared_variables(tree)):
            if name not in known:
                fix = f"{nearest(name, known)}there are: {', '.join(known)}"
                raise UserError(f"the template has an unknown field '{name}'", where=where, fix=fix)
        properties = (schema or {}).get("properties")
        for node in tree.find_all(nodes.Getattr):
            is_item = isinstance(node.node, nodes.Name) and node.node.name == "item"
            if is_item and properties is not None and node.attr not in properties:
                fix = f"{nearest(node.attr, properties)}the schema has: {', '.join(properties) or 'none'}"
                raise UserError(f"the template has an unknown field 'item.{node.attr}'", where=where, fix=fix)

    @property
    def digest(self) -> str:
        """A hash of the template and its options."""
        content = json.dumps([self.template.model_dump(mode="json"), self.options], sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()

    def variables(self, subject: Subject, seed: int) -> dict[str, Any]:
        """The variables of a prompt: the subject's, and options. Of an option with a list one entry is drawn."""
        drawn = {
            name: value[draw(seed, name) % len(value)] if isinstance(value, list) and value else value
            for name, value in self.options.items()
        }
        options = {name: render(value, drawn) if isinstance(value, str) else value for name, value in drawn.items()}
        return {**options, **subject.variables, "source": subject.source, "place": subject.place}

    def schema(self, subject: Subject) -> dict[str, Any] | None:
        """The schema of an answer: calls of tools must fit the tools' own schemas."""
        schema = self.template.answer_schema
        if schema is None or not subject.tools:
            return schema
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["name"]},
                    "arguments": rebase(tool["parameters"], f"#/$defs/call/anyOf/{number}/properties/arguments"),
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for number, tool in enumerate(subject.tools)
        ]
        return {**schema, "$defs": {**schema.get("$defs", {}), "call": {"anyOf": calls}}}

    def records(self, answer: object, variables: Mapping[str, Any]) -> Iterator[list[dict[str, Any]]]:
        """The messages of each record of an answer: a text, or what has the template's schema."""
        template = self.template
        if template.answer_schema is None:
            yield list(self._messages(template.messages, {**variables, "text": answer}, {}))
            return
        assert isinstance(answer, dict)
        items = [answer] if template.for_each is None else answer[template.for_each]
        for item in items:
            yield list(self._messages(template.messages, {**variables, "item": item}, item))

    def _messages(self, messages: Sequence[Turn], variables: Mapping[str, Any], item: Any) -> Iterator[dict[str, Any]]:
        for message in messages:
            if isinstance(message, MessageTemplate) and message.for_each is not None:
                for entry in item[message.for_each]:
                    yield from self._messages(message.messages, {**variables, "item": entry}, entry)
                continue
            text = render(message.content, variables).strip()
            if message.tool_calls is None:
                yield {"role": message.role, "content": text}
                continue
            calls = [
                {"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
                for call in item[message.tool_calls]
            ]
            yield {"role": message.role, "content": text, "tool_calls": calls}


def render(text: str, variables: Mapping[str, Any]) -> str:
    """The text of a template. Raises UserError for a field that a value does not have."""
    try:
        return ENVIRONMENT.from_string(text).render(variables).strip()
    except TemplateError as problem:
        fix = "correct the template; {{ name }} is a variable"
        raise UserError(f"the template cannot be filled: {problem}", where=text[:100], fix=fix) from problem


def package(name: str, purpose: str) -> ModuleType:
    """A package of the extra `synth`. Raises UserError where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as problem:
        raise UserError(f"{purpose} by {name}, which is not installed", fix=pip_install("synth")) from problem


def rebase(schema: Any, place: str) -> Any:
    """A schema at a `place` of another, whose references point into itself as before."""
    if isinstance(schema, list):
        return [rebase(entry, place) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + value[1:] if key == "$ref" and isinstance(value, str) else rebase(value, place)
        for key, value in schema.items()
    }


def check_schema(schema: Mapping[str, Any], where: str, later: Sequence[str] = ()) -> None:
    """Raises UserError for what is no JSON Schema, or refers to what it does not hold; `later` is added to it."""
    jsonschema = package("jsonschema", "answers are compared with their schema")
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as problem:
        place = ".".join(map(str, problem.absolute_path))
        where, fix = f"{where}{f', {place}' if place else ''}", "correct it by https://json-schema.org/draft/2020-12"
        raise UserError(f"this is no JSON Schema: {problem.message[:200]}", where=where, fix=fix) from problem
    for reference in references(schema):
        target: Any = schema if reference.startswith("#") else None
        for step in reference[2:].split("/") if len(reference) > 1 else ():
            step = urllib.parse.unquote(step).replace("~1", "/").replace("~0", "~")
            target = target.get(step) if isinstance(target, dict) else None
        if target is None and reference not in later:
            fix = "put it below $defs, and refer to it as #/$defs/NAME"
            raise UserError(f"the schema refers to '{reference}', which it does not hold", where=where, fix=fix)


def references(schema: Any) -> Iterator[str]:
    """The values of $ref in a schema."""
    if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
        yield schema["$ref"]
    for value in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from references(value)


def parse_answer(text: str, schema: Mapping[str, Any]) -> Any:
    """The JSON of an answer, which may be in a block of code. Raises ValueError that says why it has not the schema."""
    jsonschema = package("jsonschema", "answers are compared with their schema")
    fenced = re.search(r"```(?:json)?\s*\n(.*?)```", text, re.DOTALL)
    try:
        value = json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"no JSON: {problem}") from problem
    try:
        jsonschema.validate(value, schema)
    except jsonschema.ValidationError as problem:
        place = ".".join(map(str, problem.absolute_path)) or "the answer"
        raise ValueError(f"{place}: {problem.message[:200]}") from problem
    return value


@dataclasses.dataclass(frozen=True)
class Task:
    """Request number `repeat` of a kind about a subject."""

    kind: Kind
    subject: Subject
    repeat: int
    seed: int
    held_out: bool

    @property
    def variables(self) -> dict[str, Any]:
        """The variables of its prompts, which are not held: there may be millions of tasks."""
        return self.kind.variables(self.subject, self.seed)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"{self.kind.name} of {self.subject.source}, {self.subject.place}"


def make_tasks(
    kinds: Sequence[Kind], subjects: Sequence[Subject], *, seed: int, held_out: float, limit: int | None
) -> list[Task]:
    """All tasks in an order that the seed draws, subject by subject. Raises UserError for a kind without subjects."""
    order = sorted(subjects, key=lambda subject: draw(seed, "order", subject.id))
    for kind in kinds:
        if not any(subject.of == kind.template.of for subject in subjects):
            key = {"passage": "documents", "example": "examples", "tool": "tools", "picture": "pictures"}
            fix = f"give {key[kind.template.of]}, or remove the kind"
            raise UserError(f"{kind.name} makes records of {key[kind.template.of]}, and there are none", fix=fix)
    held_out_ids: set[str] = set()
    for of in VARIABLES:
        ids = sorted((subject.id for subject in subjects if subject.of == of), key=lambda id_: draw(seed, "out", id_))
        count = round(held_out * len(ids))
        held_out_ids.update(ids[: max(count, held_out > 0 and len(ids) > 1)])
    tasks: list[Task] = []
    for subject in order:
        for kind in kinds:
            if kind.template.of != subject.of:
                continue
            if draw(seed, "share", kind.digest, subject.id) >= kind.section.share * 2**31:
                continue
            for repeat in range(kind.section.repeat):
                task_seed = draw(seed, kind.digest, subject.id, repeat)
                tasks.append(Task(kind, subject, repeat, task_seed, subject.id in held_out_ids))
    return tasks[:limit]


def conversation_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation as text, for judges and prompts."""
    lines: list[str] = []
    for message in messages:
        text = str(message["content"])
        if calls := message.get("tool_calls"):
            text += json.dumps([call["function"] for call in calls], ensure_ascii=False)
        lines.append(f"{message['role']}: {text}")
    return "\n".join(lines)
