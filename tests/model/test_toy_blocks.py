"""Blocks defined outside of the package: those of this file pass through everything that the built-in ones do.

The mixer averages the values of a token's past, and its cache is a running sum. The feed-forward network reads a side
input of every token and returns sums, and the model's loss includes one of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from compiling import FASTER
from meshtune.adapters.config import FullConfig, LoraConfig
from meshtune.adapters.method import abstract, prepare
from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import flatten, merge, unflatten
from meshtune.config.recipe import Recipe
from meshtune.costs.hardware import find_target
from meshtune.costs.roofline import work_of
from meshtune.errors import UserError
from meshtune.families import FAMILIES, model_spec
from meshtune.families.tensors import View, one_to_one, with_view
from meshtune.generate.engine import Engine
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.layout import make_mesh
from meshtune.mesh.placement import place_batch, shardings
from meshtune.model.block import Activation, Context, Cost, Divisor, FeedForward, Mixer, Output, RowParams
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward, logits
from meshtune.model.gather import layout_for
from meshtune.model.inputs import Inputs
from meshtune.model.layer import LayerSpec
from meshtune.model.linear import linear, linear_params, site_key
from meshtune.model.norm import NormSpec
from meshtune.model.spec import ModelSpec, Stack, abstract_params, init_params
from meshtune.model.stacks import layers_loss
from meshtune.objectives.answers import with_layers
from meshtune.objectives.sft import sft_objective
from meshtune.optim.build import OptimizerConfig, make_optimizer
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.weight import QuantisedWeight
from meshtune.setup.search import predict_candidate, workload_of
from meshtune.train.step.build import make_train_step
from meshtune.train.step.state import abstract_state, init_state
from meshtune.weights.export import export_model
from meshtune.weights.load import load_params, load_spec
from model_specs import llama_layer, llama_spec

VOCAB, EMBED, WIDTH, FFN, SIDE, LAYERS = 64, 32, 64, 64, 32, 3
CONFIG = {"model_type": "toy", "architectures": ["ToyForCausalLM"], "vocab_size": VOCAB, "torch_dtype": "float32"}


@dataclasses.dataclass(frozen=True)
class MeanSpec(Mixer):
    """y = out(mean of v over the token's own segment so far)."""

    width: int
    name: ClassVar[str] = "mean"

    def params(self, embed):
        wide, narrow = (self.width, "ffn"), (embed, "embed")
        return {"v": linear_params(wide, narrow, bias=False), "out": linear_params(narrow, wide, bias=True)}

    def apply(self, x, node, context: Context, cache=None):
        rows = context.sequences
        if context.memory is not None:
            values, past = context.memory
        else:
            values, past = self.memory(x, node, context), rows
        if cache is None:
            visible = (rows.segment_ids[:, :, None] == past.segment_ids[:, None, :]) & (rows.segment_ids > 0)[
                :, :, None
            ]
            visible &= rows.positions[:, :, None] >= past.positions[:, None, :]
            total = jnp.einsum("bts,bsw->btw", visible.astype(x.dtype), values["v"])
        else:
            real = (rows.segment_ids > 0)[..., None]
            total = cache.read("total")[:, None] + jnp.cumsum(jnp.where(real, values["v"], 0), axis=1)
            cache = cache.replace("total", total[:, -1])
        mean = total / (rows.positions[..., None] + 1).astype(x.dtype)
        return Output(linear(mean, node["out"], site_key(context.key, "out")), cache, {})

    def memory(self, x, node, context):
        return {"v": linear(x, node["v"], site_key(context.key, "v"))}

    def cache(self, batch, slots, dtype):
        return {"total": ArraySpec((batch, self.width), dtype, ("batch", "ffn"), "zeros")}

    def row_params(self):
        return RowParams(frozenset(["v"]), frozenset(["out"]))

    def divisors(self):
        return (Divisor("tp", "width of means", self.width),)

    def cost(self, embed):
        return Cost(
            2 * embed * self.width, (Activation("ffn", self.width, self.width, kept=True),), pairs=2 * self.width
        )


@dataclasses.dataclass(frozen=True)
class SideMlpSpec(FeedForward):
    """down(relu(up(x) + side(the token's side input))); the model's loss has the square of its mean activation."""

    width: int
    weight: float = 0.1
    name: ClassVar[str] = "mlp"

    def params(self, embed):
        wide, narrow = (self.width, "ffn"), (embed, "embed")
        return {
            "up": linear_params(wide, narrow, bias=False),
            "side": linear_params(wide, (SIDE, "embed"), bias=False),
            "down": linear_params(narrow, wide, bias=False),
        }

    def apply(self, x, node, context: Context, cache=None):
        key = context.key
        side = linear(context.side["token"].astype(x.dtype), node["side"], site_key(key, "side"))
        wide = jax.nn.relu(linear(x, node["up"], site_key(key, "up")) + side)
        real = (context.sequences.segment_ids > 0).astype(jnp.float32)
        active = jnp.sum(wide.astype(jnp.float32).mean(-1) * real)
        sums = {"toy/active": active, "toy/tokens": jnp.sum(real)}
        return Output(linear(wide, node["down"], site_key(key, "down")), cache, sums)

    side_inputs = frozenset(["token"])

    def sums(self):
        return {"toy/active": (), "toy/tokens": ()}

    def loss(self, sums):
        return self.weight * (sums["toy/active"] / jnp.maximum(sums["toy/tokens"], 1.0)) ** 2

    def divisors(self):
        return (Divisor("tp", "ffn width", self.width),)

    def cost(self, embed):
        wide = Activation("ffn", self.width, self.width, kept=True)
        return Cost((2 * embed + SIDE) * self.width, (wide, wide))


@dataclasses.dataclass(frozen=True)
class TokenSide:
    """A second embedding of the tokens, for all layers."""

    name: ClassVar[str] = "side_table"

    def params(self, embed):
        return {"weight": ArraySpec((VOCAB, SIDE), "float32", ("vocab", "embed"), role="table")}

    def apply(self, node, inputs, embeds, compute):
        return {"token": node["weight"][inputs.tokens]}

    def divisors(self):
        return ()


def toy_spec(config, where):
    norm = NormSpec(1e-5)
    layer = LayerSpec(MeanSpec(WIDTH), SideMlpSpec(FFN), norm)
    return ModelSpec(
        "toy", VOCAB, EMBED, (Stack((layer,), LAYERS),), norm, max_length=64, init_std=0.3, side=TokenSide()
    )


def toy_tensors(spec):
    modules = {
        "mean_norm": "norm1", "mean/v": "mean.v", "mean/out": "mean.out", "mlp_norm": "norm2", "mlp/up": "mlp.up",
        "mlp/side": "mlp.side", "mlp/down": "mlp.down",
    }  # fmt: skip
    outside = {"embed": "model.embed", "side_table": "model.side", "norm": "model.norm", "head": "lm_head"}
    transposed = View.identity((EMBED, WIDTH)).transpose(1, 0)  # as GPT-2 stores its matrices
    return with_view(one_to_one(spec, modules, outside), "mean/v/weight", lambda array: transposed)


@contextlib.contextmanager
def register_toy() -> Iterator[None]:
    """With the toy among the families."""
    FAMILIES["toy"] = "toy"
    sys.modules["meshtune.families.toy"] = types.SimpleNamespace(
        DESCRIPTIONS={}, model_spec=toy_spec, tensors=toy_tensors
    )  # pyright: ignore[reportArgumentType]
    yield
    del FAMILIES["toy"], sys.modules["meshtune.families.toy"]


@pytest.fixture(scope="module", autouse=True)
def _toy_family():
    with register_toy():
        yield


with register_toy():
    SPEC = model_spec(CONFIG)
SGD = OptimizerConfig("sgd", 0.05, "constant")


def parameters(seed=0):
    return init_params(SPEC, jax.random.key(seed))


def batch(rows=2, length=20, seed=0):
    """Rows of two documents and some padding, as [1, B, T]."""
    rng = np.random.default_rng(seed)
    cuts = rng.integers(5, 12, rows)
    place = np.broadcast_to(np.arange(length), (rows, length))
    second = place >= cuts[:, None]
    segments = np.where(place >= length - 2, 0, np.where(second, 2, 1))
    positions = np.where(segments == 0, 0, np.where(second, place - cuts[:, None], place))
    tokens, targets = rng.integers(0, VOCAB, (2, rows, length))
    arrays = {"tokens": tokens, "targets": targets, "positions": positions, "segment_ids": segments}
    arrays = {name: array.astype(np.int32) for name, array in arrays.items()}
    arrays["weights"] = ((segments > 0) & (rng.random((rows, length)) < 0.7)).astype(np.float32)
    return {name: array[None] for name, array in arrays.items()}


def micro(arrays):
    return {name: jnp.asarray(array[0]) for name, array in arrays.items()}


def plain_loss(params, arrays):
    """The same model once more, in plain loops over layers and documents."""
    total, active, count = 0.0, 0.0, 0.0

    def norm(x, weight):
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight

    for row in range(arrays["tokens"].shape[0]):
        for segment in (1, 2):
            where = np.flatnonzero(np.asarray(arrays["segment_ids"][row]) == segment)
            tokens = np.asarray(arrays["tokens"][row])[where]
            x, side = params["embed"]["weight"][tokens], params["side_table"]["weight"][tokens]
            for layer in range(LAYERS):
                node = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["layers"]["0.0"])
                v = norm(x, node["mean_norm"]["weight"]) @ node["mean"]["v"]["weight"].T
                mean = jnp.cumsum(v, 0) / jnp.arange(1, len(where) + 1)[:, None]
                x = x + mean @ node["mean"]["out"]["weight"].T + node["mean"]["out"]["bias"]
                h = norm(x, node["mlp_norm"]["weight"])
                wide = jnp.maximum(h @ node["mlp"]["up"]["weight"].T + side @ node["mlp"]["side"]["weight"].T, 0)
                active, count = active + wide.mean(-1).sum(), count + len(where)
                x = x + wide @ node["mlp"]["down"]["weight"].T
            scores = norm(x, params["norm"]["weight"]) @ params["head"]["weight"].T
            nll = (
                jax.nn.logsumexp(scores, -1) - scores[np.arange(len(where)), np.asarray(arrays["targets"][row])[where]]
            )
            total = total + (nll * arrays["weights"][row][where]).sum()
    weight = arrays["weights"].sum()
    return total / weight + 0.1 * (active / count) ** 2


def loss(params, arrays, compute):
    result = with_layers(SPEC, sft_objective(params, SPEC, compute, arrays, None))
    return result.loss / result.weight


COMPUTES = {
    "whole rows": Compute(loss_chunk=8),
    "unrolled": Compute(loss_chunk=8, scan=False),
    "remat": Compute(loss_chunk=8, remat="full"),
    "mlp by chunks": Compute(loss_chunk=8, mlp_chunk=6),
    "rows by chunks": Compute(loss_chunk=8, remat="full", attention_chunk=7, mlp_chunk=3),
}


@pytest.fixture(scope="module")
def plain_gradient():
    """(loss, gradient) of the plain loops."""
    arrays = jax.tree.map(np.asarray, micro(batch()))
    return jax.jit(jax.value_and_grad(lambda params: plain_loss(params, arrays)))(parameters())


QUICK = ("whole rows", "rows by chunks")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in COMPUTES])
def test_loss_and_gradients_are_those_of_plain_loops(name, plain_gradient):
    """The sums' part of the loss and the gradient of the side table included."""
    params, arrays = parameters(), micro(batch())
    expected, gradient = plain_gradient
    value, ours = jax.jit(jax.value_and_grad(loss), static_argnums=2)(params, arrays, COMPUTES[name])
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    assert float(jnp.abs(ours["side_table"]["weight"]).max()) > 1e-3
    for path, leaf in flatten(gradient).items():  # float32, sums of some hundred numbers in another order
        np.testing.assert_allclose(flatten(ours)[path], leaf, rtol=1e-4, atol=2e-6, err_msg=path)


def run_updates(config, steps=3, compute=COMPUTES["remat"]):
    arrays = abstract(FullConfig(), SPEC)
    optimizer, _ = make_optimizer(config, 10, arrays.trainable, SPEC)
    step = make_train_step(sft_objective, SPEC, compute, optimizer)
    state, losses = init_state(parameters(), optimizer), []
    for number in range(steps):
        state, metrics = step(state, {}, batch(seed=number), jnp.int32(0))
        losses.append(float(metrics["loss"]))
        assert float(metrics["aux_loss"]) > 0
    return losses, flatten(state.trainable)


def test_an_update_in_the_backward_pass_gives_side_inputs_their_gradient():
    """Layer by layer, on whole rows and by chunks: the same updates as with all gradients at once."""
    losses, expected = run_updates(SGD)
    for compute in (COMPUTES["remat"], COMPUTES["rows by chunks"]):
        again, actual = run_updates(dataclasses.replace(SGD, in_backward=True), compute=compute)
        assert again == pytest.approx(losses, rel=1e-6)
        start = flatten(parameters())["side_table/weight"]
        assert float(jnp.abs(actual["side_table/weight"] - start).max()) > 1e-4
        for path, leaf in expected.items():
            np.testing.assert_allclose(actual[path], leaf, rtol=0, atol=2e-6, err_msg=path)


def in_backward(params, objective):
    """Traces an update in the backward pass."""
    config = dataclasses.replace(SGD, in_backward=True)
    forms = abstract_params(SPEC) | {
        name: {"weight": ArraySpec((4,), "float32", ("embed",), role="vector")} for name in params if name == "tower"
    }
    optimizer, _ = make_optimizer(config, 10, forms, SPEC)
    step = make_train_step(objective, SPEC, COMPUTES["remat"], optimizer)
    jax.eval_shape(step, init_state(params, optimizer), {}, batch(), jnp.int32(0))


def test_what_would_get_no_gradient_is_refused_by_name():
    """A leaf that feeds neither what enters the layers nor what leaves them; without it the same trace passes."""
    params = parameters()
    in_backward(params, sft_objective)
    with pytest.raises(UserError, match="'tower' is trained, and an update in the backward pass would give it no grad"):
        in_backward(params | {"tower": {"weight": jnp.ones(4)}}, sft_objective)


def test_an_objective_that_goes_through_the_model_twice_is_refused():
    def twice(*arguments):
        sft_objective(*arguments)
        return sft_objective(*arguments)

    with pytest.raises(UserError, match="goes through the model twice"):
        in_backward(parameters(), twice)


def test_the_active_layer_alone_is_updated(plain_gradient):
    losses, actual = run_updates(
        OptimizerConfig("badam", 1e-2, "constant", switch_every=1, block_order="ascending"), steps=1
    )
    assert losses[0] == pytest.approx(float(plain_gradient[0]), rel=1e-6)
    moved = np.asarray(actual["layers/0.0/mlp/side/weight"] != flatten(parameters())["layers/0.0/mlp/side/weight"])
    assert moved[0].any()
    assert not moved[1:].any()


def test_decoding_over_its_own_cache_is_the_whole_row():
    params, compute = parameters(3), Compute()
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6, 5]]
    answers = Engine(params, SPEC, compute).generate(prompts, max_tokens=12)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = jnp.asarray([prompt + answer[:-1]])
        inputs = Inputs(tokens, jnp.arange(tokens.shape[1])[None], jnp.ones_like(tokens))
        expected = logits(params, SPEC, forward(params, SPEC, compute, inputs).hidden).argmax(-1)
        assert answer == expected[0, len(prompt) - 1 :].tolist()


def export_toy(folder):
    """A directory with the parameters, and what `export_model` verified of it."""
    source = folder / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG))
    save_file({"model.norm.weight": np.ones(EMBED, np.float32)}, source / "model.safetensors")  # no other parts
    return folder / "out", export_model(parameters(), SPEC, source, folder / "out")


def test_lora_over_nf4_is_trained_on_every_linear_layer(tmp_path):
    """The quantised forward pass is that of the dequantised weights, and every adapter gets a gradient."""
    directory, _ = export_toy(tmp_path)
    quantised = load_params(directory, SPEC, quantize=QuantizeConfig("nf4", block_size=32))
    prepared = prepare(LoraConfig(rank=4), SPEC, quantised, jax.random.key(1))
    sites = {path.removeprefix("layers/0.0/").removesuffix("/adapter") for path in flatten(prepared.trainable)}
    assert sites == {"mean/v", "mean/out", "mlp/up", "mlp/side", "mlp/down"}
    arrays, compute = micro(batch()), Compute(loss_chunk=8)
    wide = {
        path: leaf.dequantise("float32") if isinstance(leaf, QuantisedWeight) else leaf
        for path, leaf in flatten(prepared.frozen).items()
    }
    assert sum(isinstance(leaf, QuantisedWeight) for leaf in flatten(prepared.frozen).values()) == 5

    @jax.jit
    @jax.value_and_grad
    def both(trained, frozen):
        return loss(merge(trained, frozen), arrays, compute)

    value, gradient = both(prepared.trainable, prepared.frozen)
    expected = jax.jit(loss, static_argnums=2)(unflatten(wide), arrays, compute)
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    for path, adapter in flatten(gradient).items():
        assert float(jnp.abs(adapter.b).max()) > 0, path


def test_it_is_exported_and_read_again(tmp_path):
    """A matrix stored transposed included; export_model verifies logits from the files by itself."""
    params = parameters()
    directory, _ = export_toy(tmp_path)
    files = {name: array for file in directory.glob("*.safetensors") for name, array in load_file(file).items()}
    np.testing.assert_array_equal(
        files["model.layers.1.mean.v.weight"].T, params["layers"]["0.0"]["mean"]["v"]["weight"][1]
    )
    spec, _ = load_spec(directory)
    assert spec == SPEC
    for path, leaf in flatten(load_params(directory, spec)).items():
        np.testing.assert_array_equal(leaf, flatten(params)[path], err_msg=path)


def test_plan_counts_what_its_blocks_say(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    data, train = {"train": "none.jsonl", "max_length": 32}, {"batch_size": 2}
    recipe = Recipe.model_validate(
        {
            "model": str(tmp_path),
            "data": data,
            "output": str(tmp_path / "out"),
            "method": "full",
            "train": train,
            "mesh": {},
            "compute": {"remat": "selective"},
        }
    )
    target = find_target("H100", env={})
    scored = predict_candidate(recipe, target, workload_of(recipe, target.device.backend))
    active = LAYERS * (2 * EMBED * WIDTH + (2 * EMBED + SIDE) * FFN) + VOCAB * EMBED
    length = scored.candidate.length
    pairs = LAYERS * 2 * WIDTH * length / 2
    assert work_of(scored.candidate).flops == pytest.approx(
        scored.candidate.rows * length * (6 * active + 3 * pairs), rel=0.01
    )
    weights = sum(leaf.nbytes for leaf in flatten(abstract_params(SPEC)).values())
    assert scored.estimate.device_bytes > 4 * weights  # weights, gradients and two moments in float32


@pytest.mark.parametrize(
    ("side", "message"), [({"other": 1}, "side input 'other' is read by no layer of this llama")], ids=["unread"]
)
def test_a_side_input_that_nothing_reads_is_an_error(side, message):
    spec = llama_spec(VOCAB, EMBED, llama_layer(FFN, 4, 4, 8), 1)
    tokens = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(UserError, match=message):
        forward(init_params(spec, jax.random.key(0)), spec, Compute(), Inputs(tokens, tokens, tokens, side=side))


def test_a_missing_side_input_is_an_error():
    spec = dataclasses.replace(SPEC, side=None)
    tokens = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(UserError, match="side input 'token' is missing"):
        forward(init_params(spec, jax.random.key(0)), spec, Compute(), Inputs(tokens, tokens, tokens))


def test_embeddings_in_place_of_tokens_and_their_gradient():
    params, arrays = parameters(), micro(batch())
    spec = dataclasses.replace(SPEC, side=None)
    side = params["side_table"]["weight"][arrays["tokens"]]
    embeds = params["embed"]["weight"][arrays["tokens"]]
    place = {name: arrays[name] for name in ("tokens", "positions", "segment_ids")}

    def total(embeds, side):
        inputs = Inputs(**place | {"tokens": jnp.zeros_like(place["tokens"])}, embeds=embeds, side={"token": side})
        output = forward(params, spec, Compute(), inputs)
        return jnp.sum(output.hidden**2) + layers_loss(spec, output.sums), output.hidden

    gradients, hidden = jax.grad(total, argnums=(0, 1), has_aux=True)(embeds, side)
    expected = forward(params, SPEC, Compute(), Inputs(**place)).hidden
    np.testing.assert_allclose(hidden, expected, rtol=1e-6, atol=1e-6)
    assert all(float(jnp.abs(gradient).max()) > 0 for gradient in gradients)


def on_mesh(mesh: dict[str, int], in_backward: bool) -> list[float]:
    """Losses of four updates."""
    config, layout = MeshConfig(**mesh), None
    arrays = abstract(FullConfig(), SPEC)
    optimizer, _ = make_optimizer(dataclasses.replace(SGD, in_backward=in_backward), 10, arrays.trainable, SPEC)
    trainable, like = parameters(), None
    if config.devices > 1:
        layout, _ = layout_for(make_mesh(config, jax.devices()[: config.devices]), SPEC)
        trainable = jax.device_put(trainable, shardings(arrays.trainable, layout))
        like = abstract_state(arrays.trainable, optimizer, layout)
    compute = Compute(loss_chunk=8, remat="full", layout=layout)
    step = make_train_step(sft_objective, SPEC, compute, optimizer, abstract=arrays.trainable)
    state, losses = init_state(trainable, optimizer, like), []
    for number in range(4):
        state, metrics = step(state, {}, place_batch(batch(seed=number), layout, None), np.int32(0))
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.slow
def test_fsdp_by_tp_is_one_device(tmp_path):
    """On four simulated devices, in a process of their own; plain updates and updates in the backward pass."""
    env = os.environ | {
        "XLA_FLAGS": f"{FASTER} --xla_force_host_platform_device_count=4",
        "PYTHONPATH": os.pathsep.join([str(pathlib.Path(__file__).parent.parent), *filter(None, sys.path)]),
    }
    run = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=env, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    losses = json.loads(run.stdout.splitlines()[-1])
    for single, several in losses:
        np.testing.assert_allclose(several, single, rtol=2e-6)  # float32, summed over devices in another order


if __name__ == "__main__":
    with register_toy():
        print(json.dumps([[on_mesh({}, late), on_mesh({"fsdp": 2, "tp": 2}, late)] for late in (False, True)]))
