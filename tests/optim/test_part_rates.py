"""Projector and tower have their own learning rates: steps are those of torch's groups of parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from optimizer_problems import tree_of

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import named_leaves
from meshtune.config.load import load_recipe
from meshtune.errors import UserError
from meshtune.optim.build import make_optimizer
from meshtune.optim.config import OptimizerConfig

SHAPES = {
    "layers/0.0/attn/q/adapter/a": (2, 3, 4),
    "layers/0.0/attn/q/adapter/b": (2, 4, 3),
    "projector/linear_1/weight": (4, 6),
    "projector/linear_1/bias": (4,),
    "vision/layers/0.0/attn/q/weight": (2, 5, 5),
    "vision/layers/0.0/attn/q/adapter/b": (2, 5, 3),
}
RATE, PROJECTOR, TOWER, STEPS = 1e-3, 1e-4, 5e-6, 5


def spec_of(path: str, shape: tuple[int, ...]) -> ArraySpec:
    last = {"a": ("rank", "embed"), "b": ("heads", "rank"), "weight": ("heads", "embed"), "bias": ("heads",)}
    axes = (*(("layers",) if "layers/" in path else ()), *last[path.split("/")[-1]])
    return ArraySpec(shape, "float32", axes, role="vector" if path.endswith("bias") else "matrix")


TREE = tree_of({path: spec_of(path, shape) for path, shape in SHAPES.items()})


def group_of(path: str) -> str:
    return path.split("/")[0]


@pytest.mark.parametrize("ratio", [None, 8.0])
def test_steps_are_those_of_groups_of_parameters_in_torch(ratio):
    """With LoRA+ the B of a tower's adapter has the ratio times the tower's rate, and so have biases. Float32 rounding
    over five updates of at most 8e-3 each: 1e-6."""
    rates = {"layers": RATE, "projector": PROJECTOR, "vision": TOWER}
    draw = np.random.default_rng(0)
    start = {path: draw.normal(size=shape).astype(np.float32) for path, shape in SHAPES.items()}
    theirs = {path: torch.tensor(array) for path, array in start.items()}
    faster = {path for path in SHAPES if path.endswith(("/b", "bias"))}
    groups = [
        {"params": [theirs[path]], "lr": rates[group_of(path)] * (ratio if ratio and path in faster else 1)}
        for path in SHAPES
    ]
    torch_optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
    config = OptimizerConfig(
        "adamw", RATE, "linear", weight_decay=0.1, no_decay=(), lora_plus_ratio=ratio,
        projector_learning_rate=PROJECTOR, tower_learning_rate=TOWER,
    )  # fmt: skip
    optimizer, schedule = make_optimizer(config, STEPS, TREE)
    ours = tree_of({path: jnp.asarray(array) for path, array in start.items()})
    state = optimizer.init(ours)
    decay = torch.optim.lr_scheduler.LambdaLR(torch_optimizer, lambda step: float(schedule(step)) / RATE)
    for _ in range(STEPS):
        gradients = {path: draw.normal(size=shape).astype(np.float32) for path, shape in SHAPES.items()}
        for path, parameter in theirs.items():
            parameter.grad = torch.tensor(gradients[path])
        torch_optimizer.step()
        decay.step()
        changes, state = optimizer.update(tree_of({p: jnp.asarray(g) for p, g in gradients.items()}), state, ours)
        ours = jax.tree.map(lambda p, change: p + change, ours, changes)
    for path, array in named_leaves(ours):
        assert np.abs(array - start[path]).max() > 1e-6
        np.testing.assert_allclose(array, theirs[path].numpy(), atol=1e-6, rtol=0, err_msg=path)


@pytest.mark.parametrize("part", ["projector", "tower"])
def test_a_rate_of_what_is_not_trained_is_refused(part):
    tree = tree_of({"layers/0.0/attn/q/adapter/a": spec_of("layers/0.0/attn/q/adapter/a", (2, 3, 4))})
    with pytest.raises(UserError, match=f"nothing of a {part} is trained"):
        make_optimizer(OptimizerConfig(**{f"{part}_learning_rate": 1e-4}), STEPS, tree)


@pytest.mark.parametrize(
    ("optimizer", "vision", "reason"),
    [
        ({"projector_learning_rate": 1e-4, "name": "prodigy"}, {"train": ["projector"]}, "one rate for all parameters"),
        ({"tower_learning_rate": 1e-4, "name": "badam"}, {"train": ["tower"]}, "whole layers of the language model"),
        ({"tower_learning_rate": 1e-4}, None, "no section vision"),
    ],
)
def test_recipes_without_such_a_part_are_refused(optimizer, vision, reason):
    sections = {"optimizer": optimizer} | ({} if vision is None else {"vision": vision})
    with pytest.raises(UserError, match=reason):
        load_recipe({"model": "m", "data": "d.json", "output": "o", "method": "full", **sections})
