"""LoRA+ takes the steps of peft's create_loraplus_optimizer."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from optimizer_problems import SPEC, abstract_of
from peft.optimizers import create_loraplus_optimizer

from meshtune.adapters.peft_format import load_adapter
from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import named_leaves, unflatten
from meshtune.config.load import load_recipe
from meshtune.errors import UserError
from meshtune.optim.build import make_optimizer
from meshtune.optim.config import OptimizerConfig
from tiny_models import same_weights, torch_model

RATE, RATIO, STEPS = 1e-3, 16.0, 5


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_are_those_of_peft(decay: float, tmp_path):
    """A, B, an embedding and a norm trained with them, which peft decays too; gradients are random. Float32 rounding
    over five updates of at most 0.016 each: 1e-6."""
    plain = torch_model("llama3")
    spec, _ = same_weights(plain)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["embed_tokens", "model.norm"]
    )
    model = peft.get_peft_model(plain, config)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    torch.manual_seed(0)
    for parameter in trained.values():
        parameter.data += 0.1 * torch.randn_like(parameter)

    def tree(name: str):
        model.save_pretrained(tmp_path / name)
        return load_adapter(tmp_path / name, spec).trainable

    ours = tree("start")
    optimizer_config = OptimizerConfig(
        "adamw", RATE, "constant", weight_decay=decay, lora_plus_ratio=RATIO, no_decay=()
    )
    optimizer, _ = make_optimizer(optimizer_config, STEPS, abstract_of(ours))
    theirs = create_loraplus_optimizer(
        model, torch.optim.AdamW, lr=RATE, loraplus_lr_ratio=RATIO, loraplus_weight_decay=decay, weight_decay=decay
    )
    state = optimizer.init(ours)
    for step in range(STEPS):
        before = {name: p.data.clone() for name, p in trained.items()}
        for parameter in trained.values():
            parameter.grad = torch.randn_like(parameter)
            parameter.data = parameter.grad.clone()
        gradients = tree(f"gradient-{step}")
        for name, parameter in trained.items():
            parameter.data = before[name]
        theirs.step()
        updates, state = optimizer.update(gradients, state, ours)
        ours = jax.tree.map(lambda p, u: p + u, ours, updates)
    for (path, got), (_, expected) in zip(named_leaves(ours), named_leaves(tree("end")), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6, rtol=0, err_msg=path)


A, B, EMBED = "layers/0.0/attn/q/adapter/a", "layers/0.0/attn/q/adapter/b", "embed/weight"


def adapted_specs():
    return unflatten(
        {
            A: ArraySpec((2, 4, 4), "float32", ("layers", "rank", "embed"), role="matrix"),
            B: ArraySpec((2, 4, 4), "float32", ("layers", "heads", "rank"), role="matrix"),
            EMBED: ArraySpec((4, 4), "float32", ("vocab", "embed"), role="table"),
        }
    )


def first_changes(config):
    """The changes of the first update, for random gradients, by path."""
    tree = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), adapted_specs())
    optimizer, _ = make_optimizer(config, STEPS, adapted_specs(), SPEC)
    draw = np.random.default_rng(0)
    gradients = jax.tree.map(lambda leaf: jnp.asarray(draw.normal(size=leaf.shape), jnp.float32), tree)
    changes, _ = optimizer.update(gradients, optimizer.init(tree), tree)
    return dict(named_leaves(changes))


def test_embeddings_have_their_own_rate_and_b_its_multiple():
    config = OptimizerConfig("sgd", RATE, "constant", lora_plus_ratio=RATIO, lora_plus_embedding_rate=1e-6)
    tree = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), adapted_specs())
    optimizer, _ = make_optimizer(config, STEPS, adapted_specs())
    ones = jax.tree.map(jnp.ones_like, tree)
    changes, _ = optimizer.update(ones, optimizer.init(tree), tree)
    actual = {path: -float(change.ravel()[0]) for path, change in named_leaves(changes)}
    expected = {"embed/weight": 1e-6, "layers/0.0/attn/q/adapter/a": RATE, "layers/0.0/attn/q/adapter/b": RATE * RATIO}
    assert actual == pytest.approx(expected)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "adam_mini", "muon", "adafactor", "lion", "schedule_free"])
def test_optimizers_of_single_parameters_take_the_ratio(name: str):
    """The first update of each is proportional to the learning rate: B's is doubled, the others are unchanged."""
    config = OptimizerConfig(name, RATE, "constant")
    plain, changes = first_changes(config), first_changes(dataclasses.replace(config, lora_plus_ratio=2.0))
    for path, factor in {A: 1, B: 2, EMBED: 1}.items():
        assert float(jnp.abs(plain[path]).max()) > 0
        np.testing.assert_allclose(changes[path], factor * plain[path], rtol=1e-6)


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ({"optimizer": {"lora_plus_ratio": 4, "name": "prodigy"}}, "one rate for all parameters"),
        ({"optimizer": {"lora_plus_ratio": 4}, "method": "full"}, "no adapters"),
        ({"optimizer": {"lora_plus_embedding_rate": 1e-6}}, "give lora_plus_ratio too"),
        ({"optimizer": {"lora_plus_ratio": 0.5}}, "greater than or equal to 1|at least 1"),
    ],
)
def test_what_has_no_a_and_b_refuses_the_ratio(recipe: dict, reason: str, tmp_path):
    with pytest.raises(UserError, match=f"(?s){reason}"):
        load_recipe({"model": "m", "data": "d.json", "output": "o", **recipe})
    with pytest.raises(UserError, match="one rate for all"):
        make_optimizer(OptimizerConfig("prodigy", lora_plus_ratio=2.0), STEPS, adapted_specs())
    with pytest.raises(UserError, match="no adapter here"):
        make_optimizer(
            OptimizerConfig(lora_plus_ratio=2.0),
            STEPS,
            {"norm": {"weight": ArraySpec((4,), "float32", ("embed",), role="vector")}},
        )
