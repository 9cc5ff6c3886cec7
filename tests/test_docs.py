"""The pages of README and docs/ say what the registries say: tables are generated, names and links exist."""

from __future__ import annotations

import importlib.util
import pathlib
import re

import pytest

from cli.test_fixes import commands, known_keys
from meshtune.adapters.combine import METHODS as COMBINATIONS
from meshtune.config.recipe import Recipe
from meshtune.config.section import section_fields
from meshtune.config.sections import STAGE_PRESETS
from meshtune.data.chat_templates import template_names
from meshtune.data.formats import FORMATS_BY_TYPE
from meshtune.kernels.attention import BACKENDS

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
GENERATED = {"families.md", "composition.md", "recipe-reference.md", "command-line.md"}
WRITTEN = [page for page in PAGES if page.name not in GENERATED]

spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate.py")
assert spec is not None
assert spec.loader is not None
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)

# The names that a table lists, by the heading of the table's first column.
REGISTRIES = {
    "adapter": set(generate.ADAPTERS),
    "axis": set(generate.AXES),
    "backend": {backend.name for backend in BACKENDS},
    "format": {
        *generate.FORMATS,
        *generate.WRITERS,
        *(name for formats in FORMATS_BY_TYPE.values() for name in formats),
    },
    "--gguf": set(generate.FILE_TYPES),
    "method": set(generate.KINDS),
    "--method": set(COMBINATIONS),
    "optimizer": set(generate.OPTIMIZERS),
    "optimizer.name": set(generate.OPTIMIZERS),
    "quant_method": set(generate.PUBLISHED),
    "stage": {*generate.STAGES, *STAGE_PRESETS},
    "template": set(template_names()),
}
# Modules of models and attributes in Python that look like keys.
OTHERS = tuple(f"model.{name}" for name in "layers language_model embed lm_head spec params engine config".split())
# Words for what the registries have: a sentence that says that one of these is missing must be wrong.
REGISTERED = set().union(*REGISTRIES.values(), generate.FAMILIES, generate.TRACKERS) - {"text", "full", "messages"}
WORDS = r"experts?|mixtures?|adapters?|quantised bases?"
MISSING = re.compile(r"\b(planned|not (implemented|supported) yet|cannot [^.]*\byet\b|not yet|no [^.]* yet)\b")


def prose(page: pathlib.Path) -> str:
    """The text of a page without blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def page_name(page: pathlib.Path) -> str:
    return page.name


def test_generated_pages_and_tables_are_current():
    stale = [path.name for path, text in generate.pages().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "python docs/generate.py"


def test_every_table_of_the_generator_is_used_once():
    found = [name for page in PAGES for _, name, _ in generate.BLOCK.findall(page.read_text(encoding="utf-8"))]
    assert sorted(found) == sorted(generate.TABLES)


@pytest.mark.parametrize("page", WRITTEN, ids=page_name)
def test_names_in_tables_are_registered(page):
    registry, wrong = None, []
    for line in prose(page).splitlines():
        if not line.startswith("|"):
            registry = None
            continue
        first = line.split("|")[1].strip()
        if registry is None:
            registry = REGISTRIES.get(first.strip("`"), set())
        elif registry:
            wrong += [name for name in re.findall(r"`([^`]+)`", first) if name not in registry]
    assert wrong == []


def false_claims(text: str) -> list[str]:
    """Sentences that call something missing that a registry has."""
    sentences = [sentence for sentence in re.split(r"(?<=[.:;|])\s+", text) if MISSING.search(sentence)]
    return [
        sentence
        for sentence in sentences
        if set(re.findall(r"`([\w-]+)`", sentence)) & REGISTERED or re.search(rf"\b({WORDS})\b", sentence)
    ]


@pytest.mark.parametrize(
    "claim",
    [
        "The weights of experts cannot have adapters yet: targets that include them are an error.",
        "`ep` | experts are split; no supported family has experts yet",
        "`kto` and `rm` are planned.",
    ],
)
def test_a_false_claim_is_found(claim):
    assert false_claims(claim)


@pytest.mark.parametrize("page", WRITTEN, ids=page_name)
def test_nothing_that_is_registered_is_called_missing(page):
    assert false_claims(prose(page)) == []


@pytest.mark.parametrize("page", WRITTEN, ids=page_name)
def test_keys_of_recipes_exist(page):
    sections = "|".join(section_fields(Recipe))
    keys = re.findall(rf"(?<![\w./-])((?:{sections})(?:\.[a-z0-9_]+)+)(?![\w.]*[(/])", page.read_text(encoding="utf-8"))
    files = ("json", "jsonl", "jinja", "yaml", "csv", "parquet", "txt", "py", "md", "toml", "log")
    unknown = [
        key for key in keys if re.sub(r"\.\d+\b", "", key) not in known_keys() and key.rpartition(".")[2] not in files
    ]
    assert [key for key in unknown if not key.startswith(OTHERS)] == []


@pytest.mark.parametrize("page", WRITTEN, ids=page_name)
def test_commands_and_their_options_exist(page):
    wrong = []
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(r"(?:^\$? ?|`|&& )meshtune ([a-z][^`#|;\n]*)", text, re.MULTILINE):
        words = line.split()
        name = next((name for name in (" ".join(words[:2]), words[0]) if name in commands()), None)
        if name is None:
            wrong.append(line)
        elif name != "launch local":
            params = commands()[name].params
            known = {
                "--help",
                "--debug",
                *(option for param in params for option in (*param.opts, *param.secondary_opts)),
            }
            wrong += [f"{name} {option}" for option in re.findall(r" (--[a-z][a-z-]+)", line) if option not in known]
    assert wrong == []


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=page_name)
def test_links_lead_to_files_and_headings(page):
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", page.read_text(encoding="utf-8")):
        target, _, anchor = (link[0] or link[1]).partition("#")
        if target.startswith(("http:", "https:")):
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists():
            wrong.append(target)
        elif anchor and anchor not in {slug(h) for h in re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)}:
            wrong.append(f"{target}#{anchor}")
    assert wrong == []


def test_the_code_that_internals_shows_is_the_code():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/internals.md").read_text(encoding="utf-8"), re.DOTALL)
    source = {
        line.strip() for path in (ROOT / "src").rglob("*.py") for line in path.read_text(encoding="utf-8").splitlines()
    }
    shown = [line.strip() for block in blocks for line in block.splitlines()]
    assert len(shown) > 15
    assert [line for line in shown if line not in source] == []
