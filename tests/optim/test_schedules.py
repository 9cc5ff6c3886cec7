"""Learning rates at every step equal those of transformers' schedulers, and they end at the stated step."""

import jax
import numpy as np
import pytest
import torch
from transformers import get_scheduler
from transformers.optimization import get_cosine_with_min_lr_schedule_with_warmup

from meshtune.optim.config import OptimizerConfig
from meshtune.optim.optimizer import SCHEDULES, make_schedule

PEAK = 3e-4
# float32 here against float64 there, relative to the peak.
TOLERANCE = 5e-7


def ours(config: OptimizerConfig, total: int, length: int | None = None) -> np.ndarray:
    return np.asarray(jax.vmap(make_schedule(config, total))(np.arange(length or total)))


def torch_rates(make, length: int) -> np.ndarray:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = make(optimizer)
    rates = []
    for _ in range(length):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return np.array(rates)


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("linear", "linear"),
        ("cosine", "cosine"),
        ("constant", "constant_with_warmup"),
        ("inverse_sqrt", "inverse_sqrt"),
    ],
)
def test_rates_equal_transformers(name, theirs, warmup):
    total = 60
    expected = torch_rates(lambda o: get_scheduler(theirs, o, num_warmup_steps=warmup, num_training_steps=total), total)
    got = ours(OptimizerConfig(learning_rate=PEAK, schedule=name, warmup_steps=warmup), total)
    np.testing.assert_allclose(got, expected, rtol=0, atol=PEAK * TOLERANCE)


def test_wsd_equals_transformers():
    total, warmup, decay = 50, 5, 10
    expected = torch_rates(
        lambda o: get_scheduler(
            "warmup_stable_decay",
            o,
            num_warmup_steps=warmup,
            num_training_steps=total,
            scheduler_specific_kwargs={"num_decay_steps": decay},
        ),
        total,
    )
    got = ours(OptimizerConfig(learning_rate=PEAK, schedule="wsd", warmup_steps=warmup, decay_ratio=0.2), total)
    np.testing.assert_allclose(got, expected, rtol=0, atol=PEAK * TOLERANCE)


def test_cosine_with_minimum_equals_transformers():
    expected = torch_rates(lambda o: get_cosine_with_min_lr_schedule_with_warmup(o, 4, 40, min_lr_rate=0.1), 40)
    got = ours(OptimizerConfig(learning_rate=PEAK, schedule="cosine", warmup_steps=4, min_lr_ratio=0.1), 40)
    np.testing.assert_allclose(got, expected, rtol=0, atol=PEAK * TOLERANCE)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ("constant", "inverse_sqrt")])
def test_schedules_end_at_the_minimum_and_stay_there(name):
    got = ours(OptimizerConfig(learning_rate=PEAK, schedule=name, warmup_ratio=0.1, min_lr_ratio=0.25), 40, length=60)
    np.testing.assert_allclose(got[40:], 0.25 * PEAK, rtol=1e-6)
    assert got.max() <= PEAK * (1 + 1e-6)


def test_warmup_ratio_is_a_share_of_the_steps_rounded_up_but_never_all_of_them():
    assert OptimizerConfig(warmup_ratio=0.03).warmup(100) == 3
    assert OptimizerConfig(warmup_ratio=0.03).warmup(101) == 4
    assert OptimizerConfig(warmup_ratio=0.07).warmup(100) == 7  # 0.07 * 100 is a little more than 7 in binary
    assert OptimizerConfig(warmup_ratio=0.03).warmup(1) == 0
    assert ours(OptimizerConfig(learning_rate=PEAK, schedule="cosine", warmup_ratio=0.03), 1)[0] == np.float32(PEAK)
