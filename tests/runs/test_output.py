"""Who may write into an output directory, and what a resumed run may change."""

import copy
import pathlib

import pytest

from meshtune.config.load import load_recipe
from meshtune.errors import UserError
from meshtune.runs.output import RUN, check_output, claim_output, read_run, write_run
from meshtune.train.checkpoint.resume import changes, check_changes


def test_a_directory_that_holds_something_needs_resume_or_overwrite(tmp_path):
    output = tmp_path / "out"
    check_output(output, resume=False, overwrite=False)
    assert not output.exists(), "checking creates nothing"
    output.mkdir()
    check_output(output, resume=False, overwrite=False)
    (output / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"not empty: it holds notes\.txt"):
        check_output(output, resume=False, overwrite=False)
    with pytest.raises(UserError, match="no run to resume"):
        check_output(output, resume=True, overwrite=False)
    (output / RUN).write_text("{}")
    check_output(output, resume=True, overwrite=False)
    check_output(output, resume=False, overwrite=True)


def test_an_output_with_only_the_remains_of_a_killed_start_counts_as_empty(tmp_path):
    output = tmp_path / "out"
    with claim_output(output, overwrite=False):
        pass
    (output / ".run.json.partial").write_text("{")
    (output / "logs").mkdir()
    (output / "console.log").write_text("loading")
    assert len(list(output.iterdir())) == 4, "with the lock"
    check_output(output, resume=False, overwrite=False)
    check_output(output, resume=True, overwrite=False)
    with claim_output(output, overwrite=True) as aside:
        assert aside is None
    (output / RUN).write_text("{}")
    with pytest.raises(UserError, match=r"not empty: it holds run\.json"):
        check_output(output, resume=False, overwrite=False)


def test_a_file_in_the_way_is_an_error(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(UserError, match="the output is a file"):
        check_output(tmp_path / "out", resume=False, overwrite=True)
    with pytest.raises(UserError, match="its parent is a file"):
        check_output(tmp_path / "out/deeper", resume=False, overwrite=False)


@pytest.mark.parametrize(
    ("output", "message", "fix"),
    [
        ("/proc/meshtune-run", "the output cannot be created: ", "where directories can be made"),
        ("x" * 300, "the output cannot be created: File name too long", "parts are below 256 bytes"),
        ("loop/run", "{folder}/loop is a symbolic link to loop, where nothing is", "remove the link"),
        ("loop", "loop is a symbolic link to loop, where nothing is", "remove the link"),
    ],
)
def test_a_path_that_cannot_become_a_directory_is_a_users_mistake(tmp_path, monkeypatch, output, message, fix):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError) as error:
        check_output(pathlib.Path(output), resume=False, overwrite=False)
    assert error.value.what.startswith(message.format(folder=tmp_path))
    assert fix in str(error.value.fix)
    assert [path.name for path in tmp_path.iterdir()] == ["loop"]


def test_overwrite_moves_the_old_run_aside_and_deletes_nothing(tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "old.txt").write_text("kept")
    places = []
    for number in range(2):
        with claim_output(output, overwrite=True) as aside:
            places.append(aside)
            assert [path.name for path in output.iterdir()] == [".lock"]
            (output / "old.txt").write_text(f"kept {number}")
    assert [(place / "old.txt").read_text() for place in places] == ["kept", "kept 0"]


def test_two_runs_never_share_an_output(tmp_path):
    with claim_output(tmp_path / "out", overwrite=False):  # noqa: SIM117
        with pytest.raises(UserError, match="another process"), claim_output(tmp_path / "out", overwrite=True):
            pass
    with claim_output(tmp_path / "out", overwrite=False):
        pass


def test_facts_of_a_run_are_merged(tmp_path):
    write_run(tmp_path, {"status": "running", "base": {"hash": "x"}})
    write_run(tmp_path, {"status": "finished"})
    assert read_run(tmp_path) == {"status": "finished", "base": {"hash": "x"}}


RECIPE = {"model": "m", "data": {"train": "d.jsonl", "validation": 0.1}, "output": "o", "sample": {"prompts": ["p"]}}


def dump_recipe(*overrides: str) -> dict:
    return load_recipe(copy.deepcopy(RECIPE), overrides).model_dump(mode="json")


def test_changes_are_listed_by_key():
    changed = changes(dump_recipe(), dump_recipe("train.batch_size=8", "log.every=5"))
    assert [str(change) for change in changed] == ["log.every: 1 -> 5", "train.batch_size: 16 -> 8"]


@pytest.mark.parametrize(
    "override",
    ["output=elsewhere", "log.plot_every=3", "sample.every=9", "checkpoint.keep=9", "eval.every=7", "resume=true",
     "model=moved/m", "data.train=moved.jsonl"],
)  # fmt: skip
def test_changes_that_do_not_change_what_is_learned_are_fine(override):
    key = override.split("=")[0].replace("model", "model.path")
    assert [change.key for change in check_changes(dump_recipe(), dump_recipe(override))] == [key]


@pytest.mark.parametrize(
    "override",
    ["seed=1", "train.batch_size=8", "optimizer.learning_rate=1e-5", "method.rank=4", "train.steps=100",
     "compute.precision=mixed", "compute.remat=full", "method=full"],
)  # fmt: skip
def test_changes_that_would_are_refused_by_name(override):
    with pytest.raises(UserError, match=override.split("=")[0].split(".")[0]) as caught:
        check_changes(dump_recipe(), dump_recipe(override, "log.every=5"))
    assert "these changes are fine: log.every: 1 -> 5" in caught.value.what
    assert "overwrite=true" in caught.value.fix


def test_changes_of_what_is_learned_can_be_accepted_knowingly():
    changed = check_changes(dump_recipe(), dump_recipe("optimizer.learning_rate=1e-5", "accept_changes=true"))
    assert "optimizer.learning_rate" in [change.key for change in changed]


def test_a_run_can_be_made_longer_where_the_schedule_does_not_depend_on_its_length():
    endless = ["optimizer.schedule=constant", "optimizer.warmup_steps=3"]
    assert check_changes(dump_recipe("train.steps=10", *endless), dump_recipe("train.steps=20", *endless))
    with pytest.raises(UserError, match=r"train\.steps: 10 -> 20"):
        check_changes(dump_recipe("train.steps=10"), dump_recipe("train.steps=20"))


def test_evaluations_may_not_change_where_they_stop_the_run():
    stopping = "eval.early_stopping=2"
    with pytest.raises(UserError, match=r"eval\.every"):
        check_changes(dump_recipe(stopping), dump_recipe(stopping, "eval.every=5"))
