"""Damage to files, as disks, copies and interrupted writes do it. Not a test: see test_damaged_checkpoints.py."""

from __future__ import annotations

import pathlib
import random


def flip_bit(file: pathlib.Path, rng: random.Random) -> str:
    """Flips one bit, and says which."""
    content = bytearray(file.read_bytes())
    place, bit = rng.randrange(len(content)), rng.randrange(8)
    content[place] ^= 1 << bit
    file.write_bytes(content)
    return f"bit {bit} of byte {place} of {file}"


def truncate(file: pathlib.Path, rng: random.Random) -> str:
    """Cuts off the end."""
    content = file.read_bytes()
    size = rng.randrange(len(content))
    file.write_bytes(content[:size])
    return f"{file} cut to {size} of {len(content)} bytes"


def delete(file: pathlib.Path, rng: random.Random) -> str:
    """Removes a file."""
    file.unlink()
    return f"{file} deleted"


DAMAGE = {"flip": flip_bit, "truncate": truncate, "delete": delete}


def damage(directory: pathlib.Path, seed: int) -> str:
    """Does one kind of damage to one file below `directory`, each kind and each file equally likely; returns its
    description."""
    rng = random.Random(seed)
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size)
    return DAMAGE[rng.choice(sorted(DAMAGE))](rng.choice(files), rng)
