"""`meshtune families`: the models that can be tuned, and what each takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from meshtune.families.family import Family
    from meshtune.families.wrappers import Wrapper

INTRODUCTION = """\
Meshtune supports a model if the `model_type` of its config.json is in these tables. `meshtune families --markdown`
prints this page.

**How they are tested.** Fast tests compare the logits of every family with transformers: at ordinary lengths, beyond
windows and original contexts, and with packed documents. The models are small, with random weights. Baichuan is
compared with a transcription of its equations, and InternLM 2 and Kimi K2 with families of the same mathematics.
`pytest -m slow tests/families/test_matrix.py -k NAME` tests the rest for one family: gradients, generation, exported
files, LoRA in peft, LoRA over nf4, chunks, updates in the backward pass, and meshes of simulated devices. The same is
tested with pictures, of several sizes in a row, by `pytest -m "slow or not slow" tests/families/vision`.

**Every family** has these, unless its row says "no ...":

"""


class Entry(TypedDict):
    """One model_type, as `meshtune families --json` prints it."""

    title: str
    group: str
    special: str
    sees: bool
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
    from meshtune.families.wrappers import WRAPPERS

    alone = {model_type: _entry(model_type, description(model_type)) for model_type in sorted(FAMILIES, key=_order)}
    wrapped = sorted(WRAPPERS.items())
    return alone | {model_type: _composite_entry(model_type, wrapper, alone) for model_type, wrapper in wrapped}


def markdown_page() -> str:
    """docs/families.md."""
    from meshtune.data.formats import DOCUMENT_FORMATS
    from meshtune.mesh.config import AXES
    from meshtune.quantize.formats import FORMATS

    lines = ["# Model families", "", INTRODUCTION.rstrip(), ""]
    lines += [f"- methods: {', '.join(_methods())} (`expand` is `method: llama_pro`);"]
    lines += [f"- quantised bases: {', '.join(FORMATS)};"]
    lines += [f"- data: {', '.join(DOCUMENT_FORMATS)}, and preferences ([data](data.md));"]
    lines += [f"- axes of a mesh: {', '.join(AXES)}; ep needs experts."]
    lines += ["", 'Reasons for each "no":', ""]
    reasons: dict[tuple[str, str], None] = {}
    for entry in entries().values():
        reasons |= dict.fromkeys(entry["limits"].items())
    lines += [f"- no {name}: {reason}." for name, reason in reasons]
    lines += [
        "",
        "**Template** names the chat template in Meshtune for tokenizers without one (`model.chat_template`).",
    ]
    lines += [
        "**GGUF** names llama.cpp's architecture ([export and import](going-to.md)). `--gguf` refuses the others."
    ]
    published = [f"`{name}`" for name, entry in entries().items() if entry["compared_on"] == "published weights"]
    lines += [f"Published weights of these were compared too: {', '.join(published)}.", ""]
    group = ""
    for model_type, entry in entries().items():
        if entry["group"] != group:
            group = entry["group"]
            lines += [*([""] if lines[-1] else []), f"## {group.capitalize()}", ""]
            lines += ["| model_type | models | special | template | GGUF |", "| --- " * 5 + "|"]
        models = ": ".join(
            [entry["title"], *([", ".join(f"`{m}`" for m in entry["models"])] if entry["models"] else [])]
        )
        template = f"`{entry['chat_template']}`" if entry["chat_template"] else ""
        gguf = f"`{entry['gguf']}`" if entry["gguf"] else ""
        special = "; ".join([entry["special"], *(f"no {name}" for name in entry["limits"])])
        lines.append(f"| `{model_type}` | {models} | {special} | {template} | {gguf} |")
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
        "sees": False,
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


def _composite_entry(model_type: str, wrapper: Wrapper, alone: dict[str, Entry]) -> Entry:
    """That of a composite: what all text models take that it may have."""
    from meshtune.families.composite import BOTH_WAYS
    from meshtune.families.vision import TOWERS

    names = [wrapper.families.get(text, text) for text in wrapper.texts]
    texts, parts = [alone[name] for name in names], ", ".join(wrapper.parts)
    sees = model_type in TOWERS
    rest = f"with `vision` it reads pictures; else {parts} pass through" if sees else f"{parts} pass through"
    special = f"the text model inside ({', '.join(names)}) is tuned; {rest} untouched"
    if model_type in BOTH_WAYS:
        special = f"tuned with `vision` only, which may be empty: {', '.join(names)} with prompts read both ways"
    return {
        "title": wrapper.title,
        "group": "composite",
        "special": special,
        "sees": sees,
        "models": [],
        "methods": [method for method in texts[0]["methods"] if all(method in text["methods"] for text in texts)],
        "mesh": [axis for axis in texts[0]["mesh"] if all(axis in text["mesh"] for text in texts)],
        "limits": {name: reason for text in texts for name, reason in text["limits"].items()},
        "chat_template": None,
        "gguf": None,
        "compared_on": "random weights" if sees else texts[0]["compared_on"],
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
