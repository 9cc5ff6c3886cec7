"""A mixture of experts: routing, sums and the load-balancing loss, chunks, decoding, and the trained parameters."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from meshtune.adapters.config import FreezeConfig, FullConfig
from meshtune.adapters.method import abstract
from meshtune.arrays.tree import flatten
from meshtune.errors import UserError
from meshtune.families.balancing import with_aux_loss
from meshtune.generate.engine import Engine
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.layout import abstract_mesh
from meshtune.model.attention import AttentionSpec
from meshtune.model.block import Context
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward, logits
from meshtune.model.dispatch import choose_exchange, round_slots
from meshtune.model.experts import ExpertsSpec, RouterSpec
from meshtune.model.gather import layout_for
from meshtune.model.inputs import Inputs, SequenceInfo
from meshtune.model.layer import LayerSpec
from meshtune.model.mlp import MlpSpec
from meshtune.model.norm import NormSpec
from meshtune.model.rope import RopeSpec
from meshtune.model.spec import ModelSpec, Stack, init_params
from meshtune.model.stacks import layers_loss
from meshtune.objectives.answers import metric_means, with_layers
from meshtune.objectives.sft import sft_objective
from meshtune.train.evaluation.evaluate import evaluate
from meshtune.train.step.build import make_eval_step, mean_gradient
from model_specs import llama_layer, llama_spec

EMBED, WIDTH, EXPERTS, CHOSEN, LAYERS = 16, 24, 6, 2, 3
ROUTER = RouterSpec(EXPERTS, CHOSEN)
EXPERTS_SPEC = ExpertsSpec(ROUTER, WIDTH, LAYERS, shared=MlpSpec(8), shared_gate=True, aux_loss=0.5)


def model(experts=EXPERTS_SPEC):
    norm = NormSpec(1e-5)
    layer = LayerSpec(AttentionSpec(2, 1, 8, rope=RopeSpec(1e4, 8)), experts, norm)
    return ModelSpec("qwen2_moe", 40, EMBED, (Stack((layer,), LAYERS),), norm, max_length=64, init_std=0.3)


SPEC = model()


def batch(rows=3, length=20):
    rng = np.random.default_rng(0)
    place = np.broadcast_to(np.arange(length), (rows, length))
    arrays = {"tokens": rng.integers(0, 40, (rows, length)), "targets": rng.integers(0, 40, (rows, length))}
    arrays |= {"positions": place % 9, "segment_ids": np.where(place >= 17, 0, 1 + place // 9)}
    arrays = {name: jnp.asarray(array, jnp.int32) for name, array in arrays.items()}
    return arrays | {"weights": (arrays["segment_ids"] > 0).astype(jnp.float32)}


def score_batch(params, compute=Compute()):
    return with_layers(SPEC, sft_objective(params, SPEC, compute, batch(), None))


def loss(params, compute):
    score = score_batch(params, compute)
    return score.loss / score.weight


def route(spec, logits, correction=None):
    """The routing of tokens with these logits [N, E]."""
    node = {"weight": jnp.eye(spec.experts), "correction": jnp.asarray(correction) if spec.correction else None}
    return spec.route(jnp.asarray(logits, jnp.float32)[None], {k: v for k, v in node.items() if v is not None})


def test_a_correction_changes_the_choice_and_not_the_weights():
    spec = RouterSpec(4, 2, "sigmoid", correction=True, scale=2.5)
    routing = route(spec, [[1.0, 0.5, 0.0, -1.0]], [0.0, 0.0, 0.0, 1.0])
    assert routing.experts.tolist() == [[[3, 0]]]
    scores = 1 / (1 + np.exp([1.0, -1.0]))
    np.testing.assert_allclose(routing.weights[0, 0], 2.5 * scores / scores.sum(), rtol=1e-6)


@pytest.mark.parametrize(("best", "chosen"), [(1, {4, 5}), (2, {0, 1})])
def test_experts_come_from_the_best_groups(best, chosen):
    """A group's score is its best expert's, or the sum of its two best."""
    spec = RouterSpec(6, 2, "sigmoid", groups=3, top_groups=1, group_score=best, normalize=False)
    assert set(route(spec, [[1.0, 1.1, 0.0, 0.0, 1.2, -4.0]]).experts[0, 0].tolist()) == chosen


@pytest.mark.parametrize("clamp", [False, True])
def test_small_sums_of_weights_are_kept_from_zero(clamp):
    routing = route(RouterSpec(2, 1, "sigmoid", epsilon=0.5, clamp_sum=clamp), [[0.0, -1.0]])
    np.testing.assert_allclose(routing.weights[0, 0], [0.5 / (0.5 if clamp else 1.0)], rtol=1e-6)


def test_the_load_balancing_loss_is_that_of_transformers():
    """All layers pooled, padding left out; and its gradient, through nothing but the scores."""
    params, arrays = init_params(SPEC, jax.random.key(0)), batch()
    traced = []

    class Spy(RouterSpec):
        def route(self, x, node, key=None):
            traced.append(jnp.einsum("btd,ed->bte", x, node["weight"]))
            return super().route(x, node, key)

    spied = model(dataclasses.replace(EXPERTS_SPEC, router=Spy(EXPERTS, CHOSEN)))
    inputs = Inputs(*(arrays[name] for name in ("tokens", "positions", "segment_ids")))

    @jax.jit
    def sums_and_logits(params):
        return forward(params, spied, Compute(scan=False), inputs).sums, traced

    sums, router_logits = sums_and_logits(params)
    assert len(router_logits) == LAYERS
    theirs = load_balancing_loss_func(
        tuple(torch.tensor(np.asarray(layer)).reshape(-1, EXPERTS) for layer in router_logits),
        EXPERTS,
        CHOSEN,
        torch.tensor(np.asarray(arrays["segment_ids"] > 0).astype(np.int64)),
    )
    assert float(layers_loss(SPEC, sums)) == pytest.approx(0.5 * float(theirs), rel=1e-5)
    tokens = float((arrays["segment_ids"] > 0).sum())
    assert sums["routed_tokens"].tolist() == [tokens] * LAYERS
    assert sums["expert_tokens"].sum(axis=1).tolist() == [tokens * CHOSEN] * LAYERS


@pytest.mark.parametrize(
    "compute",
    [
        pytest.param(Compute(remat="selective"), marks=pytest.mark.slow),
        pytest.param(Compute(mlp_chunk=6), marks=pytest.mark.slow),
        Compute(remat="full", attention_chunk=7, mlp_chunk=3),
    ],
    ids=["selective", "mlp by chunks", "rows by chunks"],
)
def test_chunks_and_rematerialisation_change_nothing(compute):
    """The loss of the layers included, which is not linear in the tokens."""
    params, loss_and_gradient = (
        init_params(SPEC, jax.random.key(0)),
        jax.jit(jax.value_and_grad(loss), static_argnums=1),
    )
    expected, gradient = loss_and_gradient(params, Compute())
    value, ours = loss_and_gradient(params, compute)
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    for path, leaf in flatten(gradient).items():  # float32, sums in another order
        np.testing.assert_allclose(flatten(ours)[path], leaf, rtol=1e-4, atol=2e-6, err_msg=path)


@pytest.mark.parametrize("micro_batches", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_accumulated_micro_batches_are_one_batch(micro_batches):
    """Loss, every metric and the gradient, the load-balancing loss of all tokens of the update included; rows differ in
    their padding, so that micro-batches differ in their numbers of tokens."""
    arrays = batch(rows=4)
    lengths = jnp.asarray([20, 9, 15, 3])[:, None]
    inside = jnp.arange(20) < lengths
    arrays |= {"segment_ids": arrays["segment_ids"] * inside, "weights": arrays["weights"] * inside}
    params, score = init_params(SPEC, jax.random.key(0)), sft_objective

    def of(count):
        split = {name: array.reshape(count, -1, array.shape[-1]) for name, array in arrays.items()}
        return mean_gradient(score, SPEC, Compute(), params, lambda x: x, split, None, lambda x: x)

    ours, expected = jax.jit(of, static_argnums=0)(micro_batches), jax.jit(of, static_argnums=0)(1)
    assert float(expected.metrics["aux_loss"]) > 0.1
    for name in ("loss", "aux_loss", "weight", "grad_norm", "expert_load_max", "dead_experts", "dropped_tokens"):
        assert float(ours.metrics[name]) == pytest.approx(float(expected.metrics[name]), rel=2e-6), name
    for path, leaf in flatten(expected.tree).items():  # float32, sums in another order
        np.testing.assert_allclose(flatten(ours.tree)[path], leaf, rtol=1e-4, atol=1e-6, err_msg=path)


def test_evaluation_pools_the_loss_over_all_its_data():
    """Batches of one row and micro-batches of one row have the loss, and the metrics, of all rows at once."""
    params, step = init_params(SPEC, jax.random.key(3)), make_eval_step(sft_objective, SPEC, Compute())
    rows = jax.tree.map(np.asarray, batch())
    splits = {
        "batches": [{name: array[None, row : row + 1] for name, array in rows.items()} for row in range(3)],
        "micro-batches": [{name: array[:, None] for name, array in rows.items()}],
    }
    pooled = jax.jit(score_batch)(params)
    expected = jax.tree.map(float, metric_means(pooled) | {"loss": pooled.loss / pooled.weight})
    assert expected["aux_loss"] > 0.1
    for name, batches in splits.items():
        evaluation = evaluate(step, SPEC, params, {}, batches)
        assert evaluation.metrics | {"loss": evaluation.loss} == pytest.approx(expected, rel=2e-6), name


def test_decoding_is_the_whole_row():
    params, compute = init_params(SPEC, jax.random.key(3)), Compute()
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6, 5]]
    answers = Engine(params, SPEC, compute).generate(prompts, max_tokens=6)
    length = max(map(len, prompts)) + 5
    rows = [(prompt + answer[:-1] + [0] * length)[:length] for prompt, answer in zip(prompts, answers, strict=True)]
    tokens = jnp.asarray(rows)
    inputs = Inputs(tokens, jnp.broadcast_to(jnp.arange(length), tokens.shape), jnp.ones_like(tokens))
    expected = jax.jit(lambda params: logits(params, SPEC, forward(params, SPEC, compute, inputs).hidden))(params)
    for prompt, answer, row in zip(prompts, answers, expected.argmax(-1).tolist(), strict=True):
        assert answer == row[len(prompt) - 1 : len(prompt) + 5]


def test_padding_is_computed_by_no_expert():
    spec = dataclasses.replace(EXPERTS_SPEC, shared=None, shared_gate=False)
    node = init_params(model(spec), jax.random.key(0))["layers"]["0.0"]["mlp"]
    x = jax.random.normal(jax.random.key(1), (1, 5, EMBED))
    segments = jnp.asarray([[1, 1, 0, 2, 0]])
    rows = SequenceInfo(jnp.zeros_like(segments), segments, {})
    node = jax.tree.map(lambda leaf: leaf[0], node)
    y = jax.jit(lambda x: spec.apply(x, node, Context(Compute(), rows, {})).y)(x)
    assert jnp.any(y != 0, axis=-1).tolist() == [[True, True, False, True, False]]


def test_routers_are_trained_only_where_that_is_asked_for():
    spec = model(dataclasses.replace(EXPERTS_SPEC, router=RouterSpec(EXPERTS, CHOSEN, "sigmoid", correction=True)))
    router, correction = "layers/0.0/mlp/router/weight", "layers/0.0/mlp/router/correction"

    def trained_leaves(method):
        return flatten(abstract(method, spec).trainable).keys() & {
            router,
            correction,
            "layers/0.0/mlp/experts/up/weight",
        }

    assert trained_leaves(FullConfig()) == {"layers/0.0/mlp/experts/up/weight"}
    assert trained_leaves(FreezeConfig(last_layers=LAYERS)) == {"layers/0.0/mlp/experts/up/weight"}
    assert trained_leaves(FullConfig(train_router=True)) == {router, "layers/0.0/mlp/experts/up/weight"}


def test_ep_divides_the_experts():
    layout, _ = layout_for(abstract_mesh(MeshConfig(fsdp=2, ep=2)), SPEC)
    assert layout.spec(("layers", "experts", "ffn", "embed"), (LAYERS, EXPERTS, WIDTH, EMBED))[1] == "ep"
    with pytest.raises(Exception, match="ep=4 does not divide the model's experts of 6") as raised:
        layout_for(abstract_mesh(MeshConfig(ep=4)), SPEC)
    assert "1, 2, 3, 6" in raised.value.fix


def test_how_tokens_are_exchanged_depends_on_the_experts_of_a_token():
    assert choose_exchange("auto", 8, 8).exchange == "all_to_all"
    assert choose_exchange("auto", 4, 8).exchange == "gather"
    assert choose_exchange("gather", 8, 2) == ("gather", "asked for")


def test_rounds_of_an_exchange_hold_all_that_can_be_sent():
    """At first half as much again as an even share; more rounds where all tokens could go to the same device."""
    assert round_slots(24, 3, ep=4, experts=3) == (32, 3)  # an even share is 18 rows, and 72 can be sent
    assert round_slots(64, 1, ep=2, experts=8) == (48, 2)
    assert round_slots(64, 2, ep=2, experts=1) == (64, 1)  # a device with one expert is sent a token once
    assert round_slots(1, 8, ep=64, experts=2) == (2, 1)


def test_metrics_say_how_the_load_is_spread():
    """Of two sparse layers of three: the busiest expert has 3 and 6 times the mean, and 4 and 5 experts have none."""
    tokens = jnp.asarray([[9.0, 9, 0, 0, 0, 0], [0.0] * 6, [12.0, 0, 0, 0, 0, 0]])
    sums = {"expert_tokens": tokens, "routed_tokens": jnp.asarray([9.0, 0, 6.0])}  # two experts a token
    metrics = {name: float(total / weight) for name, (total, weight) in EXPERTS_SPEC.metrics(sums).items()}
    assert metrics == pytest.approx({"expert_load_max": (3 + 6) / 2, "dead_experts": 4.5, "dropped_tokens": 0})


def test_no_token_is_dropped():
    score = jax.jit(score_batch)(init_params(SPEC, jax.random.key(0)))
    total, weight = score.metrics["dropped_tokens"]
    assert (float(total), float(weight)) == (0.0, 1.0)


def test_a_load_balancing_loss_needs_experts():
    assert with_aux_loss(SPEC, 0.25).layer_kinds[0].ffn.aux_loss == 0.25
    with pytest.raises(UserError, match="has no experts whose load could be balanced"):
        with_aux_loss(llama_spec(8, 8, llama_layer(8, 2, 2, 4), 1), 0.25)
