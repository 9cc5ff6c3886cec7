"""The program as its users meet it: exit codes, the output on both streams, and how soon it comes."""

from __future__ import annotations

import importlib
import pathlib
import re
import subprocess
import sys

import pytest

from meshtune.cli import main as program
from meshtune.cli.export import shard_bytes
from meshtune.cli.train import split
from meshtune.errors import UserError

RECIPE = "model: m\ndata: a.json\noutput: o\n"


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch):
    """`main` sets sys.excepthook: put it back, and start without a debug setting from outside."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.delenv("MESHTUNE_DEBUG", raising=False)


@pytest.fixture
def meshtune(capsys: pytest.CaptureFixture[str]):
    """Runs the program in this process: (exit code, standard output, standard error)."""

    def run(*arguments: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            program.main(arguments)
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run


@pytest.fixture
def trained_recipes(monkeypatch: pytest.MonkeyPatch):
    """Replaces training and its first checks of files, which do not exist: keeps the recipes it was given."""
    recipes = []

    class Result:
        interrupted = None

    def train(recipe, *, console=None, job=None):
        recipes.append(recipe)
        return Result()

    monkeypatch.setattr(importlib.import_module("meshtune.train.run"), "train", train)
    monkeypatch.setattr(importlib.import_module("meshtune.setup.early"), "check_run", lambda recipe: None)
    train.result, train.recipes = Result, recipes  # pyright: ignore[reportFunctionMemberAccess]
    return train


def imported_modules(*arguments: str) -> set[str]:
    """Modules that a run of the program imports."""
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "meshtune", *arguments], capture_output=True, text=True, check=True
    )
    return set(re.findall(r"^import time:.*\| +(\S+)$", ran.stderr, re.MULTILINE))


@pytest.mark.parametrize(
    "arguments", [("--help",), ("train", "--help"), ("data", "--help"), ("launch", "slurm", "--help"), ("version",)]
)
def test_help_waits_for_nothing_heavy(arguments):
    """The claim is under half a second; what costs seconds is these imports, and a busy machine cannot blur them."""
    modules = imported_modules(*arguments)
    assert "meshtune.cli.main" in modules
    heavy = {
        "jax",
        "jaxlib",
        "numpy",
        "transformers",
        "datasets",
        "grain",
        "orbax",
        "matplotlib",
        "torch",
        "tensorboard",
    }
    assert {module.split(".")[0] for module in modules} & heavy == set()


def test_every_verb_has_help(meshtune):
    for verb in [*program.VERBS, *program.GROUPS]:
        code, out, _ = meshtune(verb, "--help")
        assert code == 0
        assert "Usage: meshtune " + verb in out


def test_help_names_every_option_whole_at_80_columns(meshtune, monkeypatch):
    """Also those that are longer than a column of a table would be."""
    monkeypatch.setenv("COLUMNS", "80")
    for verb, flags in {
        ("generate",): ("--max-tokens", "--max-new-tokens", "--repetition-penalty", "--chat / --no-chat"),
        ("launch", "slurm"): ("--processes-per-node", "--cpus-per-process", "--container-runtime"),
    }.items():
        _, out, _ = meshtune(*verb, "--help")
        assert [flag for flag in flags if flag not in out] == []
        assert "…" not in out


def test_a_verb_in_the_table_is_a_verb_of_the_program(meshtune):
    """A new verb is one module and one line in VERBS."""
    _, out, _ = meshtune("--help")
    assert all(verb in out for verb in [*program.VERBS, *program.GROUPS])


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_version_is_a_flag_too(meshtune, flag):
    assert meshtune(flag) == meshtune("version")
    assert re.fullmatch(r"meshtune \d+\.\d+\S*\n", meshtune(flag)[1])


def test_a_mistyped_verb_or_option_gets_a_suggestion(meshtune):
    code, _, err = meshtune("trian")
    assert code == 2
    assert "Did you mean 'train'?" in err
    code, _, err = meshtune("train", "--resum", "x.yaml")
    assert code == 2
    assert "--resume" in err


def test_a_users_mistake_is_three_lines_and_exit_code_2(meshtune, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    code, out, err = meshtune("train", str(path), "method.rank=0")
    assert code == 2
    assert out == ""
    assert err.splitlines() == [
        "error: method.rank is 0: it must be a whole number above 0",
        "where: command line, method.rank=0",
        "  fix: change it; `meshtune schema --markdown` lists every key",
    ]


def test_brackets_in_a_message_are_printed_as_they_are(meshtune):
    code, _, err = meshtune("train", "[red]nope[/red].yaml")
    assert code == 2
    assert "where: [red]nope[/red].yaml" in err


@pytest.mark.parametrize("place", [0, 1, 2])
def test_debug_shows_the_traceback_wherever_it_stands(place):
    arguments = ["train", "nope.yaml"]
    arguments.insert(place, "--debug")
    with pytest.raises(UserError, match="there is no such recipe"):
        program.main(arguments)


def test_debug_can_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("MESHTUNE_DEBUG", "1")
    with pytest.raises(UserError, match="there is no such recipe"):
        program.main(["train", "nope.yaml"])


def test_a_defect_says_so_keeps_the_traceback_and_exits_with_1(tmp_path):
    """In a separate process: the exit code of an uncaught exception is Python's to give."""
    script = (
        "import meshtune.cli.main as m\n"
        "def broken(): raise RuntimeError('the cat sat on it')\n"
        "m.app.command('broken')(broken)\n"
        "m.main(['broken'])\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={"TMPDIR": str(tmp_path), "PATH": ""}
    )
    assert ran.returncode == 1
    assert "This is a defect in Meshtune, not in what you did: RuntimeError: the cat sat on it" in ran.stderr
    assert "Traceback" not in ran.stderr
    (file,) = tmp_path.glob("meshtune-defect-*.txt")
    assert str(file) in ran.stderr
    assert "RuntimeError: the cat sat on it" in file.read_text()
    assert file.read_text().startswith("meshtune 0")


def test_ctrl_c_exits_with_130(meshtune, monkeypatch, trained_recipes):
    monkeypatch.setattr(trained_recipes.result, "interrupted", 2)
    assert meshtune("train", "model=m", "data=a.json", "output=o")[0] == 130

    def interrupt(recipe, *, console=None, job=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("meshtune.train.run"), "train", interrupt)
    assert meshtune("train", "model=m", "data=a.json", "output=o")[0] == 130


def test_train_hands_over_the_recipe_with_its_overrides(meshtune, tmp_path, trained_recipes):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    assert meshtune("train", str(path), "method.rank=16", "--resume", "seed=3")[0] == 0
    (recipe,) = trained_recipes.recipes
    assert (recipe.method.rank, recipe.seed, recipe.resume, recipe.overwrite) == (16, 3, True, False)


def test_resume_and_overwrite_exclude_each_other(meshtune, tmp_path, trained_recipes):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    code, _, err = meshtune("train", str(path), "--resume", "--overwrite")
    assert code == 2
    assert "give resume or overwrite, not both" in err
    assert trained_recipes.recipes == []


@pytest.mark.parametrize(("written", "flag"), [("overwrite", "resume"), ("resume", "overwrite")])
def test_a_flag_wins_over_its_opposite_in_the_file(meshtune, tmp_path, trained_recipes, written, flag):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{RECIPE}{written}: true\n")
    code, _, err = meshtune("train", str(path), f"--{flag}")
    assert code == 0
    assert f"note: command line, {flag}=true: {written}: true in the recipe has no effect" in err
    (recipe,) = trained_recipes.recipes
    assert (getattr(recipe, flag), getattr(recipe, written)) == (True, False)


def test_the_first_argument_is_a_file_unless_it_can_only_be_an_override(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert split(["r.yaml", "a=1"]) == ("r.yaml", ["a=1"])
    assert split(["a=1", "b=2"]) == (None, ["a=1", "b=2"])
    pathlib.Path("lr=1e-4.yaml").touch()
    assert split(["lr=1e-4.yaml", "b=2"]) == ("lr=1e-4.yaml", ["b=2"])


def test_schema_prints_json_or_a_table(meshtune):
    code, out, _ = meshtune("schema")
    assert code == 0
    assert '"$schema": "https://json-schema.org/draft/2020-12/schema"' in out
    code, out, _ = meshtune("schema", "--markdown")
    assert code == 0
    assert out.startswith("## model\n\n- `model.path` (text; required): ")


def test_env_names_the_devices_and_versions(meshtune):
    code, out, _ = meshtune("env")
    assert code == 0
    assert "cpu" in out
    assert re.search(r"jax \d", out)


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("500 mb", 5 * 10**8), ("2GiB", 2**31), ("1.5kB", 1500), ("4096", 4096)]
)
def test_sizes_in_words(text, size):
    assert shard_bytes(text) == size


@pytest.mark.parametrize("text", ["5 apples", "", "-1GB", "0", "GB"])
def test_a_size_that_is_none_is_an_error(text):
    with pytest.raises(UserError, match="is not a size"):
        shard_bytes(text)
