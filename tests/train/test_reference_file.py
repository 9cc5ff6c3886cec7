"""Log-probabilities kept on disk come back bit for bit, or not at all."""

import random

import numpy as np
import pytest
from damage import flip_bit, truncate

from meshtune.digests import DamagedError
from meshtune.errors import UserError
from meshtune.train.evaluation.reference import read_log_probabilities, write_log_probabilities

VALUES = -np.random.default_rng(0).exponential(20, 40).astype(np.float32)


def test_they_come_back_bit_for_bit(tmp_path):
    assert read_log_probabilities(tmp_path / "a.npy", 40) is None
    write_log_probabilities(tmp_path / "folder/a.npy", VALUES)
    np.testing.assert_array_equal(read_log_probabilities(tmp_path / "folder/a.npy", 40), VALUES)
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["a.npy"]


@pytest.mark.parametrize("damage", [flip_bit, truncate])
@pytest.mark.parametrize("seed", range(8))
def test_no_damage_goes_unnoticed(damage, seed, tmp_path):
    write_log_probabilities(tmp_path / "a.npy", VALUES)
    damage(tmp_path / "a.npy", random.Random(seed))
    with pytest.raises(DamagedError, match=r"a\.npy is damaged"):
        read_log_probabilities(tmp_path / "a.npy", 40)


def test_values_that_are_not_finite_are_not_kept(tmp_path):
    with pytest.raises(UserError, match="not finite"):
        write_log_probabilities(tmp_path / "a.npy", np.float32([0, -np.inf]))
    assert not (tmp_path / "a.npy").exists()
