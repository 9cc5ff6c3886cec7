"""benchmarks/accelerator in miniature: each side's measurement, the driver, its files, and what wheels are missing."""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import sys
import zipfile

import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "benchmarks/accelerator"
MODULES = [path.stem for path in FOLDER.glob("*.py")]


@pytest.fixture
def scripts(monkeypatch):
    """scripts(name) imports one of the benchmark's files, which find each other in their own folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)


def arguments(**changes) -> argparse.Namespace:
    small = {"model": "tiny", "quantize": "nf4", "rows": 2, "length": 32, "updates": 3, "decode": 20}
    return argparse.Namespace(**small | {"set": [], "liger": False, "stacked": False} | changes)


@pytest.mark.slow
def test_our_step_is_timed_on_random_weights_beside_what_was_predicted(scripts):
    result = scripts("tune").measure(arguments())
    assert len(result["seconds"]) == 3
    assert result["tokens"] == 2 * 32
    assert result["predicted"]["device_bytes"] > 0
    # Random tokens of 512: the loss begins at log(512) = 6.24, and no update of rank 16 learns them by heart.
    assert result["losses"] == pytest.approx([6.24, 6.24], abs=0.1)


def test_our_decoding_is_timed(scripts):
    result = scripts("decode").measure(arguments(length=8))
    assert result["tokens_per_second"] > 0
    assert result["first_token_seconds"] > 0


@pytest.mark.parametrize("quantize", [pytest.param("none", marks=pytest.mark.slow), "nf4"])
def test_the_other_sides_step_is_timed(scripts, quantize):
    result = scripts("peft_side").tune(arguments(quantize=quantize))
    assert len(result["seconds"]) == 3
    assert result["flops"] == 2 * 32 * scripts("models").flops_per_token("tiny", 32)
    assert result["losses"] == pytest.approx([6.24, 6.24], abs=0.1)


@pytest.mark.slow
def test_the_other_sides_decoding_is_timed(scripts):
    assert scripts("peft_side").decode(arguments(quantize="none", length=8))["tokens_per_second"] > 0


def program(run, tmp_path, name: str, text: str, least: float = 0.0):
    (tmp_path / name).write_text(text)
    return run.Measurement(3, name, (str(tmp_path / name),), least)


@pytest.mark.slow
def test_a_stage_writes_as_it_goes_and_goes_on_where_it_stopped(scripts, tmp_path, monkeypatch, capsys):
    """One measurement that works, one that fails, one that hangs, one for which no time is left."""
    run = scripts("run")
    good = json.dumps({"seconds": [1.0, 1.0, 0.5], "tokens": 64, "flops": 1e12, "peak_bytes": 2**30})
    steps = [
        program(run, tmp_path, "good", f"print('words'); print('{good}')"),
        program(run, tmp_path, "bad", "raise SystemExit('the device fell off the bus')"),
        program(run, tmp_path, "slow", "import time; time.sleep(60)"),
        program(run, tmp_path, "never", "print('{}')", least=1e6),
    ]
    monkeypatch.setattr(run, "measurements", lambda tiny: steps)
    monkeypatch.setattr(run, "MARGIN", 0.0)
    results = run.Results(tmp_path / "out")
    assert not run.run_stage(3, 6.0, results, tiny=True, again=False)
    written = json.loads((tmp_path / "out/results.json").read_text())["measurements"]
    assert written["3: good"]["tokens"] == 64
    assert "fell off the bus" in written["3: bad"]["failed"]
    assert "not done after" in written["3: slow"]["failed"]
    assert "3: never" not in written
    table = (tmp_path / "out/table.md").read_text()
    assert "| good | 0.500 s | 128 | 2.0 | 1.00 GiB |" in table
    assert "fell off the bus" in table
    capsys.readouterr()
    run.run_stage(3, 3.0, run.Results(tmp_path / "out"), tiny=True, again=False)
    assert "good" not in capsys.readouterr().out  # it is not measured twice


def test_every_stage_has_its_measurements_and_each_its_file(scripts):
    run = scripts("run")
    for tiny in (True, False):
        steps = run.measurements(tiny)
        assert {step.stage for step in steps} == {1, 2, 3, 4, 5}
        assert len({(step.stage, step.name) for step in steps}) == len(steps)
        assert all(pathlib.Path(step.command[0]).is_file() for step in steps)
        assert all(step.least < 525 for step in steps)  # else no stage of nine minutes would ever begin it


@pytest.mark.slow
def test_tests_are_counted(scripts, capsys):
    file = str(FOLDER.parents[1] / "tests/gpu/test_loss_kernels.py")
    scripts("check_numbers").main("gpu", [file, "-k", "log_probs and odd and float32"])
    counts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert counts["skipped"] + counts["passed"] == 1
    assert counts["failed_tests"] == 0


def test_what_a_machine_has_is_left_out(scripts, monkeypatch, tmp_path):
    """Downloads packages that are missing or too old, and their requirements, but for other systems and extras."""
    wheels = scripts("wheels")
    required = {
        "jax": [],
        "pydantic": ["numpy>=1", "annotated_types", "colorama; sys_platform == 'win32'", "email; extra == 'all'"],
        "annotated_types": [],
    }
    downloads = []

    def download(requirement, have, to):
        downloads.append(requirement.name)
        path = to / f"{requirement.name}-9-py3-none-any.whl"
        lines = ["Version: 9", *(f"Requires-Dist: {text}" for text in required[requirement.name])]
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{requirement.name}-9.dist-info/METADATA", "\n".join(lines))
        return path

    monkeypatch.setattr(wheels, "_downloaded", download)
    monkeypatch.setattr(wheels, "_built", lambda to: "meshtune-0-py3-none-any.whl")
    packages = wheels.have()["packages"] | {"jax": "0.1"}
    packages = {name: version for name, version in packages.items() if not name.startswith(("pydantic", "annotated"))}
    files = wheels.fetch({"python": "3.12.3", "machine": "x86_64", "packages": packages}, tmp_path / "wheels", [])
    assert sorted(downloads) == ["annotated_types", "jax", "pydantic"]
    assert len(files) == 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stage", [1, 2, 3, 4, 5])
def test_a_stage_runs_in_miniature(scripts, stage, tmp_path):
    run = scripts("run")
    results = run.Results(tmp_path)
    assert run.run_stage(stage, 900.0, results, tiny=True, again=False)
    failures = {name: result["failed"] for name, result in results.values["measurements"].items() if "failed" in result}
    assert failures == {}
