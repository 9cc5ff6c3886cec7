"""The whole proof of every family against transformers and peft, in the slow tier.

    pytest -n0 -m slow tests/families/test_matrix.py -k gemma2                  everything, for one case
    pytest -n0 -m slow tests/families/test_matrix.py -k "gradients and qwen3"   one test, for cases with that name

Everything is read by our loader from files that transformers wrote, with random weights (families.case). Both sides
compute in float32, in other orders: 1e-4, of the largest gradient of each tensor where gradients are compared.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file
from twins import in_peft, move_weights

from families import mesh_updates
from families.case import (
    VOCAB,
    Case,
    as_inputs,
    directory,
    load_case,
    our_logits,
    torch_logits,
    torch_model,
    write_model,
)
from families.cases import CASES
from meshtune.adapters.config import FullConfig, LoraConfig
from meshtune.adapters.method import abstract, prepare
from meshtune.adapters.peft_format import BaseRecord, attach, load_adapter, save_adapter
from meshtune.arrays.tree import Tree, flatten, merge, unflatten
from meshtune.families import description
from meshtune.generate.engine import Engine
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec
from meshtune.objectives.sft import sft_objective
from meshtune.optim.build import OptimizerConfig, make_optimizer
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.weight import QuantisedWeight
from meshtune.train.step.build import make_train_step
from meshtune.train.step.state import init_state
from meshtune.weights.export import export_model
from meshtune.weights.load import load_params, load_spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
variants_too = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_case = pytest.mark.parametrize("case", [c for c in CASES if not c.variant], ids=lambda case: case.name)
PLAIN = Compute(attention="direct", loss_chunk=8)
RATE = 1e-2
# With seed 0 an input of a layer's sparse network lies within 6e-8 of the threshold, where the gradient jumps.
SEEDS_OF_GRADIENTS = {"gemma3n_default": 1}
# With seed 0 a row magnifies rounding: torch's float32 is 5e-4 from its own float64, ours 2e-4.
SEEDS_OF_ADAPTERS = {"qwen3_next": 1}


def random_rows(length: int, rows: int = 2, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (rows, length))


def close(ours: object, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(ours), theirs, atol=1e-4, rtol=1e-4)


def close_gradients(ours: Tree, expected: Tree, tolerance: float = 1e-4) -> None:
    """Within `tolerance` of the largest of each tensor; those that cancel out to nothing, of a thousandth of all."""
    leaves, flat = flatten(expected), flatten(ours)
    largest = max(float(np.abs(leaf).max()) for leaf in leaves.values())
    assert leaves.keys() == flat.keys()
    for path, leaf in leaves.items():
        scale = max(float(np.abs(leaf).max()), 1e-3 * largest)
        np.testing.assert_allclose(flat[path], leaf, atol=tolerance * scale, rtol=0, err_msg=path)


@variants_too
@pytest.mark.parametrize("length", ["ordinary", "beyond"])
def test_logits_equal_transformers(case: Case, length: str):
    tokens = random_rows(9 if length == "ordinary" else case.beyond)
    spec, params = load_case(case)
    rows = as_inputs([[row] for row in tokens], tokens.shape[1])
    close(our_logits(params, spec, *rows), torch_logits(torch_model(case), tokens))


def mean_loss(params: Tree, spec: ModelSpec, rows: Sequence[jax.Array]) -> jax.Array:
    predicted = jax.nn.log_softmax(our_logits(params, spec, *rows, PLAIN)[:, :-1])
    return -jnp.mean(jnp.take_along_axis(predicted, rows[0][:, 1:, None], axis=-1))


def torch_gradients(case: Case, spec: ModelSpec, tokens: np.ndarray) -> Tree:
    """Of the mean next-token loss, through the files that transformers writes of them; what has none is zero."""
    model, ids = torch_model(case), torch.tensor(tokens)
    torch.nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for name, buffer in model.named_buffers():
            if name in model.state_dict():
                buffer.zero_()
    return load_params(write_model(model), spec)


@variants_too
def test_gradients_of_every_parameter_equal_transformers(case: Case):
    spec, params = load_case(case)
    tokens = random_rows(20, seed=SEEDS_OF_GRADIENTS.get(case.name, 0))
    rows = as_inputs([[row] for row in tokens], tokens.shape[1])
    ours = jax.jit(jax.grad(mean_loss), static_argnums=1)(params, spec, rows)
    close_gradients(ours, torch_gradients(case, spec, tokens))


@every_case
def test_packed_documents_equal_documents_alone(case: Case):
    """Recurrent states and convolutions are reset at each document, and no token sees another one."""
    spec, params = load_case(case)
    documents = [random_rows(length, 1, seed=length)[0] for length in (3, case.beyond // 2, 17)]
    width = sum(map(len, documents)) + 5
    together = our_logits(params, spec, *as_inputs([documents], width))[0]
    alone = our_logits(params, spec, *as_inputs([[ids] for ids in documents], width))
    start = 0
    for number, ids in enumerate(documents):
        close(together[start : start + len(ids)], np.asarray(alone[number, : len(ids)]))
        start += len(ids)


@every_case
def test_generation_equals_transformers_token_for_token(case: Case):
    """Greedy, over the cache, past the window, in a batch of prompts of different lengths; theirs one by one."""
    spec, params = load_case(case)
    prompts = [random_rows(length, 1, seed=length)[0].tolist() for length in (5, 11)]
    ours = Engine(params, spec, Compute()).generate(prompts, max_tokens=case.generated)
    model = torch_model(case)
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": case.generated, "do_sample": False, "pad_token_id": 0}
    for prompt, answer in zip(prompts, ours, strict=True):
        theirs = model.generate(  # pyright: ignore[reportCallIssue]
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **options
        )
        assert answer == theirs[0, len(prompt) :].tolist()


def tensors_in(folder: pathlib.Path) -> dict[str, np.ndarray]:
    return {name: array for file in folder.glob("*.safetensors") for name, array in load_file(file).items()}


@every_case
def test_an_export_is_the_original_to_the_bit(case: Case, tmp_path: pathlib.Path):
    """The same names, dtypes and numbers, those of towers that are not tuned included; transformers reads it back."""
    spec, params = load_case(case)
    out = export_model(params, spec, directory(case), tmp_path / "out").path
    original, exported = tensors_in(directory(case)), tensors_in(out)
    assert original.keys() == exported.keys()
    for name, array in original.items():
        np.testing.assert_array_equal(exported[name], array, err_msg=name, strict=True)
    again = case.auto_class.from_pretrained(
        out, attn_implementation=case.attention, experts_implementation="eager", dtype=torch.float32
    )
    tokens = random_rows(12)
    # Equal weights: the last bits of torch's sums depend on where in memory it has put them.
    close(torch_logits(again.eval(), tokens), torch_logits(torch_model(case), tokens))


def lora(case: Case) -> LoraConfig:
    return LoraConfig(rank=4, alpha=8, targets=case.targets)


@every_case
def test_our_adapter_has_the_same_logits_in_peft(case: Case, tmp_path: pathlib.Path):
    tokens = random_rows(12, seed=SEEDS_OF_ADAPTERS.get(case.name, 0))
    rows = as_inputs([[row] for row in tokens], 12)
    spec, params = load_case(case)
    prepared = prepare(lora(case), spec, params, jax.random.key(0))
    trained = move_weights(prepared.trainable)
    ours = np.asarray(our_logits(merge(trained, prepared.frozen), prepared.spec, *rows))
    save_adapter(tmp_path / "adapter", trained, prepared.spec, lora(case), BaseRecord("some/base", "sha256:0"))
    model = torch_model(case)
    assert np.abs(ours - torch_logits(model, tokens)).max() > 0.1, "the adapter changes nothing"
    close(ours, torch_logits(in_peft(model, tmp_path / "adapter"), tokens))


@every_case
def test_an_adapter_of_peft_has_the_same_logits_here(case: Case, tmp_path: pathlib.Path):
    tokens = random_rows(12)
    options = {"target_modules": case.targets if isinstance(case.targets, str) else list(case.targets)}
    config = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **{**options, **case.peft})
    model = peft.get_peft_model(torch_model(case), config).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(str(tmp_path))
    spec, params = load_case(case)
    spec, params = attach(params, spec, load_adapter(tmp_path, spec))
    close(our_logits(params, spec, *as_inputs([[row] for row in tokens], 12)), torch_logits(model, tokens))


def batch(length: int = 16) -> dict[str, jax.Array]:
    """One micro-batch [1, B, T] of two documents a row."""
    documents = [[random_rows(7, 1, seed)[0], random_rows(length - 9, 1, seed + 9)[0]] for seed in range(2)]
    tokens, positions, segments = as_inputs(documents, length)
    follows = (segments > 0) & (segments == jnp.roll(segments, -1, axis=1))
    arrays = {
        "tokens": tokens,
        "targets": jnp.roll(tokens, -1, axis=1),
        "positions": positions,
        "segment_ids": segments,
        "weights": follows.at[:, -1].set(False).astype(jnp.float32),
    }
    return {name: array[None] for name, array in arrays.items()}


@every_case
def test_lora_over_nf4(case: Case):
    """The forward pass is that of the dequantised weights; updates lower the loss and move every adapter."""
    plain, _ = load_spec(directory(case), "float32")
    quantize = QuantizeConfig("nf4", 8, double=False)
    arrays = abstract(lora(case), plain, quantize=quantize)
    params = load_params(directory(case), arrays.spec, quantize=quantize)
    prepared = prepare(lora(case), arrays.spec, params, jax.random.key(0))
    wide = {
        path: leaf.dequantise("float32") if isinstance(leaf, QuantisedWeight) else leaf
        for path, leaf in flatten(prepared.frozen).items()
    }
    assert any(isinstance(leaf, QuantisedWeight) for leaf in flatten(prepared.frozen).values())
    rows = as_inputs([[row] for row in random_rows(12)], 12)
    close(
        our_logits(prepared.frozen, prepared.spec, *rows), np.asarray(our_logits(unflatten(wide), prepared.spec, *rows))
    )
    optimizer, _ = make_optimizer(OptimizerConfig("adamw", RATE, "constant"), 10, arrays.trainable, arrays.spec)
    step = make_train_step(sft_objective, arrays.spec, Compute(loss_chunk=8), optimizer)
    before = jax.tree.map(np.asarray, prepared.trainable)
    state, losses = init_state(prepared.trainable, optimizer), []
    for _ in range(3):
        state, metrics = step(state, prepared.frozen, batch(), jnp.int32(0))
        losses.append(float(metrics["loss"]))
    assert losses[2] < losses[1] < losses[0]
    for path, adapter in flatten(state.trainable).items():
        assert float(jnp.abs(adapter.b - flatten(before)[path].b).max()) > 0, path


@functools.partial(jax.jit, static_argnums=(1, 3))
def gradient(params: Tree, spec: ModelSpec, arrays: dict[str, jax.Array], compute: Compute) -> Tree:
    def loss(params: Tree) -> jax.Array:
        score = sft_objective(params, spec, compute, {name: array[0] for name, array in arrays.items()}, None)
        return score.loss / score.weight

    return jax.grad(loss)(params)


@every_case
def test_gradients_by_chunks_are_those_of_whole_rows(case: Case):
    """Of two chunks a row; its second document begins in the first one, and recurrences pass their state on."""
    spec, params = load_case(case)
    chunks = dataclasses.replace(PLAIN, remat="full", attention_chunk=8, mlp_chunk=8)
    close_gradients(gradient(params, spec, batch(), chunks), gradient(params, spec, batch(), PLAIN), 5e-5)


@every_case
def test_updates_in_the_backward_pass_are_those_of_the_plain_gradient(case: Case):
    spec, params = load_case(case)
    expected = flatten(gradient(params, spec, batch(), PLAIN))
    prepared = prepare(FullConfig(), spec, params, jax.random.key(0))
    rate = 1024.0  # the sum of a weight near one and of a small gradient would lose the gradient's last digits
    config = OptimizerConfig("sgd", rate, "constant", in_backward=True)
    optimizer, _ = make_optimizer(config, 10, abstract(FullConfig(), spec).trainable, prepared.spec)
    step = make_train_step(sft_objective, prepared.spec, dataclasses.replace(PLAIN, remat="full"), optimizer)
    before = jax.tree.map(np.array, prepared.trainable)
    state, _ = step(init_state(prepared.trainable, optimizer), prepared.frozen, batch(), jnp.int32(0))
    moves = jax.tree.map(lambda old, new: (old - np.asarray(new)) / rate, before, state.trainable)
    close_gradients(moves, unflatten({path: expected[path] for path in flatten(moves)}), 5e-5)


def meshes(case: Case) -> list[dict[str, int]]:
    """Those of the case, or all that the family takes."""
    if case.meshes is not None:
        return [dict(mesh) for mesh in case.meshes]
    family = description(case.text or case.model_type)
    second = [axis for axis in ("tp", "cp", "ep") if axis not in family.limits and (axis != "ep" or family.experts)]
    return [{"fsdp": 2, axis: 2} for axis in second]


@every_case
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_mesh_changes_nothing(case: Case, method: str):
    """Four simulated devices against one, in float64: losses, gradient norms and every trained leaf, within 1e-8."""
    folder = directory(case.changed(vocab_size=case.vocab_on_mesh))
    axes = meshes(case)
    program = [sys.executable, mesh_updates.__file__, str(folder)]
    options = ["full" if method == "full" else json.dumps(case.targets), json.dumps(axes)]
    run = subprocess.run([*program, *options], capture_output=True, text=True, env=os.environ, timeout=1000)
    assert run.returncode == 0, run.stderr[-3000:]
    single, *several = json.loads(run.stdout.splitlines()[-1])
    for mesh, actual in zip(axes, several, strict=True):
        for name, expected in single.items():
            np.testing.assert_allclose(actual[name], expected, rtol=1e-8, err_msg=f"{name} on {mesh}")
