"""The rules of the house that a machine can check: who may import what, and how large a file may grow."""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import gc
import json
import os
import pathlib
import re
import subprocess
import sys
import types
from collections.abc import Iterator

import meshtune
from compiling import FASTER
from meshtune.config.recipe import Recipe
from meshtune.hooks import SECTIONS, WRITE_STATE
from meshtune.lazy import LazyFunction

PACKAGE = pathlib.Path(meshtune.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# The core runs on any image that has JAX.
CORE = {
    "arrays", "families", "model", "kernels", "adapters", "quantize", "mesh", "weights", "objectives", "optim",
    "json_text", "lazy", "options", "patterns", "translatable",
}  # fmt: skip
# The hubs, and what reads and writes GGUF with the package gguf.
OUTSIDE_THE_CORE = ("weights/hub.py", "weights/hub.py", "families/gguf", "quantize/gguf", "weights/gguf")
CORE_PACKAGES = {"jax", "optax", "numpy", "ml_dtypes", "jaxtyping", "safetensors"}

# Arrows point down: a room imports only rooms that come later in this list.
ROOMS = """__main__ cli board serve launch synth __init__ plan train evaluate setup rollout calls generate quickstart
hub costs runs data config objectives adapters weights families optim model quantize mesh kernels arrays
digests cache terminal options translatable json_text patterns hooks lazy errors""".split()
DOES_NOT_SAY = {"utils", "util", "helpers", "helper", "common", "manager", "base", "misc"}


LAZY = re.compile(r"(meshtune|jax)\.[\w.]+:\w+")


def relative(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def room(name: str) -> str:
    """The room of a file (`train/step/build.py`) or module (`meshtune.train.step.build`)."""
    parts = name.removesuffix(".py").split("/") if name.endswith(".py") else name.split(".")[1:]
    return parts[0] if parts else "__init__"


def parse_file(path: pathlib.Path) -> ast.Module:
    """The syntax tree of a Python file.

    CPython 3.11 counts the depth of a tree for all threads at once and fails where another thread parses meanwhile. The
    interpreter changes threads in this C code only where a garbage collection runs Python: there is none.
    """
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        gc.enable()


@functools.cache
def imports(path: pathlib.Path) -> tuple[tuple[str, bool], ...]:
    """(module, whether it is imported only for type checkers) for every import in a file, inside functions too, and for
    what it names as "module:name" (meshtune.lazy). Hooks name rooms above theirs."""
    tree = parse_file(path)
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    modules: list[tuple[str, bool]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and LAZY.fullmatch(str(node.value)) and path.name != "hooks.py":
            modules.append((str(node.value).partition(":")[0], False))
        if isinstance(node, ast.Import):
            modules += [(alias.name, id(node) in typing_only) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            for alias in node.names:
                module = node.module or ""
                is_module = (PACKAGE.parent / f"{module}.{alias.name}".replace(".", "/")).with_suffix(".py").exists()
                inner = module == "meshtune" or (module.startswith("meshtune") and is_module)
                modules.append((f"{module}.{alias.name}" if inner else module, id(node) in typing_only))
    return tuple(modules)


def is_core(name: str) -> bool:
    return (room(name) in CORE or name.startswith("train/step/")) and not name.startswith(OUTSIDE_THE_CORE)


def test_the_core_imports_only_what_any_image_with_jax_has():
    allowed = CORE_PACKAGES | set(sys.stdlib_module_names) | {"meshtune"}
    wrong = [
        f"{relative(path)} imports {module}"
        for path in FILES
        if is_core(relative(path))
        for module, _ in imports(path)
        if module.split(".")[0] not in allowed
    ]
    assert wrong == []


def test_the_core_imports_no_module_of_meshtune_outside_the_core():
    def fine(module: str) -> bool:
        # Of a model directory that stands for a GGUF file, tensors are listed by what reads GGUF.
        if module in ("meshtune.errors", "meshtune.weights.gguf.directory"):
            return True
        return is_core(module.removeprefix("meshtune.").replace(".", "/") + ".py")

    wrong = [
        f"{relative(path)} imports {module}"
        for path in FILES
        if is_core(relative(path))
        for module, typing_only in imports(path)
        if module.startswith("meshtune") and not typing_only and not fine(module)
    ]
    assert wrong == []


def test_arrows_point_one_way():
    """No room imports one above it, annotations included, so no two rooms import each other."""
    level = {name: index for index, name in enumerate(ROOMS)}
    wrong = []
    for path in FILES:
        importer = room(relative(path))
        for module, _ in imports(path):
            if module.split(".")[0] != "meshtune" or importer == "__init__":
                continue
            imported = room(module)
            if imported != importer and level[imported] <= level[importer]:
                wrong.append(f"{relative(path)} imports {module}")
    assert wrong == []


def test_every_room_has_its_place():
    assert {room(relative(path)) for path in FILES} == set(ROOMS)


PERIPHERY = {"board", "cli", "evaluate", "generate", "hub", "launch", "plan", "quickstart", "serve", "synth"}
PERIPHERAL = ("meshtune.config.foreign", "meshtune.families.gguf", "meshtune.weights.gguf", "meshtune.quantize.gguf")
MOST_LINES = 41_800  # of this package that a small run of training imports
SMALL_RUN = """
import json, pathlib, sys
import meshtune
from meshtune.train.run import train
def lines():
    files = {module.__file__ for name, module in sys.modules.items() if name.startswith("meshtune")} - {None}
    return sum(len(pathlib.Path(file).read_text("utf-8").splitlines()) for file in files)
before = lines()
from meshtune.quickstart import recipe
train(recipe(sys.argv[1], "train.steps=1", "sample.prompts=[]", "eval.every=null", "data.max_length=64"))
print(json.dumps([before, lines(), sorted(name for name in sys.modules if name.startswith("meshtune."))]))
"""


def test_training_imports_no_periphery_and_few_lines(tmp_path: pathlib.Path):
    """A small supervised run without evaluation or push, in a new process."""
    command = [sys.executable, "-c", SMALL_RUN, str(tmp_path / "run")]
    env = os.environ | {"XLA_FLAGS": FASTER}
    process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=300)
    assert process.returncode == 0, process.stderr
    before, after, modules = json.loads(process.stdout.splitlines()[-1])
    assert [name for name in modules if room(name) in PERIPHERY - {"quickstart"}] == []
    assert [name for name in modules if name.startswith(PERIPHERAL)] == []
    assert 10_000 < before <= after <= MOST_LINES


def test_everything_that_is_imported_when_it_is_used_exists():
    named = {
        str(node.value)
        for path in FILES
        for node in ast.walk(parse_file(path))
        if isinstance(node, ast.Constant) and LAZY.fullmatch(str(node.value))
    }
    assert len(named) > 30
    for target in sorted(named):
        assert LazyFunction(target).load() is not None, target


def test_a_hook_names_a_function_of_a_room_that_is_imported_only_when_it_is_called():
    named = [hook for section in SECTIONS.values() for hook in vars(section).values() if hook is not None]
    for hook in [*named, WRITE_STATE]:
        assert callable(hook.load()), hook
    assert set(SECTIONS) <= set(Recipe.model_fields)


def test_nothing_private_of_jax_is_imported():
    wrong = [f"{relative(p)} imports {m}" for p in FILES for m, _ in imports(p) if m.startswith("jax._src")]
    assert wrong == []


def test_no_module_framework():
    wrong = [
        f"{relative(p)} imports {m}" for p in FILES for m, _ in imports(p) if m.split(".")[0] in ("flax", "equinox")
    ]
    assert wrong == []


def test_a_file_is_one_idea():
    lines = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: count for name, count in lines.items() if count > 600} == {}
    assert [relative(path) for path in FILES if path.stem in DOES_NOT_SAY] == []


def test_only_edges_import_pydantic():
    wrong = [
        f"{relative(path)} imports pydantic"
        for path in FILES
        if room(relative(path)) not in ("config", "cli", "serve")
        for module, _ in imports(path)
        if module.split(".")[0] in ("pydantic", "pydantic_core")
    ]
    assert wrong == []


# Options of the same name, type and default that are not the same option: of a base and of a data set; of a run and of
# one prompt; of samples and rollouts while training and of `generate`; of a recipe's mixture and of one message; of a
# recipe of data and of a message, request or suite.
NAMESAKES = {"content", "extra", "limit", "options", "pictures"} | {
    "merge",
    "min_p",
    "revision",
    "seed",
    "temperature",
    "top_k",
    "top_p",
    "weight",
}
OWN_OPTIONS = ("cli", "launch", "runs", "serve")  # rooms whose dataclasses are options of commands and requests


def test_an_option_of_a_recipe_is_declared_once():
    """A section of a recipe and a dataclass that its values go to never both say a name, a type and a default: the
    section takes them from the dataclass (config.section.declared), or the dataclass has no default."""
    sections: set[tuple[str, ...]] = set()
    dataclasses: set[tuple[str, ...]] = set()
    for path in FILES:
        for node in ast.walk(parse_file(path)):
            if not isinstance(node, ast.ClassDef):
                continue
            options = {(node.name, *option) for option in options_of(node)}
            decorators = "".join(map(ast.unparse, node.decorator_list))
            if [ast.unparse(parent) for parent in node.bases] == ["Section"]:
                sections |= options
            elif "dataclass" in decorators and room(relative(path)) not in OWN_OPTIONS:
                dataclasses |= options
    assert ("TrainSection", "batch_size", "int", "16") in sections
    assert ("LossPolicy", "train_on_prompt", "bool", "False") in dataclasses
    twice = [
        f"{section}.{name} and {second_section}.{name}"
        for section, name, kind, default in sections
        for second_section, *field in dataclasses
        if field == [name, kind, default] and name not in NAMESAKES
    ]
    assert twice == []


def options_of(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """(name, type, default) of the fields of a class that have a default of their own; types as Python's."""
    for field in node.body:
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.value is not None):
            continue
        default = field.value
        if isinstance(default, ast.Call):
            named = {keyword.arg: keyword.value for keyword in default.keywords}
            choices = [named.get("default"), named.get("default_factory"), *default.args]
            if ast.unparse(default.func) == "declared":
                continue
            default = next((value for value in choices if value is not None), None)
        if default is None or (isinstance(default, ast.Constant) and default.value is ...):
            continue
        kind = ast.unparse(field.annotation).replace("PositiveInt", "int").replace("PathText", "str")
        kind = re.sub(r"\b(list|dict|tuple|Mapping|Sequence)\[.*\]", "container", kind).replace(
            " | Literal['auto']", ""
        )
        text = ast.unparse(default)
        yield field.target.id, kind, "empty" if text in ("()", "[]", "{}", "list", "dict", "tuple") else text


def test_words_to_choose_from_are_listed_once():
    """No two Literal types of three words or more list the same words: one of them is a name for both."""
    places: dict[frozenset[str], set[str]] = {}
    for path in FILES:
        for node in ast.walk(parse_file(path)):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
                values = [entry.value for entry in ast.walk(node.slice) if isinstance(entry, ast.Constant)]
                if len(values) > 2:
                    places.setdefault(frozenset(map(str, values)), set()).add(f"{relative(path)}:{node.lineno}")
    assert {values: lines for values, lines in places.items() if len(lines) > 1} == {}


# Pronouns and fillers say nothing about what a name holds.
FILLERS = frozenset(
    """found made here asked mine one own each there whole wanted words told said what this other others every some kept
    held seen given begun came ahead away same rest way ways around outer nothing much more most now know knows gone
    goes taken brought wish asks says tell""".split()
)


def bound_names(path: pathlib.Path) -> Iterator[str]:
    """Every name that a file binds: variables, parameters, functions, classes."""
    for node in ast.walk(parse_file(path)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg


def test_names_are_the_fields_words():
    """Below one in two hundred, which leaves room for a field of a recipe such as `checkpoint.every`."""
    names = [(name, path) for path in FILES for name in bound_names(path)]
    fillers = [f"{relative(path)}: {name}" for name, path in names if name.strip("_").lower() in FILLERS]
    assert len(fillers) < 0.005 * len(names), fillers


def undefined_names(path: pathlib.Path) -> set[str]:
    module = compile(path.read_text(encoding="utf-8"), str(path), "exec")
    defined = {step.argval for step in dis.get_instructions(module) if step.opname in ("STORE_NAME", "IMPORT_STAR")}
    functions, used = [module], set()
    for code in functions:
        functions += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        used |= {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
        used -= {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_GLOBAL"}
    return used - defined - set(dir(builtins)) - {"__file__", "__name__"}


def test_every_name_that_a_function_uses_is_defined():
    """Ruff's own check is off: it takes the shapes of jaxtyping's annotations for names."""
    undefined = {relative(path): undefined_names(path) for path in FILES}
    assert {name: names for name, names in undefined.items() if names} == {}
