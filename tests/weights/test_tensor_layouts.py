"""Fused, transposed, interleaved and per-expert tensors, read slice by slice and written back."""

from __future__ import annotations

import itertools
import os

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from meshtune.families.tensors import TensorMap, validate
from meshtune.weights import shards as reading
from meshtune.weights import writer
from meshtune.weights.read_plan import Box, read_plan
from meshtune.weights.safetensors_files import headers, tensors_of
from meshtune.weights.shards import Shards, read_into
from meshtune.weights.tensor_reader import TensorReader
from meshtune.weights.writer import first_difference, write_file
from weights.tensor_layouts import LEAVES, expected_leaves, table, tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    save_file(tensors(), folder / "model.safetensors")
    return folder


@pytest.fixture
def leaves(folder):
    with TensorReader() as reader:
        shards = Shards(LEAVES, None, [None])
        read_into(shards, table(), headers(folder), reader)
        assert reader.bytes == sum(array.nbytes for array in tensors().values())
        return shards.assemble()


def test_the_table_is_valid():
    validate(table(), LEAVES)


@pytest.mark.parametrize("limit", [None, 900])
def test_leaves_are_the_views_of_whole_tensors(folder, limit, monkeypatch):
    """In blocks of 900 bytes too, which cut through heads, experts and interleaved columns."""
    if limit:
        monkeypatch.setattr(reading, "BLOCK_BYTES", limit)
    with TensorReader() as reader:
        shards = Shards(LEAVES, None, [None])
        read_into(shards, table(), headers(folder), reader)
        got = shards.assemble()
    for path, array in expected_leaves(tensors()).items():
        assert np.array_equal(np.asarray(got[path]), array), path


def split(shape: tuple[int, ...], parts: tuple[int, ...]) -> list[Box]:
    """Boxes of an array cut into `parts` along each dimension, unevenly where it must be."""
    edges = [np.linspace(0, n, count + 1).astype(int).tolist() for n, count in zip(shape, parts, strict=True)]
    return list(itertools.product(*(list(itertools.pairwise(edge)) for edge in edges)))


@pytest.mark.parametrize("parts", [(4, 1), (1, 4), (5, 3), (7, 1)])
@pytest.mark.parametrize("limit", [100_000, 700])
def test_slices_read_by_themselves_are_slices_of_the_whole(parts, limit):
    """Both ways in which a block reaches a shard: through a view of its memory, and in runs for a device."""
    stored = tensors()
    full = expected_leaves(stored)
    by_name: dict[str, list[TensorMap]] = {}
    for entry in table():
        by_name.setdefault(entry.name, []).append(entry)
    boxes = {
        path: split(array.shape, (1,) * (len(array.shape) - 2) + parts if "each" not in path else (1, 4, *parts))
        for path, array in LEAVES.items()
    }
    through_views = {path: {box: empty(box) for box in group} for path, group in boxes.items()}
    in_runs = {path: {box: empty(box) for box in group} for path, group in boxes.items()}
    for name, entries in by_name.items():
        reads = np.zeros(stored[name].shape, int)
        for block in read_plan(
            entries, {path: dict.fromkeys(group, (None,)) for path, group in boxes.items()}, 4, limit
        ):
            box = tuple(slice(*edges) for edges in block.box)
            numbers = stored[name].reshape(block.split_shape)[box]
            reads.reshape(block.split_shape)[box] += 1
            for cut in block.cuts:
                cut.within(through_views[cut.entry.path][cut.box])[...] = cut.of(numbers)
                for at, part in cut.runs(numbers):
                    target = tuple(slice(start, start + n) for start, n in zip(at, part.shape, strict=True))
                    in_runs[cut.entry.path][cut.box][target] = part
        assert (reads == 1).all(), f"every number of {name} is read once"
    for shards in (through_views, in_runs):
        for path, group in shards.items():
            for box, part in group.items():
                assert np.array_equal(part, full[path][tuple(slice(*edges) for edges in box)]), (path, box)


def empty(box: Box) -> np.ndarray:
    return np.full([stop - start for start, stop in box], np.nan, np.float32)


@pytest.mark.parametrize("limit", [None, 1500])
def test_what_is_written_is_what_was_read(leaves, tmp_path, limit, monkeypatch):
    if limit:
        monkeypatch.setattr(writer, "BLOCK_BYTES", limit)
    out = tensors_of(table(), leaves, "float32")
    written = sum(write_file(tmp_path / "model.safetensors", out, {"format": "pt"}))
    stored, again = tensors(), load_file(tmp_path / "model.safetensors")
    assert written == sum(array.nbytes for array in stored.values())
    assert stored.keys() == again.keys()
    assert all(np.array_equal(stored[name], again[name]) for name in stored)
    names = {tensor.name for tensor in out}
    assert first_difference(out, headers(tmp_path), names) is None


def test_one_changed_number_is_found(leaves, tmp_path):
    out = tensors_of(table(), leaves, "float32")
    list(write_file(tmp_path / "model.safetensors", out, {"format": "pt"}))
    info = headers(tmp_path)["1.interleaved"]
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.seek(info.start + info.nbytes - 4)
        file.write(b"\x00\x00\x00\x00")
        os.fsync(file.fileno())
    different = first_difference(out, headers(tmp_path), {tensor.name for tensor in out})
    assert different is not None
    assert different[0].name == "1.interleaved"


def test_a_leaf_read_alone_reads_its_own_bytes_where_they_are_runs(folder):
    (path,) = {"gate"}
    with TensorReader() as reader:
        shards = Shards({path: LEAVES[path]}, None, [None])
        read_into(shards, [entry for entry in table() if entry.path == path], headers(folder), reader)
        assert np.array_equal(np.asarray(shards.assemble()[path]), expected_leaves(tensors())[path])
        assert reader.bytes == LEAVES[path].nbytes


def test_leaves_may_be_donated(leaves):
    doubled = jax.jit(lambda x: x * 2, donate_argnums=0)(leaves["q"])
    assert np.array_equal(np.asarray(doubled), 2 * expected_leaves(tensors())["q"])
