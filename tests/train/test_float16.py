"""Training in float16 with a scaled loss follows torch's autocast and GradScaler.

torch's CPU kernels round products to float16 at other places than XLA's (softmax, norms and sums are float32 in both),
so losses agree to 3e-3 relative, which a missing or a wrong scale does not. For the same reason a scale at which the
largest gradient is just beyond float16's range may overflow in one alone: scales agree exactly while they are far too
large, and within one halving afterwards.
"""

from __future__ import annotations

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from optimizer_problems import abstract_of

from meshtune.errors import UserError
from meshtune.model.compute import Compute
from meshtune.objectives.sft import sft_objective
from meshtune.optim.build import OptimizerConfig, make_optimizer
from meshtune.train.step.build import make_train_step
from meshtune.train.step.loss_scale import INTERVAL, next_loss_scale
from meshtune.train.step.state import init_state
from tiny_models import same_weights, torch_model

STEPS, LENGTH, RATE = 30, 24, 1e-3


def batches(vocab: int) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    common = rng.integers(5, vocab, 20)
    return [rng.choice(common, (2, LENGTH + 1)) for _ in range(STEPS)]


def torch_run(model, rows, scale: float) -> tuple[list[float], list[float]]:
    """The losses and the scales after each of torch's updates."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    losses, scales = [], []
    for row in rows:
        ids = torch.tensor(row)
        with torch.autocast("cpu", torch.float16):
            logits = model(ids[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return losses, scales


def our_run(spec, params, rows, scale: float) -> tuple[list[float], list[dict[str, float]]]:
    config = OptimizerConfig(learning_rate=RATE, weight_decay=0.0, schedule="constant", warmup_steps=0)
    optimizer, _ = make_optimizer(config, STEPS, abstract_of(params))
    compute = Compute(dtype="float16", loss_chunk=64)
    step = make_train_step(sft_objective, spec, compute, optimizer, max_grad_norm=1.0)
    state = init_state(params, optimizer, dtype="float16")
    state = dataclasses.replace(state, loss_scale=state.loss_scale | {"scale": jnp.float32(scale)})
    losses, after = [], []
    for row in rows:
        ids = row[None].astype(np.int32)
        batch = {
            "tokens": ids[..., :-1],
            "targets": ids[..., 1:],
            "positions": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), ids[..., 1:].shape),
            "segment_ids": np.ones_like(ids[..., 1:]),
            "weights": np.ones(ids[..., 1:].shape, np.float32),
        }
        state, metrics = step(state, {}, batch, np.int32(0))
        losses.append(float(metrics["loss"]))
        after.append({name: float(metrics[name]) for name in ("loss_scale", "skipped_updates")})
    assert int(state.step) == STEPS
    return losses, after


def both_runs(scale: float):
    model = torch_model("llama_tied")
    spec, params = same_weights(model)
    rows = batches(spec.vocab)
    return our_run(spec, jax.tree.map(jnp.asarray, params), rows, scale), torch_run(model, rows, scale)


def test_losses_are_those_of_torch():
    (ours, after), (theirs, scales) = both_runs(2.0**12)
    assert [entry["loss_scale"] for entry in after] == scales
    assert after[-1]["skipped_updates"] == 0
    assert theirs[-1] < 0.9 * theirs[0]
    np.testing.assert_allclose(ours, theirs, rtol=3e-3)


def test_a_scale_that_is_too_large_is_halved_as_torch_halves_it():
    (ours, after), (theirs, scales) = both_runs(2.0**24)
    far = int(np.log2(2.0**24 / 2.0**18))
    assert [entry["loss_scale"] for entry in after[:far]] == scales[:far]
    np.testing.assert_allclose(ours[:far], theirs[:far], rtol=3e-3)
    assert abs(np.log2(after[-1]["loss_scale"]) - np.log2(scales[-1])) <= 1
    assert ours[-1] < ours[far]


def test_the_scale_is_doubled_after_the_interval_and_halved_at_an_overflow():
    state = {"scale": jnp.float32(8.0), "good": jnp.int32(INTERVAL - 1), "skipped": jnp.int32(0)}
    grown = next_loss_scale(state, jnp.bool_(True))
    assert (float(grown["scale"]), int(grown["good"]), int(grown["skipped"])) == (16.0, 0, 0)
    halved = next_loss_scale(state, jnp.bool_(False))
    assert (float(halved["scale"]), int(halved["good"]), int(halved["skipped"])) == (4.0, 0, 1)


def test_updates_in_the_backward_pass_are_refused():
    spec, params = same_weights(torch_model("llama_tied"))
    optimizer, _ = make_optimizer(OptimizerConfig(in_backward=True), STEPS, abstract_of(params), spec)
    with pytest.raises(UserError, match="overflow in float16"):
        make_train_step(sft_objective, spec, Compute(dtype="float16"), optimizer)


def run_of(folder, *overrides: str):
    """The adapter's bytes and the logged scales of a run of the quickstart in float16."""
    from meshtune import quickstart
    from meshtune.train.report.metrics_log import METRICS, parse_line
    from meshtune.train.run import train

    common = [
        "compute.precision=float16",
        "train.steps=4",
        "eval.every=1000",
        "sample.prompts=[]",
        "checkpoint.every=2",
    ]
    train(quickstart.recipe(folder, *common, *overrides))
    lines = [parse_line(line) for line in (folder / METRICS).read_bytes().splitlines(keepends=True)]
    updates = {line["step"]: line for line in lines if line and line.get("kind") == "train"}
    adapter = next(folder.glob("**/adapter_model.safetensors")).read_bytes()
    return adapter, [(step, line["loss_scale"], line["loss"]) for step, line in sorted(updates.items())]


@pytest.mark.slow
def test_a_run_goes_on_with_the_scale_that_it_had(tmp_path, monkeypatch):
    """The scale grows every two updates here: a scale that began again would be another."""
    monkeypatch.setattr("meshtune.train.step.loss_scale.INTERVAL", 3)
    whole = run_of(tmp_path / "whole")
    assert len({scale for _, scale, _ in whole[1]}) == 2
    stopped = tmp_path / "stopped"
    run_of(stopped)
    for left in [*(stopped / "checkpoints").glob("*4"), stopped / "adapter"]:  # as if killed after the second update
        shutil.rmtree(left)
    assert run_of(stopped, "resume=true") == whole


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [["train.micro_batch=2"], ["data.packing=false"]], ids=str)
def test_other_ways_to_compute_an_update_follow_the_same_losses(tmp_path, overrides):
    """Sums of float16 products are rounded in another order: 2e-3 of a loss, as beside torch."""
    plain = run_of(tmp_path / "plain", *(["data.packing=false"] if "data.packing=false" in overrides else []))
    other = run_of(tmp_path / "other", *overrides)
    np.testing.assert_allclose(
        [loss for *_, loss in other[1]], [loss for *_, loss in plain[1]], rtol=2e-3, err_msg=str(overrides)
    )
