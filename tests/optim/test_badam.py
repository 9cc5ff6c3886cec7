"""BAdam follows its authors' package, layer after layer, in every order, and keeps the state of one layer."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from badam import BlockOptimizer
from optimizer_problems import CONSTANT, SPEC, abstract_of, gradient, problem, tree_of

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import flatten, unflatten
from meshtune.errors import UserError
from meshtune.optim.build import OptimizerConfig, make_optimizer

Q, NORM = "layers/0.0/attn/q/weight", "layers/0.0/attn_norm/weight"
SHAPES = {Q: (3, 8, 6), NORM: (3, 6), "norm/weight": (6,), "embed/weight": (11, 6)}
NAMES = {Q: "self_attn.q_proj.weight", NORM: "input_layernorm.weight"}
PERIOD, RATE = 4, 1e-2


def config(**fields):
    return OptimizerConfig("badam", RATE, CONSTANT, weight_decay=0.1, switch_every=PERIOD, **fields)


def ours(config, params, noise, steps, dtype="float32", state=None, start=0):
    """(parameters, state, the layers whose turn it was) after updates with the gradient of the active layer."""
    tree = tree_of({name: jnp.asarray(value, dtype) for name, value in params.items()})
    optimizer, _ = make_optimizer(config, steps, abstract_of(tree), SPEC)
    blocks, turns = optimizer.blocks, []

    @jax.jit
    def step(tree, state, noise):
        row = blocks.active(state["count"]).row
        gradients = {
            path: gradient(value, noise[path]) for path, value in flatten(tree).items() if path.startswith("layers/")
        }
        active = unflatten({path: value[row] for path, value in gradients.items()})
        return *blocks.update(active, state, tree, jnp.bool_(True)), row

    state = optimizer.init(tree) if state is None else state
    for at in range(start, start + steps):
        tree, state, row = step(tree, state, {name: jnp.asarray(value[at], dtype) for name, value in noise.items()})
        turns.append(int(row))
    return {name: np.asarray(value, np.float32) for name, value in flatten(tree).items()}, state, turns


def theirs(params, noise, steps, mode, dtype=torch.float32):
    named = []
    for path, value in params.items():
        for layer, row in enumerate(value if path in NAMES else [value]):
            name = f"model.layers.{layer}.{NAMES[path]}" if path in NAMES else f"model.{path.replace('/', '.')}"
            named.append((name, path, layer, torch.nn.Parameter(torch.tensor(row).to(dtype))))
    named.sort(key=lambda entry: entry[2])  # the order of layers is that of names
    inner = torch.optim.AdamW([p for *_, p in named], lr=RATE, weight_decay=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = BlockOptimizer(
            inner, [(name, p) for name, *_, p in named], switch_block_every=PERIOD, switch_mode=mode, verbose=0
        )
    optimizer.global_step = -1  # it counts an update ahead: its first layer would have one update less than the others
    for group in optimizer.param_groups:  # decay is told from norms by their class there
        group["weight_decay"] = 0.1
    for at in range(steps):
        for _, path, layer, p in named:
            part = noise[path][at][layer] if path in NAMES else noise[path][at]
            p.grad = gradient(p.detach(), torch.tensor(part).to(dtype)) if p.requires_grad else None
        optimizer.step()
    return {
        path: np.stack([p.detach().float().numpy() for _, full_path, _, p in named if full_path == path]).reshape(
            value.shape
        )
        for path, value in params.items()
    }


# float32 on both sides. In bf16 both keep the active layer in float32, and round the same numbers for the gradient.
@pytest.mark.parametrize(
    ("steps", "mode", "dtype", "atol"),
    [
        (1, "ascending", "float32", 1e-6),
        pytest.param(50, "descending", "float32", 5e-6, marks=pytest.mark.slow),
        pytest.param(30, "ascending", "bfloat16", 2e-2, marks=pytest.mark.slow),
    ],
)
def test_badam_equals_its_authors_code(steps, mode, dtype, atol):
    params, noise = problem(SHAPES, steps=steps)
    rounded = {path: np.asarray(jnp.asarray(value, dtype), np.float32) for path, value in params.items()}
    actual, _, _ = ours(config(block_order=mode, no_decay=()), params, noise, steps, dtype)
    expected = theirs(rounded, noise, steps, mode, getattr(torch, dtype))
    for path in (Q, NORM):
        np.testing.assert_allclose(actual[path], expected[path], rtol=0, atol=atol, err_msg=path)
    for path in ("norm/weight", "embed/weight"):
        np.testing.assert_array_equal(actual[path], rounded[path])


def test_a_random_order_takes_every_layer_once_a_round_and_depends_on_the_seed():
    params, noise = problem(SHAPES, steps=8 * 3 * PERIOD)
    turns = ours(config(block_order="random"), params, noise, 8 * 3 * PERIOD)[2]
    rounds = [tuple(turns[start : start + 3 * PERIOD : PERIOD]) for start in range(0, len(turns), 3 * PERIOD)]
    assert all(set(turn) == {0, 1, 2} for turn in rounds)
    assert len(set(rounds)) > 1
    assert ours(config(block_order="random", seed=1), params, noise, len(turns))[2] != turns


def test_going_on_within_a_turn_is_bit_exact():
    params, noise = problem(SHAPES)
    expected, _, _ = ours(config(), params, noise, 10)
    half, state, _ = ours(config(), params, noise, 6)
    resumed, _, _ = ours(config(), half, noise, 4, state=state, start=6)
    for path, value in expected.items():
        np.testing.assert_array_equal(resumed[path], value)


def test_its_state_and_gradients_are_of_one_layer():
    def array(shape, axes, dtype, role="matrix"):
        return ArraySpec(shape, dtype, axes, role=role)

    for dtype, names in (("float32", {"m", "v"}), ("bfloat16", {"m", "v", "copy"})):
        tree = tree_of(
            {
                Q: array((3, 8, 6), ("layers", "heads", "embed"), dtype),
                "norm/weight": array((6,), ("embed",), dtype, "vector"),
            }
        )
        optimizer, _ = make_optimizer(config(), 10, tree, SPEC)
        state = optimizer.specs(tree)["kept"]
        assert set(state) == {Q}
        assert set(state[Q]) == names
        assert {(spec.shape, spec.axes, spec.dtype) for spec in state[Q].values()} == {
            ((8, 6), ("heads", "embed"), "float32")
        }
        assert {path: spec.shape for path, spec in optimizer.gradients(tree).items()} == {Q: (8, 6)}


def test_what_has_no_layers_to_take_turns_is_refused():
    with pytest.raises(UserError, match=r"(?s)no layer is trained.*method: full"):
        make_optimizer(config(), 10, abstract_of(tree_of({"norm/weight": jnp.ones(6)})), SPEC)
    adapter = tree_of({"layers/0.0/attn/q/adapter/a": jnp.ones((3, 2, 6))})
    with pytest.raises(UserError, match=r"(?s)adapters keep little state.*optimizer.name=adamw"):
        make_optimizer(config(), 10, abstract_of(adapter), SPEC)
