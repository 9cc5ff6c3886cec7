"""`meshtune families`: the models that can be tuned, and what each takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from meshtune.families.composite import Wrapper
    from meshtune.families.family import Family

INTRODUCTION = """\
Made by `meshtune families --markdown`. A model is supported if the `model_type` of its config.json is in these tables.

The fast tests compare every family with transformers (Baichuan: with a transcription of its equations, InternLM 2 and
Kimi K2: with families that are the same by another name) on small models with random weights in which no number is
trivially zero or one: logits at ordinary lengths and beyond windows and original contexts, packed documents against
documents alone. `pytest -m slow tests/families/test_matrix.py -k NAME` compares all else for one family: gradients of
every parameter, generation over the cache token by token, exported files to the bit, LoRA in peft both ways, LoRA over
nf4, gradients by chunks and in the backward pass, and meshes of simulated devices against one device. "Published
weights" says that a published model was compared as well. A composite around Gemma 3 was tuned in full by two real
processes, with LoRA on a mesh of four simulated devices, and merged; its towers stayed as they were to the bit.
"""


class Entry(TypedDict):
    """One model_type, as `meshtune families --json` prints it."""

    title: str
    group: str
    special: str
    models: list[str]
    methods: list[str]
    mesh: list[str]
    limits: dict[str, str]
    chat_template: str | None
    gguf: str | None
    compared_on: str


def families(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, as in docs/families.md.")] = False,
) -> None:
    """List the models that can be tuned: every model_type with its special parts, methods and meshes."""
    import json

    from meshtune.terminal import console

    if as_json:
        print(json.dumps(entries(), indent=2, ensure_ascii=False))
    elif markdown:
        print(markdown_page(), end="")
    else:
        output = console()
        output.print(_table())
        output.print(f"[bold]methods[/] of all, but for what is said: {', '.join(_methods())}", soft_wrap=True)
        output.print("[dim]published models, chat templates, meshes: meshtune families --json[/]", soft_wrap=True)


def entries() -> dict[str, Entry]:
    """Every supported model_type, group by group, then by name; last the composites around them."""
    from meshtune.families import FAMILIES, description
    from meshtune.families.composite import WRAPPERS

    alone = {model_type: _entry(model_type, description(model_type)) for model_type in sorted(FAMILIES, key=_order)}
    return alone | {model_type: _composite_entry(wrapper, alone) for model_type, wrapper in WRAPPERS.items()}


def markdown_page() -> str:
    """docs/families.md."""
    from meshtune.data.formats import DOCUMENT_FORMATS
    from meshtune.quantize.formats import FORMATS

    lines = ["# Model families", "", INTRODUCTION]
    lines += [f"- **Methods:** {', '.join(_methods())}, where a table names no exception."]
    lines += [f"- **Quantised bases:** {', '.join(FORMATS)}."]
    lines += [f"- **Data:** {', '.join(DOCUMENT_FORMATS)}, and preferences ([data](data.md)), for every family."]
    lines += ["- **Chat template:** the tokenizer's own; the one named here ships with Meshtune, for tokenizers that"]
    lines += ["  have none (`model.chat_template`)."]
    lines += [
        "- **GGUF:** llama.cpp's architecture of the models that are written and read as GGUF ([out](going-to.md));"
    ]
    lines += ["  where none is named, `--gguf` refuses the model and names the way by llama.cpp's own converter.", ""]
    group = ""
    for model_type, entry in entries().items():
        if entry["group"] != group:
            group = entry["group"]
            lines += [*([""] if lines[-1] else []), f"## {group.capitalize()}", ""]
            lines += ["| model_type | models | special | mesh | template | GGUF | compared on |", "| --- " * 7 + "|"]
        models = ": ".join(
            [entry["title"], *([", ".join(f"`{m}`" for m in entry["models"])] if entry["models"] else [])]
        )
        template = f"`{entry['chat_template']}`" if entry["chat_template"] else ""
        gguf = f"`{entry['gguf']}`" if entry["gguf"] else ""
        cells = [f"`{model_type}`", models, _special(entry), ", ".join(entry["mesh"]), template, gguf]
        cells.append(entry["compared_on"])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _order(model_type: str) -> tuple[int, str]:
    from meshtune.families import description
    from meshtune.families.family import GROUPS

    return GROUPS.index(description(model_type).group), model_type


def _methods() -> list[str]:
    from meshtune.adapters.registry import ADAPTERS

    return [*ADAPTERS, "full", "freeze", "expand"]


def _entry(model_type: str, family: Family) -> Entry:
    from meshtune.mesh.config import AXES

    axes = [axis for axis in AXES if axis != "ep" or family.experts]
    return {
        "title": family.title,
        "group": family.group,
        "special": family.special,
        "models": list(family.models),
        "methods": [method for method in _methods() if method not in family.refusals],
        "mesh": [axis for axis in axes if axis not in family.refusals],
        "limits": dict(family.refusals),
        "chat_template": family.template,
        "gguf": _gguf(model_type),
        "compared_on": family.maturity,
    }


def _gguf(model_type: str) -> str | None:
    """llama.cpp's name of the architecture that models of this type are written as."""
    from meshtune.families.gguf.registry import ARCHITECTURES

    return ARCHITECTURES[model_type].name if model_type in ARCHITECTURES else None


def _composite_entry(wrapper: Wrapper, alone: dict[str, Entry]) -> Entry:
    """That of a composite: what all text models take that it may have."""
    texts = [alone[model_type] for model_type in wrapper.texts]
    parts = ", ".join(wrapper.parts)
    return {
        "title": wrapper.title,
        "group": "composite",
        "special": f"the text model inside ({', '.join(wrapper.texts)}) is tuned; {parts} pass through untouched",
        "models": [],
        "methods": [method for method in texts[0]["methods"] if all(method in text["methods"] for text in texts)],
        "mesh": [axis for axis in texts[0]["mesh"] if all(axis in text["mesh"] for text in texts)],
        "limits": {name: reason for text in texts for name, reason in text["limits"].items()},
        "chat_template": None,
        "gguf": None,
        "compared_on": texts[0]["compared_on"],
    }


def _special(entry: Entry) -> str:
    """Special parts, and refused settings with the reason."""
    return "; ".join([entry["special"], *(f"no {name}: {reason}" for name, reason in entry["limits"].items())])


def _table() -> Table:
    from rich.table import Table

    table = Table(title="model families", title_justify="left")
    table.add_column("model_type", no_wrap=True)
    for heading in ("models", "special"):
        table.add_column(heading, overflow="fold")
    group = ""
    for model_type, entry in entries().items():
        if entry["group"] != group:
            group = entry["group"]
            table.add_section()
            table.add_row("", f"[bold]{group}[/]", "")
        table.add_row(model_type, entry["title"], _special(entry))
    return table
