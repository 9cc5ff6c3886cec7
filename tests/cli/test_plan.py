"""`meshtune plan`, from a config alone and without a compiler; with one in the deviceless tier."""

from __future__ import annotations

import json
import os

import pytest
from llamas import recipe_file

import command

KEYS = {
    "target", "fits", "device_bytes", "device_capacity", "host_bytes", "breakdown", "compile_seconds", "step_seconds",
    "tokens_per_second", "mfu", "bound_by", "recipe_overrides",
}  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return recipe_file(tmp_path_factory.mktemp("405B"), "405B")


def plan(*arguments, compilers="/nowhere"):
    return command.run("plan", *arguments, COLUMNS="150", MESHTUNE_COMPILERS=compilers)


def test_json_has_every_key_and_adds_up(recipe):
    ran = plan(recipe, "--target", "8xMI300X", "mesh.fsdp=8", "compute.remat=full", "--estimate", "--json")
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert set(report) >= KEYS
    assert report["target"] == "8xMI300X"
    assert report["estimated"] is True
    assert report["device_bytes"] == sum(report["breakdown"].values())
    assert report["device_capacity"] == 192 * 2**30
    assert report["fits"] is (report["device_bytes"] <= report["device_capacity"] - report["reserve_bytes"])
    assert report["breakdown"]["weights"] == pytest.approx(405.85e9 * 2 / 8, rel=0.001)
    assert report["tokens_per_second"] == pytest.approx(8 * 4096 / report["step_seconds"])
    assert report["run_seconds"] == pytest.approx(1000 * report["step_seconds"])
    assert report["step_seconds"] >= report["step_seconds_bound"]
    assert 0 < report["mfu"] <= report["mfu_bound"] <= 1
    assert report["recipe_overrides"] == {}


def test_several_targets_are_a_list_and_a_picture(recipe, tmp_path):
    picture = tmp_path / "plan.png"
    targets = [word for name in ("8xMI300X", "2x8xH200", "8xH100") for word in ("--target", name)]
    ran = plan(recipe, *targets, "--estimate", "--json", "--picture", picture)
    assert ran.returncode == 0, ran.stderr
    assert [entry["target"] for entry in json.loads(ran.stdout)] == ["8xMI300X", "2x8xH200", "8xH100"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    from matplotlib.image import imread

    pixels = imread(picture)
    assert pixels.shape[0] > 300
    assert pixels.std() > 0.05, "an empty picture"


def test_words_say_whether_how_long_and_how_much(recipe):
    ran = plan(recipe, "--target", "8xMI300X", "mesh.fsdp=8", "compute.remat=full", "--estimate", "--price", "2.5")
    assert ran.returncode == 0, ran.stderr
    phrases = ["It fits", "weights", "activations and temporaries", "roofline of an update", "tokens per second"]
    phrases += ["the whole recipe", "cost", "at 2.5 per hour of each device", "estimated, not compiled"]
    for phrase in phrases:
        assert phrase in ran.stdout, phrase


def test_a_cost_is_estimated_from_the_data_without_steps(tmp_path):
    from meshtune import quickstart

    file = tmp_path / "recipe.yaml"
    data = f"{{train: {quickstart.LESSON}, max_length: 64}}"
    file.write_text(f"model: {quickstart.MODEL}\ndata: {data}\noutput: {tmp_path}/out\ntrain: {{epochs: 2}}\n")
    ran = plan(file, "--target", "H100", "--estimate", "--price", "3", "--json")
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["steps_source"] == "2 epochs of the data"
    assert report["cost"] == pytest.approx(3 * report["steps"] * report["step_seconds"] / 3600)
    assert report["cost"] > 0


def test_a_recipe_that_does_not_fit_shows_remedies_and_the_command_with_them(recipe):
    ran = plan(recipe, "--target", "8xH100", "--estimate")
    assert ran.returncode == 0, ran.stderr
    assert "It fits with the changes below" in ran.stdout
    assert "nf4 base" in ran.stdout
    assert "quantize=nf4" in ran.stdout.replace("\n", " ")


def test_a_search_is_a_ranked_table(recipe):
    ran = plan(
        recipe, "--target", "8xMI300X", "--search", "--estimate", "--json", "data.max_length=64", "train.batch_size=16"
    )
    report = json.loads(ran.stdout)
    assert report["recipe_overrides"]["mesh"] == {"tp": 8}
    assert len(report["candidates"]) > 5
    times = [candidate["step_seconds"] for candidate in report["candidates"] if candidate["fits"]]
    assert times[0] == pytest.approx(report["step_seconds"])


@pytest.mark.parametrize(
    ("target", "told"), [("T4", "Triton needs sm_80"), ("RX9070XT", ""), ("M4-24", "for NVIDIA and AMD")]
)
def test_a_chip_without_kernels_is_told_what_its_plan_counts(tmp_path, target, told):
    ran = plan(recipe_file(tmp_path, "8B"), "--target", target, "quantize=nf4", "--estimate", "--json")
    notes = json.loads(ran.stdout)["notes"]
    kernels = [note for note in notes if note.startswith("kernels: XLA's own operations")]
    assert [told in note and "time is not" in note for note in kernels] == [True] * bool(told)


def test_without_a_compiler_the_estimate_answers_and_names_the_extra(recipe):
    ran = plan(recipe, "--target", "8xH100", "mesh.fsdp=8")
    assert ran.returncode == 0, ran.stderr
    output = " ".join(ran.stdout.replace("│", " ").split())
    assert "estimated, not compiled" in output
    assert ".[plan-cuda]" in output


def test_what_fits_with_no_remedy_comes_with_the_smallest_machine(tmp_path):
    ran = plan(recipe_file(tmp_path, "8B"), "--target", "RTX4090", "method=full", "--estimate")
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert "does not fit 1xRTX4090, even with all remedies" in ran.stderr
    assert "the smallest machine that would hold it: " in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--target", "8xMI300"], ["no device is called 'MI300'", "did you mean 'MI300X'"]),
        (["--target", "8xH100", "mesh.fsdp=7", "--estimate"], ["the mesh fsdp=7 is for 7 devices, and there are 8"]),
    ],
)
def test_what_cannot_be_is_said_with_a_way_out_and_exit_2(recipe, arguments, messages):
    ran = plan(recipe, *arguments)
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert all(message in ran.stderr for message in messages), ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.deviceless
def test_the_compiler_answers_for_405b_on_eight_mi300x(recipe):
    from deviceless import compiler_for

    compiler_for("rocm")
    ran = plan(
        recipe, "--target", "8xMI300X", "mesh.fsdp=8", "compute.remat=full", "--json", compilers=os.environ.get(
            "MESHTUNE_COMPILERS", os.path.expanduser("~/.cache/meshtune/compilers")
        )
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["estimated"] is False
    assert report["fits"] is True
    assert report["compile_seconds"] < 600
    # The goal that this program has for 8 x 4096 tokens.
    assert report["device_bytes"] <= 150 * 2**30
