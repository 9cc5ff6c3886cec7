"""Digests of files find every flipped bit and every truncation, however the file is read."""

from __future__ import annotations

import mmap
import os

import pytest
import xxhash

from meshtune import digests
from meshtune.digests import digest_files, find_damage

SIZES = (0, 1, mmap.PAGESIZE, digests.BUFFER_BYTES + 1, digests.POPULATE_BYTES + 5)


@pytest.mark.parametrize("size", SIZES)
def test_the_digest_of_a_file_is_that_of_its_blocks_digests(tmp_path, size):
    content = os.urandom(size)
    (tmp_path / "file").write_bytes(content)
    expected = xxhash.xxh3_128_hexdigest(xxhash.xxh3_128_digest(content))
    assert digest_files(tmp_path, ["file"])["file"] == digests.FileDigest(size, expected)


@pytest.mark.parametrize("size", SIZES)
def test_mapped_and_read_files_have_the_same_digest(tmp_path, size, monkeypatch):
    """Kernels before Linux 5.14, other systems and damaged disks refuse to make mapped pages present."""
    (tmp_path / "file").write_bytes(os.urandom(size))
    mapped = digest_files(tmp_path, ["file"])
    monkeypatch.setattr(digests, "POPULATE_READ", 9999)
    assert digest_files(tmp_path, ["file"]) == mapped


def test_a_file_of_several_blocks_is_hashed_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "BLOCK_BYTES", mmap.ALLOCATIONGRANULARITY)
    blocks = [os.urandom(mmap.ALLOCATIONGRANULARITY) for _ in range(3)] + [b"end"]
    (tmp_path / "file").write_bytes(b"".join(blocks))
    expected = xxhash.xxh3_128_hexdigest(b"".join(map(xxhash.xxh3_128_digest, blocks)))
    assert digest_files(tmp_path, ["file"])["file"].digest == expected


def test_every_single_flipped_bit_is_found(tmp_path):
    content = bytearray(os.urandom(600))
    (tmp_path / "file").write_bytes(content)
    written = digest_files(tmp_path, ["file"])
    for bit in range(8 * len(content)):
        content[bit // 8] ^= 1 << bit % 8
        (tmp_path / "file").write_bytes(content)
        assert find_damage(tmp_path, written), f"bit {bit}"
        content[bit // 8] ^= 1 << bit % 8


def test_every_truncation_is_found(tmp_path):
    content = bytes(300)
    (tmp_path / "file").write_bytes(content)
    written = digest_files(tmp_path, ["file"])
    for size in range(len(content)):
        (tmp_path / "file").write_bytes(content[:size])
        assert "bytes long" in find_damage(tmp_path, written)["file"]
