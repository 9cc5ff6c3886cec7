"""`meshtune import` writes files, reports on standard error, and says by its exit code whether it could."""

from __future__ import annotations

import shlex

import pytest
import typer
import yaml

from meshtune.cli.main import app, main
from meshtune.config.load import load_recipe

AXOLOTL = {
    "base_model": "some/model",
    "datasets": [{"path": "org/chats", "type": "chat_template"}],
    "learning_rate": 1e-4,
    "output_dir": "out",
    "wandb_entity": "me",
}


@pytest.fixture
def run(tmp_path, capsys):
    def command(content: dict, *arguments: str) -> tuple[int, str, str]:
        file = tmp_path / "theirs.yml"
        file.write_text(yaml.safe_dump(content))
        code = 0
        try:
            main(["import", str(file), *arguments])
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command


def test_a_recipe_goes_to_standard_output_and_the_report_beside_it(run, tmp_path):
    code, out, err = run(AXOLOTL, "--devices", "4")
    (tmp_path / "recipe.yaml").write_text(out)
    assert code == 0
    assert load_recipe(str(tmp_path / "recipe.yaml")).train.batch_size == 4
    assert "wandb_entity" in err
    assert "without effect here: wandb_entity\n" in err


def test_a_file_is_written_once_and_replaced_only_if_asked(run, tmp_path):
    target = tmp_path / "new" / "recipe.yaml"
    assert run(AXOLOTL, "--to", str(target))[0] == 0
    code, _, err = run(AXOLOTL | {"seed": 7}, "--to", str(target))
    assert code == 2
    assert "--overwrite" in err
    assert load_recipe(str(target)).seed == 42
    assert run(AXOLOTL | {"seed": 7}, "--to", str(target), "--overwrite")[0] == 0
    assert load_recipe(str(target)).seed == 7


def test_refusals_are_all_named_and_nothing_is_written(run, tmp_path):
    target = tmp_path / "recipe.yaml"
    code, out, err = run(AXOLOTL | {"qat": {}, "rl": "gdpo", "bogus": 1, "fp8": True}, "--to", str(target))
    assert code == 2
    assert out == ""
    assert not target.exists()
    for key in ("rl", "bogus", "fp8"):
        assert f"  {key} (line" in err


def test_the_commands_named_in_place_of_a_translation_have_the_options_of_our_own(run):
    content = {"model_name_or_path": "m", "adapter_name_or_path": "a", "template": "llama3"}
    for changes in ({"export_dir": "to"}, {"infer_backend": "huggingface"}, {"do_predict": True, "dataset": "d"}):
        code, out, err = run(content | changes)
        arguments = shlex.split(err.partition("fix: ")[2])
        verb = typer.main.get_command(app).commands[arguments[1]]  # pyright: ignore[reportAttributeAccessIssue]
        assert (code, out) == (2, "")
        verb.make_context(arguments[1], arguments[2:])
