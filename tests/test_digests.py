"""Digests of files find every flipped bit and every truncation, however the file is read."""

from __future__ import annotations

import mmap
import os
import time

import pytest
import xxhash

from meshtune import digests
from meshtune.digests import DamagedError, check_directory, digest_files, find_damage, write_digests
from meshtune.train.checkpoint import state_handler

SIZES = (0, 1, mmap.PAGESIZE, digests.BUFFER_BYTES + 1, digests.POPULATE_BYTES + 5)

BLOCK = mmap.ALLOCATIONGRANULARITY


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


class Blocks(list):
    """Records the offsets of blocks when they are hashed."""

    def wait_for(self, *expected):
        deadline = time.monotonic() + 60
        while list(self) != list(expected):
            assert time.monotonic() < deadline, self
            time.sleep(0.001)


def follow_writing(folder, write, monkeypatch):
    """(digests by a Follower of the file that `write` writes, the blocks that were hashed only afterwards)."""
    monkeypatch.setattr(digests, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(state_handler, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(state_handler, "POLL_SECONDS", 0.002)
    early, late, hash_block = Blocks(), Blocks(), digests.hash_block
    monkeypatch.setattr(state_handler, "hash_block", lambda *block: (hash_block(*block), early.append(block[1]))[0])
    monkeypatch.setattr(digests, "hash_block", lambda *block: (hash_block(*block), late.append(block[1]))[0])
    (folder / "data").mkdir()
    (folder / "other").write_bytes(b"not followed")
    data = folder / "data" / "file"
    with data.open("wb", buffering=0) as file, state_handler.Follower(folder, "data/") as follower:
        write(file, early)
    return follower.digests(), sorted(late)


def test_a_lock_that_its_writer_has_removed_is_forgotten(tmp_path, monkeypatch):
    def write(file, early):
        lock = tmp_path / "data" / "lock"
        lock.write_bytes(b"locked")
        early.wait_for(0)
        lock.unlink()
        file.write(os.urandom(BLOCK))

    followed, _ = follow_writing(tmp_path, write, monkeypatch)
    assert followed == digest_files(tmp_path, ["data/file"])


def test_a_file_is_hashed_while_it_is_written(tmp_path, monkeypatch):
    def write(file, early):
        file.write(os.urandom(BLOCK + 1))
        early.wait_for(0, BLOCK)
        file.write(os.urandom(BLOCK))
        early.wait_for(0, BLOCK, BLOCK, 2 * BLOCK)  # what has not grown for a while is hashed

    followed, late = follow_writing(tmp_path, write, monkeypatch)
    assert late == []
    assert followed == digest_files(tmp_path, ["data/file"])


def test_a_file_that_gets_its_size_before_its_contents_is_hashed_again(tmp_path, monkeypatch):
    def write(file, early):
        file.truncate(2 * BLOCK)
        early.wait_for(0, BLOCK)
        file.write(os.urandom(2 * BLOCK))

    followed, late = follow_writing(tmp_path, write, monkeypatch)
    assert late == [0, BLOCK]
    assert followed == digest_files(tmp_path, ["data/file"])


def test_a_config_that_was_edited_is_called_changed_and_one_that_is_cut_short_damaged(tmp_path):
    file = tmp_path / "adapter_config.json"
    file.write_text('{"base_model_name_or_path": "there"}')
    write_digests(tmp_path)
    file.write_text('{"base_model_name_or_path": "elsewhere"}')
    with pytest.raises(
        DamagedError, match=r"adapter_config\.json was changed since it was written: it is 40 bytes long"
    ):
        check_directory(tmp_path, fix="")
    file.write_text('{"base_model_name_or_path"')
    with pytest.raises(DamagedError, match=r"adapter_config\.json is damaged"):
        check_directory(tmp_path, fix="")
