"""Checks that need no device run before JAX is imported, and no command imports torch because it is installed.

Importing JAX takes a second of processor time, transformers another, and torch four: that they are not imported is
asserted instead of a time, which would depend on the machine.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

import meshtune.quickstart

MODEL = pathlib.Path(meshtune.quickstart.__file__).parent / "model"
HEAVY = ("jax", "torch", "transformers", "datasets")
# Runs each command line of a JSON list, one after another, and prints its exit code, what it says and what it imported.
PROGRAM = """
import contextlib, io, json, sys
from meshtune.cli.main import main
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:], output = arguments, io.StringIO()
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
        try:
            main()
            code = 0
        except SystemExit as exit:
            code = exit.code
    print(json.dumps([code, output.getvalue(), [name for name in %r if name in sys.modules]]))
"""


def run(*command_lines: list[str], cwd) -> list[tuple[int, str, list[str]]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM % (HEAVY,), json.dumps(command_lines)],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=True,
    )
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    (tmp_path / "data.odt").write_text("no data")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("something")
    fields = {"model": str(MODEL), "data": {"train": "data.jsonl", "max_length": 64}, "output": "out"}
    (tmp_path / "recipe.yaml").write_text(json.dumps(fields | {"train": {"steps": 1, "batch_size": 1}}))
    return "recipe.yaml"


# What is wrong, and a part of what is said.
TRAIN = {
    "model=nothere": "model path 'nothere' does not exist",
    "model=data.jsonl": "'data.jsonl' is a file; a model is a directory",
    "model=nothere.gguf": "there is no GGUF file",
    "model.tokenizer=./nothere": "model path './nothere' does not exist",
    "model.chat_template=nope": "neither a file nor the name of a chat template",
    "model.adapter=nothere": "there is no adapter at 'nothere'",
    "model.merge_adapters=[./nothere]": "there is no adapter at './nothere'",
    "data.train=data.json": "did you mean data.jsonl",
    "data.train=data.odt": "cannot read this type of file",
    "data.train=nowhere/data.jsonl": "its folder nowhere does not exist either",
    "data.validation=data.csv": "did you mean data.jsonl",
    "data.registry=nothere.json": "no such file or folder",
    "output=full": "the output directory is not empty",
    "output=full/file": "full/file",
    "optimizer.learning_rat=1": "did you mean 'learning_rate'",
    "mesh.fsdp=64": "the mesh fsdp=64 needs 64 devices, and this machine has 1",
    "log.trackers=[mlflow]": "the tracker 'mlflow' is not installed",
}


def test_mistakes_that_need_no_device_are_said_before_jax_is_imported(recipe, tmp_path):
    commands = {
        "generate nothere": "model path 'nothere' does not exist",
        "chat nothere": "model path 'nothere' does not exist",
        f"chat {MODEL} --adapter ./nothere": "there is no adapter at './nothere'",
        "serve nothere": "model path 'nothere' does not exist",
        f"serve {MODEL} --adapter a=./nothere": "there is no adapter at './nothere'",
        "eval nothere": "model path 'nothere' does not exist",
        f"eval {MODEL} --data nothere.jsonl": "no such file or folder",
        "predict nothere --data data.jsonl": "model path 'nothere' does not exist",
        f"predict {MODEL} --data nothere.jsonl": "no such file or folder",
        "export nothere --to x": "model path 'nothere' does not exist",
        "push nothere a/b": "model path 'nothere' does not exist",
        f"plan {recipe} --target H100 model=nothere": "model path 'nothere' does not exist",
        f"data inspect {recipe} model=nothere": "model path 'nothere' does not exist",
        f"data inspect {recipe} data.train=data.json": "did you mean data.jsonl",
    }
    commands |= {f"train {recipe} train.batch_size=64 {override}": message for override, message in TRAIN.items()}
    if importlib.util.find_spec("mlflow") is not None:
        del commands[f"train {recipe} train.batch_size=64 log.trackers=[mlflow]"]
    if importlib.util.find_spec("uvicorn") is None:
        commands = {line: message for line, message in commands.items() if not line.startswith("serve")}
    outcomes = run(*(line.split() for line in commands), cwd=tmp_path)
    for (line, expected), (code, output, imported) in zip(commands.items(), outcomes, strict=True):
        assert (line, code) == (line, 2), output
        assert expected in output.replace("\n", " "), line
        assert (line, imported) == (line, [])


def test_the_fixes_of_a_mesh_that_is_too_large_work(recipe, tmp_path, monkeypatch):
    from meshtune.config.load import load_recipe
    from meshtune.errors import UserError
    from meshtune.setup.early import check_run

    large = load_recipe(recipe, ["mesh.fsdp=4", "train.batch_size=4"])
    with pytest.raises(UserError, match=r"simulate them \(meshtune launch local --devices 4 ...\), or give a mesh"):
        check_run(large)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")  # as that command sets it
    check_run(large)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(UserError, match="this machine has 2"):
        check_run(large)
    check_run(load_recipe(recipe, ["mesh.fsdp=-1"]))


def test_a_hub_id_is_no_wrong_path(recipe):
    from meshtune.config.load import load_recipe
    from meshtune.setup.early import check_inputs

    check_inputs(load_recipe(recipe, ["model=owner/name", "data.train=owner/data", "model.merge_adapters=[owner/one]"]))


torch_is_here = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@torch_is_here
def test_a_command_that_tokenises_does_not_import_torch(recipe, tmp_path):
    ((code, output, imported),) = run(["data", "inspect", recipe, "model.chat_template=chatml"], cwd=tmp_path)
    assert code == 0, output
    assert "data.jsonl, record 0" in output
    assert "transformers" in imported
    assert "torch" not in imported


@torch_is_here
@pytest.mark.slow
def test_no_command_imports_torch(recipe, tmp_path):
    lines = [
        f"train {recipe}",
        "generate out --max-tokens 2 --prompt a",
        "predict out --data data.jsonl --max-tokens 2",
        "eval out --data data.jsonl --max-tokens 2 --allow-training-data",
        "export out --merge --to merged",
        "export out --merge --to merged.gguf --gguf Q8_0",
        f"plan {recipe} --target H100 --estimate",
        "weights check merged",
        "doctor",
        "env",
    ]
    for line, (code, output, imported) in zip(lines, run(*(line.split() for line in lines), cwd=tmp_path), strict=True):
        assert (line, code) == (line, 0), output
        assert (line, "torch" in imported) == (line, False)


@torch_is_here
@pytest.mark.slow
def test_a_program_that_imports_meshtune_keeps_torch():
    code = (
        "import sys, meshtune\nfrom meshtune.data.tokenizer import load_tokenizer\nload_tokenizer(sys.argv[1])\n"
        "import transformers\nassert transformers.utils.is_torch_available()\ntransformers.LlamaForCausalLM\n"
        "from meshtune.data.without_torch import leave_torch_out\nleave_torch_out()\nimport torch\n"
    )
    subprocess.run([sys.executable, "-c", code, str(MODEL)], check=True)


@torch_is_here
def test_other_packages_can_import_torch_in_a_command():
    code = "from meshtune.data.without_torch import leave_torch_out as f\nf()\nimport transformers.utils\n"
    code += (
        "assert not transformers.utils.is_torch_available()\nimport importlib.util as u\nassert u.find_spec('torch')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


LONG = "x" * 300  # no file system has names of so many bytes
LINKS = "links"  # a symbolic link that leads to itself


@pytest.mark.parametrize(
    "path", [LONG, pytest.param(LINKS, marks=pytest.mark.slow)], ids=["too long", "a link to itself"]
)
def test_a_path_that_the_system_refuses_is_no_defect(recipe, tmp_path, path):
    """In every place for a path: an error of the user, with the path and what to do."""
    (tmp_path / LINKS).symlink_to(LINKS)
    keys = [
        "model",
        "data.train",
        "data.validation",
        "output",
        "model.chat_template",
        "model.tokenizer",
        "model.adapter",
    ]
    verbs = [
        ["generate", path],
        ["eval", path],
        ["chat", path],
        ["serve", path],
        ["push", path, "a/b"],
        ["train", path],
    ]
    verbs += [["export", path, "--to", "out"], ["predict", path, "--data", "data.jsonl"], ["import", path]]
    command_lines = [["train", recipe, f"{key}={path}"] for key in keys] + verbs
    for arguments, (code, output, _) in zip(command_lines, run(*command_lines, cwd=tmp_path), strict=True):
        assert code == 2, (arguments[:2], output)
        assert "error: " in output.replace("Error: ", "error: "), arguments[:2]
