"""Small problems for optimizers, solved by ours and by torch's: parameters whose gradients depend on them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import flatten, path_name, unflatten
from meshtune.families import model_spec
from meshtune.optim.build import make_optimizer

CONSTANT = "constant"
SHAPES = {
    "layers/0.0/attn/q/weight": (3, 8, 6),
    "layers/0.0/attn/q/bias": (3, 8),
    "layers/0.0/attn_norm/weight": (3, 6),
    "norm/weight": (6,),
    "embed/weight": (11, 6),
}
# Heads of 4, for methods that follow them.
SPEC = model_spec(
    {
        "model_type": "llama", "vocab_size": 11, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 8, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True,
    }
)  # fmt: skip


def tree_of(flat):
    return unflatten(flat)


def abstract_of(tree):
    """The ArraySpecs that a model would have for arrays of these names; queries and keys have heads of 4."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: spec_of(path_name(path), leaf), tree)


def spec_of(path, leaf):
    name, last = path.split("/")[0], path.rpartition("/")[2]
    axes = {"a": ("rank", "in"), "b": ("out", "rank")}.get(last, ("out", "in"))
    role = {"embed": "table", "head": "head"}.get(name, "matrix")
    if last in ("bias", "magnitude", "lambda_b", "lambda_d") or "norm" in path or leaf.ndim == 1:
        role, axes = "vector", ("out",)
    axes = (("layers",) if name == "layers" else ()) + axes
    heads = SPEC.layer_kinds[0].mixer.head_dim if path.endswith(("/q/weight", "/k/weight")) else 1
    return ArraySpec(tuple(leaf.shape), str(leaf.dtype), axes, role=role, head_rows=heads)


def problem(shapes=SHAPES, seed=0, steps=20):
    """Initial parameters and a fixed linear-plus-quadratic loss whose gradient depends on the parameters."""
    rng = np.random.default_rng(seed)
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    noise = {name: rng.normal(size=(steps, *shape)).astype(np.float32) for name, shape in shapes.items()}
    return params, noise


def gradient(value, noise):
    return 0.3 * value + noise


def update_options(optimizer, tree):
    """Returns the other arguments of an update: a curvature, for an optimizer that needs it."""
    return (
        {"curvature": lambda: jax.tree.map(lambda leaf: leaf.astype(jnp.float32) ** 2, tree)}
        if optimizer.needs_hessian
        else {}
    )


def run_ours(config, params, noise, steps):
    return run_with_state(config, params, noise, steps)[0]


def run_with_state(config, params, noise, steps, state=None):
    """(parameters, optimizer, state) in the end."""
    tree = tree_of({name: jnp.asarray(value) for name, value in params.items()})
    optimizer, _ = make_optimizer(config, steps, abstract_of(tree), SPEC)

    @jax.jit
    def step(tree, state, noise):
        updates, state = optimizer.update(
            jax.tree.map(gradient, tree, noise), state, tree, **update_options(optimizer, tree)
        )
        return optax.apply_updates(tree, updates), state

    state = optimizer.init(tree) if state is None else state
    for at in range(steps):
        tree, state = step(tree, state, tree_of({name: value[at] for name, value in noise.items()}))
    return {name: np.asarray(value) for name, value in flatten(tree).items()}, optimizer, state


def run_torch(make, params, noise, steps, per_layer=False):
    """`make(decayed, others) -> optimizer`. `per_layer` gives torch each layer by itself."""

    def split(tensors):
        decayed = [p for name, ps in tensors.items() for p in ps if "norm" not in name and "bias" not in name]
        return make(decayed, [p for name, ps in tensors.items() for p in ps if "norm" in name or "bias" in name])

    return run_torch_named(split, params, noise, steps, per_layer)


def run_torch_named(make, params, noise, steps, per_layer=True):
    """`make({path: [a Parameter a layer]}) -> optimizer`."""
    tensors = {}
    for name, value in params.items():
        rows = list(value) if per_layer and name.startswith("layers/") else [value]
        tensors[name] = [torch.nn.Parameter(torch.tensor(row)) for row in rows]
    optimizer = make(tensors)
    for at in range(steps):
        for name, rows in tensors.items():
            parts = noise[name][at] if len(rows) > 1 else [noise[name][at]]
            for row, part in zip(rows, parts, strict=True):
                row.grad = gradient(row.detach(), torch.tensor(part))
        optimizer.step()
    return {
        name: np.stack([row.detach().numpy() for row in rows]) if len(rows) > 1 else rows[0].detach().numpy()
        for name, rows in tensors.items()
    }


def assert_close(got, expected, atol):
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=atol, err_msg=name)
