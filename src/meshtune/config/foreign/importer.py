"""Other tools' recipes, read and translated: what `meshtune import` does."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Callable
from typing import Any

from meshtune.config import yaml_text
from meshtune.config.foreign import (
    axolotl,
    axolotl_train,
    llama_factory,
    llama_factory_commands,
    llama_factory_train,
    torchtune,
    torchtune_train,
    trl,
    trl_train,
)
from meshtune.config.foreign import llama_factory_v1 as v1
from meshtune.config.foreign.detect import TITLES, Tool, detect
from meshtune.config.foreign.draft import Draft, Finding
from meshtune.config.foreign.rules import Table
from meshtune.config.foreign.write import command_text, nested, recipe_text
from meshtune.config.load import load_recipe, recipe_file_text, silent
from meshtune.errors import UserError, nearest

JINJA = re.compile(r"\{\{|\{%")
VARIABLE = re.compile(r"\$\{([^}]*)\}|\$([A-Za-z_]\w*)")
TEMPLATES = ("chat_template_jinja", "custom_chat_template", "chat_template")
KNOWN = "LLaMA-Factory (v0, v1), axolotl, torchtune and TRL (--trl)"


@dataclasses.dataclass(frozen=True)
class Translation:
    """A file of another tool, translated.

    `verb` is train, or the command that does what the file says. `findings` say what became of each key; `lines` are
    the keys' lines in the file. `draft` holds what it comes to here.
    """

    source: str
    tool: Tool
    verb: str
    draft: Draft
    findings: tuple[Finding, ...]
    lines: dict[str, int]

    @property
    def refused(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.verdict in ("refused", "unknown"))

    def written(self, to: pathlib.Path | None) -> dict[pathlib.Path, str]:
        """The files to write, by path: the recipe (or script) and what it needs beside it.

        Raises UserError where something must lie beside a recipe that has no path.
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
        head = [f"From {pathlib.Path(self.source).name}, a recipe of {TITLES[self.tool]}, for {_devices(self.draft)}."]
        if self.verb == "train":
            text = recipe_text(self.draft, [*head, "Each comment names the key that the line comes from."])
        else:
            text = command_text(self.verb, self.draft, head)
        return {target: text, **{beside[suffix]: text for suffix, text in self.draft.files.items()}}


def _devices(draft: Draft) -> str:
    return f"{draft.devices} device{'s' * (draft.devices != 1)} (--devices)"


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
    tool: Tool | None = "trl" if is_trl or commands else detect(raw)
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
    raw, unresolved = _resolved(raw, tool)
    if check is not None:
        check(raw)
    verb, draft = _translated(tool, raw, devices, trainer)
    if len(commands) > 1:
        draft.remark(
            f"The file holds {len(commands)} commands of TRL; this is the first: make a file of each other one."
        )
    for key, (note, fix) in unresolved.items():
        draft.refuse(key, note, fix)
    findings = draft.findings()
    if verb == "train" and not any(finding.verdict in ("refused", "unknown") for finding in findings):
        findings += _invalid(draft)
    return Translation(source, tool, verb, draft, tuple(findings), lines)


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


def _resolved(raw: dict[str, Any], tool: Tool) -> tuple[dict[str, Any], Unresolved]:
    """`raw` with references between keys put in, as OmegaConf does, and the keys of which a part is not known."""
    problems: Unresolved = {}

    def put(match: re.Match[str], key: str) -> str:
        name = match[1] or match[2]
        value = yaml_text.value_at(raw, tuple(name.split(".")))
        if match[1] and tool in ("torchtune", "llama_factory") and value is not None and not isinstance(value, dict):
            return str(value)
        if match[1] and tool == "torchtune" and not name.startswith("oc.env:"):
            problems[key] = (f"{match[0]}: the file has no such key", f"write the value of {name}")
            return match[0]
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


PATTERNS = ("lora_target_modules", "unfrozen_parameters", "lora_target")  # where $ is the end of an expression


def _translated(tool: Tool, raw: dict[str, Any], devices: int, trainer: str | None) -> tuple[str, Draft]:
    """(our verb, the draft) of a file of `tool`."""
    if tool == "llama_factory":
        verb = _llama_factory_verb(raw)
        table = llama_factory.TRAIN if verb == "train" else llama_factory_commands.COMMAND
        return verb, _run(LLAMA_FACTORY[verb], Draft(llama_factory.NAME, raw, table, devices))
    if tool == "llama_factory_v1":
        draft = Draft(v1.NAME, raw, v1.V1, devices)
        verb = v1.verb(draft)
        return verb, _run(v1.export if verb == "export" else v1.train, draft)
    if tool == "trl":
        return "train", trl_train.train(raw, devices, trainer)
    tables: dict[str, tuple[str, Table, Callable[[Draft], None]]] = {
        "axolotl": (axolotl.NAME, axolotl.AXOLOTL, axolotl_train.train),
        "torchtune": (torchtune.NAME, torchtune.TORCHTUNE, torchtune_train.train),
    }
    name, table, run = tables[tool]
    return "train", _run(run, Draft(name, raw, table, devices))


LLAMA_FACTORY: dict[str, Callable[[Draft], None]] = {
    "train": llama_factory_train.train,
    "export": llama_factory_commands.export,
    "predict": llama_factory_commands.predict,
    "chat": llama_factory_commands.chat,
}


def _llama_factory_verb(raw: dict[str, Any]) -> str:
    if raw.get("export_dir"):
        return "export"
    if raw.get("do_train") or ("dataset" in raw and not raw.get("do_predict")):
        return "train"
    return "predict" if raw.get("do_predict") or raw.get("do_eval") else "chat"


def _run(run: Callable[[Draft], None], draft: Draft) -> Draft:
    run(draft)
    return draft


def _invalid(draft: Draft) -> list[Finding]:
    """What our own schema says against the recipe."""
    try:
        load_recipe(nested(draft.settings), notify=silent)
    except UserError as problem:
        return [Finding("", "refused", note=problem.what, fix=problem.fix or "change the file")]
    return []
