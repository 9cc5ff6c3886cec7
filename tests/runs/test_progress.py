"""How far exports and pushes say that they are: to a callable, and to the file of the program that started them."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from meshtune.quickstart import MODEL
from meshtune.runs.export import export
from meshtune.runs.progress import VARIABLE, ProgressFile


@pytest.mark.parametrize(
    ("options", "name", "stages"),
    [
        ({"dtype": "bfloat16"}, "model", ["reading", "writing", "checking"]),
        ({"gguf": "Q8_0"}, "model.gguf", ["writing"]),
    ],
)
def test_every_stage_rises_to_its_end(tmp_path: pathlib.Path, options, name, stages):
    reports: list[tuple[str, int, int]] = []
    export(MODEL, tmp_path / name, progress=lambda *report: reports.append(report), **options)
    assert list(dict.fromkeys(stage for stage, _, _ in reports)) == stages
    for stage in stages:
        done = [done for name, done, _ in reports if name == stage]
        totals = {total for name, _, total in reports if name == stage}
        assert done == sorted(done)
        assert {done[-1]} == totals
    if options == {"dtype": "bfloat16"}:
        written = sum(file.stat().st_size for file in (tmp_path / name).glob("*.safetensors"))
        assert 0 <= written - next(total for stage, _, total in reports if stage == "writing") < 10_000  # the header


def test_the_command_writes_the_file_that_is_asked_for(tmp_path: pathlib.Path):
    file = tmp_path / "progress.json"
    command = [
        sys.executable,
        "-m",
        "meshtune",
        "export",
        str(MODEL),
        "--to",
        str(tmp_path / "m.gguf"),
        "--gguf",
        "F16",
    ]
    subprocess.run(command, env=os.environ | {VARIABLE: str(file)}, check=True, capture_output=True)
    fields = json.loads(file.read_text())
    assert (fields["stage"], fields["done"]) == ("writing", fields["total"])
    assert fields["result"] == str(tmp_path / "m.gguf")


def test_a_disk_that_refuses_the_file_keeps_nothing_from_going_on(tmp_path: pathlib.Path):
    progress = ProgressFile(tmp_path / "none" / "progress.json")
    progress("writing", 1, 2)
    progress.finish("there")
