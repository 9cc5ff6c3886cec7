"""Schedule-free AdamW and Prodigy follow their authors' packages, stacks of layers included."""

import jax
import numpy as np
import pytest
from optimizer_problems import CONSTANT, assert_close, problem, run_ours, run_torch_named, run_with_state, tree_of
from prodigyopt import Prodigy
from schedulefree import AdamWScheduleFreeReference

from meshtune.arrays.tree import flatten
from meshtune.optim.build import OptimizerConfig

RATE = 1e-2


def groups_of(tensors):
    decayed = [row for name, rows in tensors.items() for row in rows if "norm" not in name and "bias" not in name]
    free = [row for name, rows in tensors.items() for row in rows if "norm" in name or "bias" in name]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": free, "weight_decay": 0.0}]


# float32 on both sides, but x is kept there and made from y and z here.
@pytest.mark.parametrize("steps", [1, 50])
def test_schedule_free_equals_its_authors_code_where_it_trains_and_where_it_is_evaluated(steps):
    params, noise = problem(steps=steps)
    config = OptimizerConfig("schedule_free", RATE, CONSTANT, weight_decay=0.1, beta1=0.85)
    built = {}

    def make(tensors):
        built["optimizer"] = AdamWScheduleFreeReference(groups_of(tensors), lr=RATE, betas=(0.85, 0.999))
        built["optimizer"].train()
        built["tensors"] = tensors
        return built["optimizer"]

    expected = run_torch_named(make, params, noise, steps)
    got, optimizer, state = run_with_state(config, params, noise, steps)
    assert_close(got, expected, atol=1e-5)
    built["optimizer"].eval()
    shown = flatten(optimizer.eval_params(tree_of(jax.tree.map(jax.numpy.asarray, got)), state))
    for name, rows in built["tensors"].items():
        averages = np.stack([row.detach().numpy() for row in rows]) if name.startswith("layers/") else rows[0].detach()
        np.testing.assert_allclose(shown[name], averages, atol=1e-5, err_msg=name)
    if steps > 1:
        assert max(np.abs(shown[name] - got[name]).max() for name in got) > 1e-2


def test_schedule_free_weighs_by_the_rates_of_its_warm_up():
    """The first update of a warm-up has rate 0 and no weight: float64, by hand, one number."""
    config = OptimizerConfig("schedule_free", 0.1, "constant", warmup_steps=2, beta1=0.9)
    params, noise = {"w": np.full(1, 2.0, np.float32)}, {"w": np.array([[1.0], [-0.5], [0.3]], np.float32)}
    y = z = x = 2.0
    moment = weight = 0.0
    for at, rate in enumerate((0.0, 0.05, 0.1)):
        slope = 0.3 * y + float(noise["w"][at, 0])
        moment = 0.999 * moment + 0.001 * slope**2
        z -= rate * slope / (np.sqrt(moment / (1 - 0.999 ** (at + 1))) + 1e-8)
        weight += rate**2
        share = rate**2 / weight if weight else 0.0
        x = (1 - share) * x + share * z
        y = 0.9 * x + 0.1 * z
    np.testing.assert_allclose(run_ours(config, params, noise, 3)["w"], y, rtol=2e-6)


# It starts with changes of 1e-6, of which float32 keeps few digits beside parameters of order 1: hence small ones.
@pytest.mark.parametrize(("steps", "rtol"), [(1, 1e-6), (50, 1e-3)])
def test_prodigy_equals_its_authors_code(steps, rtol):
    params, noise = problem(steps=steps)
    params = {name: 1e-4 * value for name, value in params.items()}
    noise = {name: 1 + 0.1 * value for name, value in noise.items()}  # a slope to follow
    config = OptimizerConfig("prodigy", 1.0, CONSTANT, weight_decay=0.1, d_coef=2.0)

    def make(tensors):
        return Prodigy(groups_of(tensors), lr=1.0, use_bias_correction=True, d_coef=2.0)

    got = run_ours(config, params, noise, steps)
    expected = run_torch_named(make, params, noise, steps)
    assert_close(got, expected, atol=rtol * max(np.abs(value).max() for value in expected.values()))
    if steps > 1:
        assert max(np.abs(got[name] - params[name]).max() for name in got) > 0.05  # it has found a rate


def test_prodigy_warms_up_from_zero():
    """The first rate of a warm-up is 0: nothing is learned from nothing."""
    params, noise = problem(steps=20)
    params = {name: 1e-4 * value for name, value in params.items()}
    noise = {name: 1 + 0.1 * value for name, value in noise.items()}
    got = run_ours(OptimizerConfig("prodigy", 1.0, warmup_steps=3), params, noise, 20)
    moved = [np.abs(got[name] - params[name]).max() for name in got]
    assert np.isfinite(moved).all()
    assert max(moved) > 1e-5
