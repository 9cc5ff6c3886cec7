"""Writes the generated pages of docs/ and the generated tables of other pages from the product's registries.

`python docs/generate.py` writes them; tests/test_docs.py fails if a page differs from what it would write. A generated
table stands between `<!-- generated: NAME -->` and `<!-- end -->`; NAME is a key of TABLES. A new table is one function
and one line there.
"""

from __future__ import annotations

import collections
import json
import pathlib
import re
from collections.abc import Callable, Iterable

import typer

from meshtune.adapters.registry import ADAPTERS
from meshtune.cli import families as family_list
from meshtune.cli import schema as reference
from meshtune.cli.launch import app as launch_app
from meshtune.cli.main import app
from meshtune.config import fields as schema
from meshtune.config.sections import METHODS
from meshtune.data.formats import DOCUMENT_FORMATS
from meshtune.data.sources import READERS
from meshtune.families import FAMILIES
from meshtune.families.family import GROUPS
from meshtune.families.wrappers import WRAPPERS
from meshtune.mesh.config import AXES, MeshConfig
from meshtune.objectives.stages import STAGES
from meshtune.optim.build import OPTIMIZERS
from meshtune.plan import program as composition
from meshtune.quantize.formats import FORMATS
from meshtune.quantize.gguf.mixture import FILE_TYPES
from meshtune.quantize.published import METHODS as PUBLISHED
from meshtune.quantize.published.write import WRITERS
from meshtune.setup.card import known_plugins
from meshtune.train.report.events import TRACKERS

ROOT = pathlib.Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
KEYS_TITLE = """\
# Every key of a recipe

`meshtune schema --markdown` prints this list. [Recipes](recipes.md) has the rules. Without a default here, it is null.
"""
COMMANDS_TITLE = """\
# The command line

`meshtune schema --commands` prints this page. Every command also has `--help`.
"""
KINDS = [method.__dataclass_fields__["kind"].default for method in METHODS]


def main() -> None:
    """Writes every page that is not current, and names it."""
    for path, text in pages().items():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))


def pages() -> dict[pathlib.Path, str]:
    """The text of every page that is generated or has a generated table, by path."""
    docs = ROOT / "docs"
    commands = reference.commands(typer.main.get_command(app), "meshtune").rstrip()
    found = {
        docs / "families.md": family_list.markdown_page(),
        docs / "composition.md": composition.page(),
        docs / "recipe-reference.md": f"{KEYS_TITLE}\n{schema.markdown().rstrip()}\n",
        docs / "command-line.md": f"{COMMANDS_TITLE}\n{commands}\n",
    }
    for path in sorted([ROOT / "README.md", *docs.glob("*.md")]):
        text = path.read_text(encoding="utf-8")
        if path not in found and BLOCK.search(text):
            found[path] = BLOCK.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}", text)
    return found


def support() -> str:
    """What is supported: the names of every registry, for the README."""
    groups = collections.Counter(entry["group"] for entry in family_list.entries().values())
    models = ", ".join(f"{groups[group]} {group}" for group in GROUPS)
    commands = launch_app.registered_commands
    rows = {
        "models": f"{len(FAMILIES)} model types ({models}), and the text model of {len(WRAPPERS)} multimodal ones",
        "`method`": _names(KINDS),
        "`method.adapter`": _names(ADAPTERS),
        "`quantize`": f"{_names(FORMATS)}; published weights in {', '.join(PUBLISHED)}",
        "`stage`": _names(STAGES),
        "`optimizer.name`": _names(OPTIMIZERS),
        "data formats": _names(DOCUMENT_FORMATS),
        "data files": _names(READERS),
        "`mesh`": _names(AXES),
        "`log.trackers`": _names(TRACKERS),
        "`export`": f"Hugging Face, PEFT, {', '.join(WRITERS)}; GGUF in {', '.join(FILE_TYPES)}",
        "`launch`": _names(command.name or command.callback.__name__ for command in commands if command.callback),
    }
    return _table(("", "supported"), rows.items())


def methods() -> str:
    """What each method trains: the first sentence about its options."""
    rows = []
    for kind, method in zip(KINDS, METHODS, strict=True):
        refused = composition.refusal(composition.METHODS[kind], {"quantize": "nf4"})
        rows.append((f"`{kind}`", _sentence(method.__doc__), "no" if refused else "yes"))
    return _table(("`method`", "trains", "with `quantize`"), rows)


def adapters() -> str:
    """What each type of adapter can be combined with, by building the step of a small model."""
    columns: dict[str, composition.Overrides] = {
        "full-precision base": {"quantize": None},
        "quantised base": {"quantize": "nf4"},
        "`dropout`": {"method": {"dropout": 0.1}},
        "`rslora`": {"method": {"rslora": True}},
        "`lm_head` as a target": {"method": {"targets": ["q_proj", "lm_head"]}},
        "routed experts as targets": {"model": _mixture(), "method": {"targets": ["experts"]}},
    }
    rows = []
    for name in ADAPTERS:
        base = composition.METHODS[name]
        answers = [composition.refusal(base, column) is None for column in columns.values()]
        rows.append((f"`{name}`", *("yes" if answer else "no" for answer in answers)))
    return _table(("`adapter`", *columns), rows)


def axes() -> str:
    """The axes of a mesh, and the families that refuse one."""
    entries = family_list.entries()
    fields = MeshConfig.__dataclass_fields__
    rows = []
    for axis in AXES:
        without = [f"`{name}`" for name, entry in entries.items() if axis in entry["limits"]]
        models = (
            "models with experts" if axis == "ep" else "all models" + (f" but {', '.join(without)}" * bool(without))
        )
        rows.append((f"`{axis}`", fields[axis].metadata["description"], models))
    return _table(("axis", "splits", "for"), rows)


def experts() -> str:
    """The model types with experts, by group."""
    lines = []
    for group in (*GROUPS, "composite"):
        entries = [
            f"`{name}`"
            for name, entry in family_list.entries().items()
            if entry["group"] == group and "ep" in entry["mesh"]
        ]
        lines += [f"- **{group}:** {', '.join(entries)}."] * bool(entries)
    return "\n".join(lines)


def install() -> str:
    """The extra for each kind of device and what it requires, for docs/install.md."""
    rows = []
    for plugin in known_plugins():
        needs = [f"driver {plugin.driver} or newer"] * bool(plugin.driver)
        needs += [f"Python {plugin.python} or later"] * (plugin.python != "3.11")
        needs += [f"JAX {plugin.jax}"] * bool(plugin.jax)
        needs += [plugin.needs] * bool(plugin.needs)
        needs += [f"`{name}={value}`" for name, value in plugin.variables.items()]
        rows.append((plugin.title, f"`pip install '.[{plugin.name}]'`", "; ".join(needs)))
    return _table(("device", "install", "requirements"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "support": support,
    "methods": methods,
    "adapters": adapters,
    "axes": axes,
    "experts": experts,
    "install": install,
}


def _mixture() -> str:
    """A folder with the config of a small mixture of experts."""
    folder = pathlib.Path(composition.model())
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if not key.endswith("_bias")}
    config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    config |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    mixture = folder / "mixture"
    mixture.mkdir(exist_ok=True)
    (mixture / "config.json").write_text(json.dumps(config))
    return str(mixture)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _sentence(text: str | None) -> str:
    """The first sentence of a docstring, without links and references to pages."""
    first = re.split(r"(?<=[.])\s", " ".join((text or "").split("\n\n")[0].split()))[0]
    return re.sub(r"\s*\((https?:|docs/)[^)]*\)", "", first).removesuffix(".")


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    main()
