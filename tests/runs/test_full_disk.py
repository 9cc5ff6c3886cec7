"""A disk that fills while an export or tokenised data are written: one message, nothing half-written, nothing lost."""

from __future__ import annotations

import json
import pathlib
import subprocess
from collections.abc import Iterator

import pytest

import meshtune.weights.export
import meshtune.weights.gguf.writer
from meshtune.config.load import load_recipe
from meshtune.data.prepare import prepare_data
from meshtune.data.tokenizer import load_tokenizer
from meshtune.errors import UserError
from meshtune.quickstart import MODEL
from meshtune.runs.export import export

pytestmark = pytest.mark.slow


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file system of 700 kB, which does not hold the model of 1 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "none", str(place)], capture_output=True).returncode:
        pytest.skip("needs the permission to mount a small file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_a_disk_that_fills_in_an_export(form, small_disk, tmp_path, monkeypatch):
    for module in (meshtune.weights.export, meshtune.weights.gguf.writer):  # so that it fills amid the tensors
        monkeypatch.setattr(module, "check_room", lambda *_: None)
    older = small_disk / "m.gguf"
    older.write_bytes(b"older")
    gguf = "F32" if form == "gguf" else None
    dest = older if gguf else small_disk / "m"
    with pytest.raises(UserError, match=r"[Nn]o space left on (the )?device"):
        export(MODEL, dest, gguf=gguf, overwrite=True)
    assert [path.name for path in small_disk.iterdir()] == ["m.gguf"]
    assert older.read_bytes() == b"older"


def test_a_disk_that_fills_in_a_preparation(small_disk, tmp_path):
    text = "Once upon a time there was a little dog who saw a big cake and was happy. " * 3
    (tmp_path / "d.jsonl").write_text(
        "".join(json.dumps({"text": f"{number} {text}"}) + "\n" for number in range(4000))
    )
    content = {"model": str(MODEL), "data": {"train": str(tmp_path / "d.jsonl"), "max_length": 256}, "stage": "pt"}
    recipe = load_recipe({**content, "output": "none", "train": {"steps": 1, "batch_size": 1}})
    tokenizer = load_tokenizer(str(MODEL))
    with pytest.raises(UserError, match="No space left on device") as error:
        prepare_data(recipe, tokenizer, cache=small_disk)
    assert "free space" in (error.value.fix or "")
    assert not [path for path in small_disk.rglob("*") if "building" in path.name]
    assert len(prepare_data(recipe, tokenizer, cache=tmp_path / "roomy").train.store) == 4000
