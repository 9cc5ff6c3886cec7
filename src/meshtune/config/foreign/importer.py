"""Translates other tools' recipes and writes ours: `meshtune import`."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from meshtune.config import yaml_text
from meshtune.config.foreign import axolotl, llama_factory, trl
from meshtune.config.foreign.detect import NOT_TRANSLATED, TITLES, detect, equivalent_command
from meshtune.config.foreign.draft import Draft, Finding, Setting
from meshtune.config.load import load_recipe, recipe_file_text, silent
from meshtune.config.recipe import Recipe
from meshtune.errors import UserError, nearest

JINJA = re.compile(r"\{\{|\{%")
VARIABLE = re.compile(r"\$\{([^}]*)\}|\$([A-Za-z_]\w*)")
TEMPLATES = ("chat_template_jinja", "chat_template")
PATTERNS = ("lora_target_modules", "unfrozen_parameters", "lora_target")  # where $ is the end of an expression
KNOWN = "LLaMA-Factory, axolotl and TRL (--trl)"
WIDTH = 116


@dataclasses.dataclass(frozen=True)
class Translation:
    """A recipe of another tool, translated.

    `findings` are the verdicts on the keys; `lines` are the keys' lines in the file. `draft` holds our recipe.
    """

    source: str
    tool: str
    draft: Draft
    findings: tuple[Finding, ...]
    lines: dict[str, int]

    @property
    def refused(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.verdict in ("refused", "unknown"))

    def written_files(self, to: pathlib.Path | None) -> dict[pathlib.Path, str]:
        """Returns the files to write, by path: the recipe and the files that it names.

        Raises UserError if such a file is needed and the recipe has no path.
        """
        target = to or pathlib.Path("recipe.yaml")
        if self.draft.files and to is None:
            raise UserError(
                "the recipe needs a chat template in a file beside it", where=self.source, fix="add --to recipe.yaml"
            )
        beside = {suffix: target.with_suffix(suffix) for suffix in self.draft.files}
        for key, setting in self.draft.settings.items():
            if isinstance(setting.value, str) and setting.value in beside:
                self.draft.settings[key] = dataclasses.replace(setting, value=beside[setting.value].name)
        devices = f"{self.draft.devices} device{'s' * (self.draft.devices != 1)} (--devices)"
        head = f"From {pathlib.Path(self.source).name}, a recipe of {TITLES[self.tool]}, for {devices}."
        text = recipe_text(self.draft, [head, "Each comment names the key that the line comes from."])
        return {target: text, **{beside[suffix]: text for suffix, text in self.draft.files.items()}}


def translate(
    source: str,
    *,
    devices: int = 1,
    is_trl: bool = False,
    trainer: str | None = None,
    check: Callable[[dict[str, Any]], None] | None = None,
) -> Translation:
    """Translates the file `source`, which was written for `devices` devices.

    `is_trl`: it holds arguments of TRL, whatever else they look like; `trainer` is TRL's, where the file does not say.
    `check` is given the content before any file that it names is read, and may raise.
    Raises UserError for a file that cannot be read, is not YAML, or is of no tool that is known.
    """
    if devices < 1:
        raise UserError(f"{devices} is no number of devices", where="--devices", fix="give a whole number from 1")
    if trainer is not None and trainer not in (*trl.TRAINERS, *trl.OTHER_TRAINERS):
        fix = f"{nearest(trainer, trl.TRAINERS)}give one of: {', '.join(trl.TRAINERS)}"
        raise UserError(f"TRL has no trainer '{trainer}'", where="--trainer", fix=fix)
    text = recipe_file_text(pathlib.Path(source))
    commands = trl.commands(text)
    raw, lines = (commands[0][0], {}) if commands else _yaml(text, source)
    if commands:
        trainer = trainer or commands[0][1]
    tool = "trl" if is_trl or commands else detect(raw)
    if trainer in trl.OTHER_TRAINERS:
        fix = f"trainers that are: {', '.join(trl.TRAINERS)}"
        raise UserError(f"there is no stage for TRL's trainer '{trainer}' in recipes here", where=source, fix=fix)
    if tool is None:
        raise UserError(
            f"these are keys of no tool that is known: {', '.join(list(raw)[:8])}",
            where=source,
            fix=f"recipes of {KNOWN} are read",
        )
    if tool == "meshtune":
        raise UserError("this is a recipe of Meshtune's", where=source, fix=f"meshtune train {source}")
    if tool == "accelerate":
        raise UserError(
            "this is accelerate's configuration of processes, and no recipe: what is trained is said elsewhere",
            where=source,
            fix="import the training file; processes are started as docs/launch.md says",
        )
    if tool in NOT_TRANSLATED:
        raise UserError(f"recipes of {TITLES[tool]} are not translated", where=source, fix=NOT_TRANSLATED[tool])
    if tool == "llama_factory" and (command := equivalent_command(raw)) is not None:
        raise UserError("this file of LLaMA-Factory trains nothing", where=source, fix=command)
    raw, unresolved = _resolve_references(raw, tool)
    if check is not None:
        check(raw)
    draft = _translate_file(tool, raw, devices, trainer)
    if len(commands) > 1:
        draft.remark(
            f"The file holds {len(commands)} commands of TRL; this is the first: make a file of each other one."
        )
    for key, (note, fix) in unresolved.items():
        draft.refuse(key, note, fix)
    findings = draft.findings()
    if not any(finding.verdict in ("refused", "unknown") for finding in findings):
        findings += _invalid(draft)
    return Translation(source, tool, draft, tuple(findings), lines)


def _yaml(text: str, source: str) -> tuple[dict[str, Any], dict[str, int]]:
    try:
        located = yaml_text.read(text, source)
    except UserError as problem:
        if source.endswith((".py", ".sh")):
            message = "the file is a script without a command of TRL (trl sft --..., python dpo.py --...)"
            raise UserError(message, where=source, fix=f"recipes of {KNOWN} are read") from problem
        if "another document" in problem.what:
            message = "the file holds more than one YAML document"
            raise UserError(message, where=problem.where, fix="make a file of each, and import them") from problem
        if JINJA.search(text):
            fix = "render it first: what a template comes to is YAML"
            raise UserError("the file is a Jinja template, not YAML", where=problem.where, fix=fix) from problem
        raise
    if not isinstance(located.value, dict):
        kinds = {type(None): "nothing but comments" if text.strip() else "nothing", list: "a list"}
        content = "a script without a command of TRL" if source.endswith((".py", ".sh")) else None
        content = content or kinds.get(type(located.value), "one text")
        message = f"the file holds {content}, and a recipe is a mapping of keys to values"
        raise UserError(message, where=source, fix=f"recipes of {KNOWN} are read")
    return located.value, {str(path[0]): line for path, line in located.lines.items() if len(path) == 1}


Unresolved = dict[str, tuple[str, str]]


def _resolve_references(raw: dict[str, Any], tool: str) -> tuple[dict[str, Any], Unresolved]:
    """Returns `raw` with references between keys resolved, as OmegaConf does, and the keys with unknown references."""
    problems: Unresolved = {}

    def put(match: re.Match[str], key: str) -> str:
        name = match[1] or match[2]
        value = yaml_text.value_at(raw, tuple(name.split(".")))
        if match[1] and tool == "llama_factory" and value is not None and not isinstance(value, dict):
            return str(value)
        variable = name.removeprefix("oc.env:").partition(",")[0]
        problems[key] = (f"{match[0]}: environment variables are not read", f"write the value of {variable}")
        return match[0]

    def walk(value: Any, key: str) -> Any:
        if isinstance(value, dict):
            return {name: walk(entry, key) for name, entry in value.items()}
        if isinstance(value, list):
            return [walk(entry, key) for entry in value]
        if not isinstance(value, str) or key in TEMPLATES:
            return value
        if JINJA.search(value):
            problems[key] = ("it holds Jinja, which is not rendered", "write what it comes to")
            return value
        return VARIABLE.sub(lambda match: put(match, key), value) if key not in PATTERNS else value

    return {key: walk(value, key) for key, value in raw.items()}, problems


def _translate_file(tool: str, raw: dict[str, Any], devices: int, trainer: str | None) -> Draft:
    if tool == "trl":
        return trl.train(raw, devices, trainer)
    module = {"llama_factory": llama_factory, "axolotl": axolotl}[tool]
    draft = Draft(module.NAME, raw, module.TABLE, devices)
    module.train(draft)
    return draft


def _invalid(draft: Draft) -> list[Finding]:
    """Returns the errors of our own schema."""
    try:
        load_recipe(nest_keys(draft.settings), notify=silent)
    except UserError as problem:
        return [Finding("", "refused", note=problem.what, fix=problem.fix or "change the file")]
    return []


def nest_keys(settings: dict[str, Setting]) -> dict[str, Any]:
    """Builds the recipe from dotted keys; numbers in them are entries of lists."""
    tree: dict[str, Any] = {}
    for dotted, setting in settings.items():
        node = tree
        *path, last = dotted.split(".")
        for step in path:
            node = node.setdefault(step, {})
        node[last] = setting.value
    return {key: _lists(value) for key, value in tree.items()}


def _lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    if node and all(isinstance(key, str) and key.isdecimal() for key in node):
        return [_lists(node[key]) for key in sorted(node, key=int)]
    return {key: _lists(value) for key, value in node.items()}


def recipe_text(draft: Draft, head: list[str]) -> str:
    """The YAML of a draft: `head` and remarks, then each section in the schema's order, a comment on each line."""
    tree = nest_keys(draft.settings)
    order = [key for key in Recipe.model_fields if key in tree]
    lines = [line for entry in (*head, *draft.remarks) for line in _wrap_note(entry)]
    for key in order:
        lines += _node(key, tree[key], key, draft.settings, 0)
    return "\n".join(lines) + "\n"


def _node(key: str, value: Any, dotted: str, settings: dict[str, Setting], depth: int) -> Iterator[str]:
    indent = "  " * depth
    if dotted in settings:
        yield from _line(f"{indent}{key}: {scalar(value)}", settings[dotted].note)
    elif isinstance(value, list):
        yield f"{indent}{key}:"
        for number, entry in enumerate(value):
            body = [
                line for name, inner in entry.items()
                for line in _node(name, inner, f"{dotted}.{number}.{name}", settings, depth + 2)
            ]  # fmt: skip
            first = next(index for index, line in enumerate(body) if not line.lstrip().startswith("#"))
            body[first] = f"{indent}  - {body[first].lstrip()}"
            yield from body
    else:
        yield f"{indent}{key}:"
        for name, inner in value.items():
            yield from _node(name, inner, f"{dotted}.{name}", settings, depth + 1)


def _line(text: str, note: str) -> Iterator[str]:
    """A line with its comment, which stands above where it would be too long."""
    if len(text) + len(note) + 4 <= WIDTH:
        yield f"{text}  # {note}"
        return
    indent = text[: len(text) - len(text.lstrip())]
    yield from _wrap_note(note, indent)
    yield text


def _wrap_note(note: str, indent: str = "") -> Iterator[str]:
    parts, line = note.split(), f"{indent}#"
    for word in parts:
        if len(line) + len(word) + 1 > WIDTH:
            yield line
            line = f"{indent}#"
        line = f"{line} {word}"
    yield line


def scalar(value: object) -> str:
    """A value in YAML's flow style, quoted where plain text would be read as something else."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{scalar(key)}: {scalar(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(scalar, value)) + "]"
    text = str(value)
    try:
        plain = yaml_text.scalar(f"[{text}]", "value") == [text] and yaml_text.scalar(text, "value") == text
    except UserError:
        plain = False
    return text if plain and text.strip() == text and "#" not in text else json.dumps(text, ensure_ascii=False)
