"""An export whose disk is full leaves nothing; the next one removes what a killed one left (see test_sudden_death)."""

from __future__ import annotations

import shutil

import pytest

from meshtune.errors import UserError
from meshtune.quickstart import MODEL
from meshtune.runs.export import export
from meshtune.weights.publish import lock, publish_directory, remove_leftovers


def test_what_a_killed_process_left_is_removed_and_what_it_moved_aside_comes_back(tmp_path):
    dest, alive = tmp_path / "model", tmp_path / ".model.partial-2"
    for name in (".model.partial-1", ".model.old-1", alive.name):
        (tmp_path / name).mkdir()
    (tmp_path / ".model.old-1/config.json").write_text("{}")
    with lock(alive):  # its process is at work
        remove_leftovers(dest)
        assert {path.name for path in tmp_path.iterdir()} >= {alive.name, "model"}
        assert not (tmp_path / ".model.partial-1").exists()
        assert (dest / "config.json").read_text() == "{}"
    with publish_directory(dest, "config.json") as folder:
        (folder / "config.json").write_text("[]")
    assert (dest / "config.json").read_text() == "[]"
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["model"]


@pytest.mark.parametrize("options", [{}, {"gguf": "Q8_0"}])
def test_a_full_disk_is_a_sentence_and_leaves_nothing(options, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    dest = tmp_path / ("model.gguf" if options else "model")
    with pytest.raises(UserError, match="not enough room on the disk"):
        export(MODEL, dest, **options)
    assert list(tmp_path.iterdir()) == []
