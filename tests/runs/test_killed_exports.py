"""An export that is killed, or whose disk is full, leaves nothing under its name; the next one cleans up after it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from meshtune.errors import UserError
from meshtune.quickstart import MODEL
from meshtune.runs.export import export
from meshtune.weights.publish import published, remove_leftovers

DEAD = 2**22 - 1  # above any process's number here


def test_what_a_killed_process_left_is_removed_and_what_it_moved_aside_comes_back(tmp_path):
    dest = tmp_path / "model"
    (tmp_path / f".model.partial-{DEAD}").mkdir()
    (tmp_path / f".model.old-{DEAD}").mkdir()
    (tmp_path / f".model.old-{DEAD}/config.json").write_text("{}")
    mine = tmp_path / f".model.partial-{os.getppid()}"
    mine.mkdir()
    remove_leftovers(dest)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([mine.name, "model"])
    assert (dest / "config.json").read_text() == "{}"
    (tmp_path / f".model.old-{DEAD}").mkdir()
    with published(dest, "config.json") as folder:
        (folder / "config.json").write_text("[]")
    assert (dest / "config.json").read_text() == "[]"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([mine.name, "model"])


@pytest.mark.parametrize("options", [{}, {"gguf": "Q8_0"}])
def test_a_full_disk_is_a_sentence_and_leaves_nothing(options, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    dest = tmp_path / ("model.gguf" if options else "model")
    with pytest.raises(UserError, match="not enough room on the disk"):
        export(MODEL, dest, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--gguf", "F32"]])
def test_an_export_killed_at_any_moment_leaves_nothing_under_its_name_or_all_of_it(options, tmp_path):
    dest = tmp_path / ("model.gguf" if options else "model")
    command = [sys.executable, "-m", "meshtune", "export", str(MODEL), "--to", str(dest), *options]
    left = 0
    for attempt in range(6):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not any(".partial-" in path.name for path in tmp_path.iterdir()):
            time.sleep(0.002)
        time.sleep(0.01 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()
        left += any(".partial-" in path.name for path in tmp_path.iterdir())
        assert not dest.exists() or export(dest, tmp_path / "copy.gguf", gguf="F32", overwrite=True)
        if dest.is_dir():
            shutil.rmtree(dest)
        dest.unlink(missing_ok=True)
        for file in tmp_path.glob("*.Modelfile"):
            file.unlink()
    assert left
    export(MODEL, dest, **({"gguf": "F32"} if options else {}))
    assert not any(".partial-" in path.name for path in tmp_path.iterdir())
