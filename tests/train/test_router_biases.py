"""Correction biases of routers that every update moves by the load of their experts (model.router_bias_update_rate).

DeepSeek V3 of transformers, trained by plain torch, says where they go: after each update, rate x sign(mean - tokens)
of the tokens that it counted in front of its experts, document by document and without padding.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from test_resume import KILLED, live, stories, what_was_learned  # noqa: F401

from families import case, mesh_updates
from families.cases import BY_NAME
from meshtune.adapters.config import FullConfig
from meshtune.adapters.method import abstract, prepare
from meshtune.arrays.tree import flatten
from meshtune.config.recipe import Recipe
from meshtune.errors import UserError
from meshtune.families.balancing import with_bias_update_rate
from meshtune.model.compute import Compute
from meshtune.objectives.sft import sft_objective
from meshtune.optim.build import OptimizerConfig, make_optimizer
from meshtune.setup.coverage import coverage_decisions
from meshtune.setup.start import spec_for_stage
from meshtune.train.step.build import make_train_step
from meshtune.train.step.state import init_state

# A rate that is exact in binary, and at which routes change from update to update.
RATE, UPDATES, SGD = 0.0625, 4, 0.05
LENGTHS = ((9, 17), (20, 5))  # of the documents in each row of an update, padded to 28 tokens
WIDTH, CASE, BIASES = 28, BY_NAME["deepseek_v3"], "layers/1.0/mlp/router/correction"


def documents(update: int) -> list[list[np.ndarray]]:
    """The rows of an update, each two documents of skewed tokens, so that experts are not chosen evenly."""
    rng = np.random.default_rng(update)
    return [[rng.choice(12, length + 1) ** 2 % case.VOCAB for length in row] for row in LENGTHS]


def pack_rows(rows: list[list[np.ndarray]]) -> dict[str, np.ndarray]:
    """[1, 2, WIDTH] arrays of one update."""
    tokens, positions, segments = case.as_inputs([[ids[:-1] for ids in row] for row in rows], WIDTH)
    targets, _, _ = case.as_inputs([[ids[1:] for ids in row] for row in rows], WIDTH)
    arrays = {"tokens": tokens, "targets": targets, "positions": positions, "segment_ids": segments}
    return {name: np.asarray(x)[None] for name, x in arrays.items()} | {
        "weights": np.asarray(segments > 0, np.float32)[None]
    }


class TorchTraining:
    """The model of transformers with its experts counted; `update` makes one update of SGD and moves the biases."""

    def __init__(self, model: torch.nn.Module):
        self.model, self.tokens = model, {}
        self.gates = {
            name: module for name, module in model.named_modules() if hasattr(module, "e_score_correction_bias")
        }
        for name, gate in self.gates.items():
            gate.register_forward_hook(lambda gate, _, routed, name=name: self._count(name, gate, routed[2]))
        self.optimizer = torch.optim.SGD(model.parameters(), lr=SGD)

    def _count(self, name: str, gate: torch.nn.Module, chosen: torch.Tensor) -> None:
        self.tokens[name] = self.tokens.get(name, 0) + torch.bincount(chosen.flatten(), minlength=gate.num_experts)

    def update(self, rows: list[list[np.ndarray]]) -> float:
        self.tokens, total = {}, 0.0
        count = sum(len(ids) - 1 for row in rows for ids in row)
        for ids in (torch.as_tensor(ids) for row in rows for ids in row):
            logits = self.model(ids[None, :-1]).logits[0]
            loss = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum") / count
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for name, gate in self.gates.items():
            tokens = self.tokens[name].float()
            gate.e_score_correction_bias += RATE * torch.sign(tokens.mean() - tokens)
        return total

    @property
    def biases(self) -> np.ndarray:
        return np.stack([gate.e_score_correction_bias.numpy() for gate in self.gates.values()])


def run(micro_batches: int, config: OptimizerConfig, remat: str = "none") -> list[tuple[float, np.ndarray]]:
    """(loss, correction biases [L, E]) of each update of the same model by our step; a last
    update, whose loss is not finite, must leave them unchanged."""
    plain, params = case.load_case(CASE)
    spec = with_bias_update_rate(plain, RATE)
    prepared = prepare(FullConfig(train_router=True), spec, params, jax.random.key(0))
    arrays = abstract(FullConfig(train_router=True), spec)
    assert list(flatten(prepared.buffers)) == list(flatten(arrays.buffers)) == [BIASES]
    assert not flatten(prepared.frozen)
    optimizer, _ = make_optimizer(config, 10, arrays.trainable, arrays.spec)
    step = make_train_step(sft_objective, arrays.spec, Compute(loss_chunk=8, remat=remat), optimizer)
    state, history = init_state(prepared.trainable, optimizer, buffers=prepared.buffers), []
    for update in (*range(UPDATES), None):
        batch = {name: x.reshape(micro_batches, -1, WIDTH) for name, x in pack_rows(documents(update or 0)).items()}
        batch["weights"] = np.where(update is None, np.nan, batch["weights"]).astype("float32")
        state, metrics = step(state, prepared.frozen, jax.tree.map(jnp.asarray, batch), jnp.int32(0))
        history.append((float(metrics["loss"]), np.asarray(flatten(state.buffers)[BIASES])))
    assert not metrics["finite"]
    np.testing.assert_array_equal(history.pop()[1], history[-1][1])
    return history


@pytest.fixture(scope="module")
def expected_history() -> list[tuple[float, np.ndarray]]:
    """The losses and biases of transformers' model."""
    reference, history = TorchTraining(case.torch_model(CASE)), []
    start = reference.biases
    for update in range(UPDATES):
        loss = reference.update(documents(update))
        history.append((loss, reference.biases))
    moves = np.diff([start, *(biases for _, biases in history)], axis=0)
    assert start.shape == (3, 8)
    assert (moves > 0).any()
    assert (moves < 0).any()
    assert any((moves[0] != later).any() for later in moves[1:]), "every update moves the same way"
    return history


PLAIN = {"learning_rate": SGD, "schedule": "constant", "momentum": 0.0}
CASES = {
    "two micro-batches": (2, OptimizerConfig("sgd", **PLAIN), "none"),
    "one micro-batch": (1, OptimizerConfig("sgd", **PLAIN), "none"),
    "in the backward pass": (1, OptimizerConfig("sgd", **PLAIN, in_backward=True), "full"),
}


@pytest.mark.parametrize(
    "name", [next(iter(CASES)), *(pytest.param(name, marks=pytest.mark.slow) for name in list(CASES)[1:])]
)
def test_biases_go_where_the_load_that_transformers_counts_moves_them(name, expected_history):
    """Exactly, however an update is split; losses within 1e-4, which float32 sums in another order keep."""
    for (loss, biases), (our_loss, ours) in zip(expected_history, run(*CASES[name]), strict=True):
        np.testing.assert_array_equal(ours, biases)
        np.testing.assert_allclose(our_loss, loss, rtol=1e-4)


@pytest.mark.slow
def test_a_mesh_changes_nothing():
    """Four simulated devices against one: biases exactly, losses and trained leaves in float64 within 1e-8."""
    meshes = [{"fsdp": 2, "ep": 2}, {"ep": 2, "tp": 2}, {"cp": 2, "ep": 2}, {"dp": 2, "fsdp": 2}]
    folder = case.directory(CASE.changed(vocab_size=CASE.vocab_on_mesh))
    program = [sys.executable, mesh_updates.__file__, str(folder), "full", json.dumps(meshes), f"{RATE}"]
    run = subprocess.run(program, capture_output=True, text=True, env=os.environ, timeout=1000)
    assert run.returncode == 0, run.stderr[-3000:]
    single, *several = json.loads(run.stdout.splitlines()[-1])
    assert len(single["buffers"][0]) == 3
    for mesh, result in zip(meshes, several, strict=True):
        assert result["buffers"] == single["buffers"], mesh
        for name in ("loss", "grad_norm", "trained"):
            np.testing.assert_allclose(result[name], single[name], rtol=1e-8, err_msg=f"{mesh} {name}")


def recipe_of(**sections) -> Recipe:
    fields = {
        "model": {"path": "a", "router_bias_update_rate": 0.001},
        "data": "b.jsonl",
        "output": "c",
        "method": "full",
    }
    return Recipe.model_validate(fields | sections)


def test_what_cannot_have_it_is_refused():
    mixture, dense, biased = (case.load_case(BY_NAME[name])[0] for name in ("mixtral", "llama_tied", "deepseek_v3"))
    with pytest.raises(UserError, match=r"(?s)no router of this mixtral model.*router_aux_loss balances"):
        spec_for_stage(mixture, recipe_of())
    with pytest.raises(UserError, match="no router of this llama model") as error:
        spec_for_stage(dense, recipe_of())
    assert "router_aux_loss" not in str(error.value)
    with pytest.raises(UserError, match="an adapter, which has no place for the correction biases"):
        spec_for_stage(biased, recipe_of(method="lora"))
    moved = spec_for_stage(biased, recipe_of())
    assert moved == with_bias_update_rate(biased, 0.001)
    (line,) = (choice.text for choice in coverage_decisions(FullConfig(), moved) if choice.name == "correction biases")
    assert line.startswith("correction biases: of 8 experts in each of 3 layers (every update moves each by 0.001 ")
    assert not [choice for choice in coverage_decisions(FullConfig(), biased) if choice.name == "correction biases"]


@pytest.fixture
def deepseek(stories260k: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A random DeepSeek V3 with the tokenizer of stories260k."""
    model = shutil.copytree(case.directory(CASE.changed(vocab_size=512)), tmp_path / "deepseek")
    for file in stories260k.glob("tokenizer*"):
        shutil.copy(file, model)
    return model


RECIPE = {
    "method": "full",
    "train": {"steps": 6, "batch_size": 4, "micro_batch": 2},
    "optimizer": {"learning_rate": 0.01},
    "eval": {"every": 3},
    "checkpoint": {"every": 2, "keep": 2},
}


@pytest.mark.slow
def test_biases_are_saved_resumed_and_exported(live, deepseek, tmp_path):  # noqa: F811
    """Killed and resumed is never interrupted, bit for bit; every exported bias has made one step an update."""
    recipe = RECIPE | {"model": {"path": str(deepseek), "router_bias_update_rate": RATE, "router_aux_loss": 0.01}}
    assert live("whole", "never", **recipe) == 0
    assert live("killed", "step:5", **recipe) == KILLED
    assert live("killed", "never", **recipe) == 0
    assert what_was_learned(tmp_path / "killed") == what_was_learned(tmp_path / "whole")
    before, after = (load_file(folder / "model.safetensors") for folder in (deepseek, tmp_path / "whole/model"))
    names = [name for name in after if name.endswith("e_score_correction_bias")]
    assert len(names) == 3
    for name in names:
        assert after[name].dtype == np.float32
        steps = (after[name] - before[name]) / RATE
        np.testing.assert_allclose(steps, np.round(steps), atol=1e-4)
        assert np.abs(steps).max() <= RECIPE["train"]["steps"]
        assert np.abs(steps).max() > 0
