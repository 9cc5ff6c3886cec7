"""`train(recipe)` from beginning to end on a real 260K-parameter model, and the ways it must refuse to begin."""

import dataclasses
import html
import io
import json
import pathlib

import numpy as np
import pytest
import yaml
from rich.console import Console
from safetensors.numpy import load_file, save_file

from meshtune.config.load import load_recipe
from meshtune.errors import UserError
from meshtune.train.run import train

RESUME = ("resume=true", "accept_changes=true")


@pytest.fixture(scope="module")
def lesson(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("data") / "lesson.jsonl"
    names = ["Tom", "Lily", "Ben", "Mia", "Sue"]
    texts = [
        f"{name} had a red {thing}. It was {name}'s." for name in names for thing in ("hat", "ball", "kite", "cup")
    ]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHTUNE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def recipe(model, data, output, *overrides: str):
    fields = {
        "model": str(model),
        "data": {"train": str(data), "max_length": 64},
        "output": str(output),
        "train": {"steps": 6, "batch_size": 4},
        "optimizer": {"learning_rate": 0.01, "schedule": "constant", "warmup_steps": 0},
    }
    return load_recipe(fields, overrides)


def screen() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=200), text


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory, stories260k, lesson):
    """(result, the screen's text) of one LoRA run with everything on."""
    output = tmp_path_factory.mktemp("run") / "out"
    console, text = screen()
    config = recipe(
        stories260k, lesson, output, "data.validation=4", "eval.every=3", "sample.prompts=[Tom had]",
        "sample.max_tokens=8", "log.trackers=[tensorboard]", "train.micro_batch=2",
    )  # fmt: skip
    return train(config, console=console), text.getvalue()


def test_a_run_learns_and_leaves_everything_where_it_says(finished_run):
    result, text = finished_run
    rows = [json.loads(line) for line in (result.output / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert len(losses) == result.steps == 6
    assert losses[-1] < losses[0] - 0.5
    assert result.loss == losses[-1]
    assert result.eval_loss == [row["loss"] for row in rows if row["kind"] == "eval"][-1]
    assert result.path == result.output / "adapter"
    for name in ("adapter/adapter_model.safetensors", "adapter/tokenizer.json", "metrics.jsonl", "loss.png",
                 "samples.jsonl", "recipe.yaml", "run.json", "checkpoints/6", "tensorboard"):  # fmt: skip
        assert (result.output / name).exists(), name
    for part in ("devices", "46.2k trainable", "6 updates of 4 x 64", "auto: float32 on cpu", "compiled",
                 "validation after 6", "sample after 0", "sample after 6", "read back and verified"):  # fmt: skip
        assert part in text, part


def test_the_recipe_it_saves_is_the_whole_recipe(finished_run):
    result, _ = finished_run
    saved = yaml.safe_load((result.output / "recipe.yaml").read_text())
    assert saved["optimizer"]["beta1"] == 0.9
    assert saved["method"]["kind"] == "lora"
    assert load_recipe(result.output / "recipe.yaml").model_dump(mode="json") == saved


def test_its_record_names_versions_and_base(finished_run):
    from meshtune.weights.inspect import base_hash

    result, _ = finished_run
    about = json.loads((result.output / "run.json").read_text())
    assert about["status"] == "finished"
    assert about["base"]["hash"] == base_hash(pathlib.Path(about["base"]["path"]))
    assert {"meshtune", "jax", "optax", "python"} <= about["versions"].keys()


def test_a_finished_run_resumed_changes_nothing(finished_run, stories260k, lesson):
    result, _ = finished_run
    before = load_file(result.path / "adapter_model.safetensors")
    again = load_recipe(result.output / "recipe.yaml", ["resume=true", "log.plot_every=7"])
    console, text = screen()
    assert train(again, console=console).steps == 6
    assert "changed: log.plot_every: 20 -> 7" in text.getvalue()
    after = load_file(result.path / "adapter_model.safetensors")
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_resume_without_a_run_says_so_and_a_later_one_with_an_accepted_rate_goes_on(tmp_path, stories260k, lesson):
    """With a lower rate as the message of a loss that is not finite advises. The console log is extended."""
    output = tmp_path / "out"
    output.mkdir()
    console, text = screen()
    train(recipe(stories260k, lesson, output, "resume=true", "train.steps=1"), console=console)
    note = f"nothing to resume: {output} holds no checkpoint, so the run starts from the first update"
    assert note in text.getvalue()
    before = (output / "console.log").read_text()
    assert before.count(note) == 1
    lower = ["train.steps=2", "optimizer.learning_rate=0.001"]
    with pytest.raises(UserError, match=r"learning_rate: 0\.01 -> 0\.001") as caught:
        train(load_recipe(output / "recipe.yaml", ["resume=true", *lower]), console=screen()[0])
    assert "accept_changes=true" in caught.value.fix
    console, text = screen()
    train(load_recipe(output / "recipe.yaml", [*RESUME, *lower]), console=console)
    assert "changed: optimizer.learning_rate: 0.01 -> 0.001" in text.getvalue()
    assert "nothing to resume" not in text.getvalue()
    log = (output / "console.log").read_text()
    assert log.startswith(before)
    assert "resuming after update 1" not in before
    assert log.count("resuming after update 1") == text.getvalue().count("resuming after update 1") == 1
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [row["learning_rate"] for row in rows] == pytest.approx([0.01, 0.001])
    assert not yaml.safe_load((output / "recipe.yaml").read_text())["accept_changes"]


def test_a_run_is_not_resumed_with_what_would_make_it_another(finished_run, tmp_path, lesson):
    result, _ = finished_run
    with pytest.raises(UserError, match=r"optimizer\.learning_rate: 0\.01 -> 0\.02"):
        train(load_recipe(result.output / "recipe.yaml", ["resume=true", "optimizer.learning_rate=0.02"]))
    longer = tmp_path / "longer.jsonl"
    longer.write_text(lesson.read_text() + json.dumps({"text": "One more story."}) + "\n")
    with pytest.raises(UserError, match="training data are not those of the run"):
        train(load_recipe(result.output / "recipe.yaml", ["resume=true", f"data.train={longer}"]))


def test_a_run_is_not_started_into_another(finished_run):
    result, _ = finished_run
    with pytest.raises(UserError, match="resume=true continues the run in it"):
        train(load_recipe(result.output / "recipe.yaml"))


def test_freezing_exports_a_whole_model_in_which_only_the_chosen_layer_moved(tmp_path, stories260k, lesson):
    output = tmp_path / "out"
    config = recipe(stories260k, lesson, output, "method.kind=freeze", "method.last_layers=1", "train.steps=2")
    result = train(config, console=screen()[0])
    assert result.path == output / "model"
    (before,) = (load_file(file) for file in stories260k.glob("*.safetensors"))
    (after,) = (load_file(file) for file in result.path.glob("*.safetensors"))
    moved = {name for name in after if not np.array_equal(before[name], after[name])}
    assert moved
    assert all(".layers.4." in name for name in moved), moved


def with_large_weights(model: pathlib.Path, folder: pathlib.Path, number: float) -> pathlib.Path:
    """A copy of a model, with `number` in a matrix of its third layer."""
    folder.mkdir()
    for file in model.iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    (weights,) = folder.glob("*.safetensors")
    tensors = load_file(weights)
    name = "model.layers.2.mlp.down_proj.weight"
    tensors[name] = np.full_like(tensors[name], number)
    save_file(tensors, weights, metadata={"format": "pt"})
    return folder


def test_weights_that_overflow_stop_the_first_update_with_its_records(tmp_path, stories260k, lesson):
    """A base whose activations overflow: the loss is not finite, nothing is updated, the message names the records."""
    broken = with_large_weights(stories260k, tmp_path / "broken", 1e38)
    with pytest.raises(UserError) as caught:
        train(recipe(broken, lesson, tmp_path / "out", "train.steps=2"), console=screen()[0])
    assert "in update 1, micro-batch 1 of 1; the update was not made; no checkpoint was saved yet" in caught.value.what
    assert f"{lesson}, record" in caught.value.where
    assert "resume=true" in caught.value.fix
    assert (tmp_path / "out/console.log").read_text().count("the update was not made") == 1


def test_a_loss_scale_that_falls_to_1_ends_the_run_and_another_precision_goes_on(tmp_path, stories260k, lesson):
    """Activations beyond float16's range overflow at every scale: 65536 is halved sixteen times, and then no more."""
    large, output = with_large_weights(stories260k, tmp_path / "large", 6e4), tmp_path / "out"
    float16 = ["compute.precision=float16", "train.steps=18", "checkpoint.every=8"]
    with pytest.raises(UserError) as caught:
        train(recipe(large, lesson, output, *float16), console=screen()[0])
    assert "float16 overflows at any scale of the loss down to 1" in caught.value.what
    assert "in update 17" in caught.value.what
    assert "the checkpoint of update 16 is kept" in caught.value.what
    assert "from update 16 with resume=true accept_changes=true" in caught.value.fix
    assert "compute.precision=float32" in caught.value.fix
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss_scale"] for row in rows] == [2.0**power for power in range(15, -1, -1)]
    other = ["resume=true", "compute.precision=float32"]
    with pytest.raises(UserError, match=r"compute\.precision: 'float16' -> 'float32'"):
        train(load_recipe(output / "recipe.yaml", other), console=screen()[0])
    assert train(load_recipe(output / "recipe.yaml", [*other, "accept_changes=true"]), console=screen()[0]).steps == 18
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert all("loss_scale" not in row and np.isfinite(row["loss"]) for row in rows[16:])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model=/no/such/model", "no/such/model"),
        ("method.targets=[q_prej]", "q_proj"),
        ("data.train=/no/such.jsonl", "such.jsonl"),
        ("log.trackers=[mlflow]", "not installed"),
    ],
)
def test_what_cannot_be_fails_before_anything_is_written(tmp_path, stories260k, lesson, override, message, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "mlflow", None)
    output = tmp_path / "out"
    with pytest.raises(UserError, match=message):
        train(recipe(stories260k, lesson, output, override), console=screen()[0])
    assert not output.exists()


def test_a_notebook_shows_the_run_its_curves_samples_and_report(finished_run):
    result, _ = finished_run
    shown = result._repr_html_()
    assert f"<td style='text-align: left'>{result.steps} of {result.total}</td>" in shown
    assert "data:image/png;base64," in shown
    figure = result.plot()
    assert figure._repr_png_().startswith(b"\x89PNG")
    training, smoothed, validation = figure.axes[0].lines
    rows = [json.loads(line) for line in (result.output / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert list(training.get_ydata()) == losses
    assert smoothed.get_ydata()[-1] == pytest.approx(result.smoothed_loss)
    assert list(validation.get_ydata()) == [row["loss"] for row in rows if row["kind"] == "eval"]
    assert list(result.plot("learning_rate").axes[0].lines[1].get_ydata()) == [
        row["learning_rate"] for row in rows if row["kind"] == "train"
    ]
    with pytest.raises(UserError, match="no metric 'reward'") as refusal:
        result.plot("reward")
    assert "grad_norm" in refusal.value.fix
    assert result.samples[0]["prompt"] == "Tom had"
    assert "Tom had" in result.samples._repr_html_()
    page = html.unescape(result.report._repr_html_())
    assert page.startswith('<iframe srcdoc="<!doctype html>')
    assert (result.output / "report.html").read_text() in page


def test_a_run_loads_its_model_once_and_an_interrupted_one_says_how_to_go_on(finished_run):
    result, _ = finished_run
    assert result.model is result.model
    assert result.model.generate("Tom had", max_tokens=4)
    with pytest.raises(UserError, match="interrupted") as refusal:
        dataclasses.replace(result, path=None).chat()
    assert "resume=true" in refusal.value.fix
