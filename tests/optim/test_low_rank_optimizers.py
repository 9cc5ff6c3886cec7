"""GaLore and APOLLO follow their authors' packages, layer by layer, over one and over fifty updates."""

import apollo_torch.random_projector
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from apollo_torch import APOLLOAdamW
from galore_torch import GaLoreAdamW
from galore_torch.galore_projector import GaLoreProjector
from optimizer_problems import CONSTANT, abstract_of, assert_close, problem, run_ours, run_torch_named, tree_of

from meshtune.errors import UserError
from meshtune.optim.apollo import random_projector
from meshtune.optim.build import OptimizerConfig, make_optimizer
from meshtune.optim.galore import main_directions
from meshtune.optim.optimizer import UpdateContext

TALL, WIDE = "layers/0.0/mlp/gate/weight", "layers/0.0/mlp/down/weight"
SHAPES = {TALL: (3, 12, 8), WIDE: (3, 6, 10), "layers/0.0/attn_norm/weight": (3, 6), "embed/weight": (11, 6)}
RANK, GAP, RATE = 3, 7, 1e-2


def groups(tensors, **low):
    narrow = [row for name in (TALL, WIDE) for row in tensors[name]]
    usual = [row for name in tensors if name not in (TALL, WIDE) for row in tensors[name]]
    return [{"params": narrow, "rank": RANK, "update_proj_gap": GAP, "proj_type": "std", **low}, {"params": usual}]


@pytest.fixture
def fixed_signs(monkeypatch):
    """The authors' projector with the sign of each singular vector fixed, which its definition leaves open."""
    plain = GaLoreProjector.get_orthogonal_matrix

    def fix_signs(self, weights, rank, type):
        projector = plain(self, weights, rank, type)
        rows = projector if type == "right" else projector.T
        largest = rows.gather(1, rows.abs().argmax(dim=1, keepdim=True))
        rows = rows * torch.where(largest < 0, -1.0, 1.0)
        return rows if type == "right" else rows.T

    monkeypatch.setattr(GaLoreProjector, "get_orthogonal_matrix", fix_signs)


# Two singular value decompositions in float32: directions agree to about 1e-6 over the gap between singular values,
# and eight of them are found anew in fifty updates of up to 1e-2 each.
@pytest.mark.parametrize(("steps", "atol"), [(1, 2e-6), (50, 1e-4)])
@pytest.mark.usefixtures("fixed_signs")
def test_galore_equals_its_authors_code(steps, atol):
    params, noise = problem(SHAPES, steps=steps)
    config = OptimizerConfig("galore", RATE, CONSTANT, rank=RANK, update_gap=GAP, scale=0.5)

    def make(tensors):
        return GaLoreAdamW(groups(tensors, scale=0.5), lr=RATE, eps=1e-8, no_deprecation_warning=True)

    assert_close(run_ours(config, params, noise, steps), run_torch_named(make, params, noise, steps), atol)


def apollo_like_ours(monkeypatch, config, names):
    """The authors' projector drawing our random numbers: parameter n of `names` (path, layer) in period p."""
    monkeypatch.setattr(apollo_torch.random_projector, "next_seed", lambda seed: seed + 1000)

    def draw(self, weights, rank, type, seed):
        path, layer = names[seed % 1000 - 1]
        at = UpdateContext(path, jnp.int32(layer), jnp.int32(seed // 1000 * GAP), jnp.float32(0), 0.0)
        return torch.tensor(np.asarray(random_projector(config, jnp.asarray(weights.numpy()), at)))

    monkeypatch.setattr(apollo_torch.random_projector.GradientProjector, "get_orthogonal_matrix", draw)


@pytest.mark.parametrize("steps", [1, 50])
@pytest.mark.parametrize(("scaling", "scale"), [("channel", 1.0), ("tensor", 128.0)])
def test_apollo_equals_its_authors_code(monkeypatch, scaling, scale, steps):
    params, noise = problem(SHAPES, steps=steps)
    config = OptimizerConfig("apollo", RATE, CONSTANT, rank=RANK, update_gap=GAP, scale=scale, scaling=scaling)
    apollo_like_ours(monkeypatch, config, [(name, layer) for name in (TALL, WIDE) for layer in range(3)])

    def make(tensors):
        low = groups(tensors, scale=scale, proj="random", scale_type=scaling)
        return APOLLOAdamW(low, lr=RATE, eps=1e-8)

    # float32 on both sides; with the larger scale parameters move by up to 0.1 an update.
    expected = run_torch_named(make, params, noise, steps)
    assert_close(run_ours(config, params, noise, steps), expected, atol=5e-6 * scale**0.5 * max(1, steps / 10))


def test_apollo_draws_another_projector_for_every_layer_and_period():
    config, weight = OptimizerConfig("apollo", rank=RANK, update_gap=GAP), jnp.zeros((12, 8))

    def at(layer, count, path=TALL):
        return np.asarray(
            random_projector(
                config, weight, UpdateContext(path, jnp.int32(layer), jnp.int32(count), jnp.float32(0), 0.0)
            )
        )

    np.testing.assert_array_equal(at(0, 0), at(0, GAP - 1))
    for projector in (at(0, GAP), at(1, 0), at(0, 0, WIDE)):
        assert np.abs(at(0, 0) - projector).max() > 0.1


def test_galore_projects_onto_the_largest_singular_directions():
    """Those of numpy's decomposition in float64, as subspaces; orthonormal, with the largest component positive."""
    rng = np.random.default_rng(3)
    for shape in ((9, 5), (5, 9)):
        gradient = rng.normal(size=shape).astype(np.float32)
        directions = np.asarray(main_directions(jnp.asarray(gradient), 2), np.float64)
        rows = directions if shape[0] > shape[1] else directions.T
        u, _, vt = np.linalg.svd(gradient.astype(np.float64))
        expected = vt[:2] if shape[0] > shape[1] else u[:, :2].T
        np.testing.assert_allclose(rows.T @ rows, expected.T @ expected, atol=1e-5)
        assert (rows[np.arange(2), np.abs(rows).argmax(axis=1)] > 0).all()


@pytest.mark.parametrize("name", ["galore", "apollo"])
def test_state_is_narrow_and_says_where_it_lies(name):
    from meshtune.arrays.spec import ArraySpec

    tree = tree_of({
        TALL: ArraySpec((3, 64, 32), "float32", ("layers", "ffn", "embed"), role="matrix"),
        WIDE: ArraySpec((3, 32, 64), "float32", ("layers", "embed", "ffn"), role="matrix"),
    })  # fmt: skip
    optimizer, _ = make_optimizer(OptimizerConfig(name, rank=4), 10, tree)
    specs = optimizer.specs(tree)["kept"]
    assert (specs[TALL]["m"].shape, specs[TALL]["m"].axes) == ((3, 64, 4), ("layers", "ffn", "rank"))
    assert (specs[WIDE]["v"].shape, specs[WIDE]["v"].axes) == ((3, 4, 64), ("layers", "rank", "ffn"))
    if name == "galore":
        assert (specs[TALL]["projector"].shape, specs[TALL]["projector"].axes) == (
            (3, 4, 32),
            ("layers", "rank", "embed"),
        )
        assert (specs[WIDE]["projector"].shape, specs[WIDE]["projector"].axes) == (
            (3, 32, 4),
            ("layers", "embed", "rank"),
        )


def test_matrices_no_wider_than_the_rank_have_plain_adamw():
    params, noise = problem(SHAPES)
    narrow = run_ours(OptimizerConfig("galore", RATE, CONSTANT, rank=7), params, noise, 5)
    plain = run_ours(OptimizerConfig("adamw", RATE, CONSTANT), params, noise, 5)
    # The same operations; a compiler may round the last bit otherwise in a larger program.
    np.testing.assert_allclose(narrow[WIDE], plain[WIDE], rtol=3e-7)
    assert np.abs(narrow[TALL] - plain[TALL]).max() > 1e-3


@pytest.mark.parametrize("name", ["galore", "apollo"])
def test_adapters_and_ranks_that_narrow_nothing_are_refused(name):
    adapter = tree_of({"layers/0.0/attn/q/adapter/a": jnp.zeros((2, 8, 64))})
    with pytest.raises(UserError, match=r"(?s)which those of adapters have already.*method: full"):
        make_optimizer(OptimizerConfig(name, rank=4), 10, abstract_of(adapter))
    with pytest.raises(UserError, match=r"(?s)rank 8 is not below .*the widest has 8.*rank below 8"):
        make_optimizer(OptimizerConfig(name, rank=8), 10, abstract_of(tree_of({TALL: jnp.zeros((3, 12, 8))})))
