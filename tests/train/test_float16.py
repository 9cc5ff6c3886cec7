"""Training in float16 with a scaled loss follows torch's autocast and GradScaler.

torch's CPU kernels round products to float16 at other places than XLA's (softmax, norms and sums are float32 in both),
so losses agree to 3e-3 relative, which a missing or a wrong scale does not. For the same reason a scale at which the
largest gradient is just beyond float16's range may overflow in one alone: scales agree exactly while they are far too
large, and within one halving afterwards.
"""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers
from optimizer_problems import abstract_of

from meshtune.adapters.peft_format import attach, load_adapter
from meshtune.arrays.tree import split
from meshtune.errors import UserError
from meshtune.model.compute import Compute
from meshtune.objectives.sft import sft_objective
from meshtune.optim.build import OptimizerConfig, make_optimizer
from meshtune.train.step.build import make_train_step
from meshtune.train.step.loss_scale import INTERVAL, next_loss_scale
from meshtune.train.step.state import init_state
from meshtune.weights.load import load_params, load_spec
from tiny_models import same_weights, torch_model

STEPS, LENGTH, RATE = 30, 24, 1e-3


def batches(vocab: int) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    common = rng.integers(5, vocab, 20)
    return [rng.choice(common, (2, LENGTH + 1)) for _ in range(STEPS)]


def torch_run(model, rows, scale: float, rate: float = RATE, **rules) -> tuple[list[float], list[float]]:
    """The losses and the scales after each of torch's updates. `rules` are GradScaler's."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, **rules)
    losses, scales = [], []
    for row in rows:
        ids = torch.tensor(row)
        with torch.autocast("cpu", torch.float16):
            logits = model(ids[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return losses, scales


def our_run(
    spec, trainable, frozen, rows, scale: float, rate: float = RATE
) -> tuple[list[float], list[dict[str, float]]]:
    config = OptimizerConfig(learning_rate=rate, weight_decay=0.0, schedule="constant", warmup_steps=0)
    optimizer, _ = make_optimizer(config, STEPS, abstract_of(trainable))
    compute = Compute(dtype="float16", loss_chunk=64)
    step = make_train_step(sft_objective, spec, compute, optimizer, max_grad_norm=1.0)
    state = init_state(trainable, optimizer, dtype="float16")
    state = dataclasses.replace(state, loss_scale=state.loss_scale | {"scale": jnp.float32(scale)})
    losses, after = [], []
    for row in rows:
        ids = row[None].astype(np.int32)
        shape = ids[..., 1:].shape
        batch = {
            "tokens": ids[..., :-1],
            "targets": ids[..., 1:],
            "positions": np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape),
            "segment_ids": np.ones(shape, np.int32),
            "weights": np.ones(shape, np.float32),
        }
        state, metrics = step(state, frozen, batch, np.int32(0))
        losses.append(float(metrics["loss"]))
        after.append({name: float(metrics[name]) for name in ("loss_scale", "skipped_updates")})
    assert int(state.step) == STEPS
    return losses, after


def both_runs(scale: float):
    model = torch_model("llama_tied")
    spec, params = same_weights(model)
    rows = batches(spec.vocab)
    return our_run(spec, jax.tree.map(jnp.asarray, params), {}, rows, scale), torch_run(model, rows, scale)


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


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_lora_on_smollm2_follows_torch_through_overflows(smollm2, shared, tmp_path, monkeypatch):
    """Losses within 5e-3: thirty layers add up what one rounds elsewhere, and more with every update.

    For the same reason the largest gradient, near the border, overflows in one at a scale at which it does not in the
    other. So the scale jumps over the border (2^14 to 2^17 here) by a factor of 4096 after five good updates, and back
    by as much, instead of creeping up to it: then scales and skipped updates are exactly torch's.
    """
    low, factor, interval, rate = 2.0**10, 4096.0, 5, 3e-4
    for name, value in {"GROWTH": factor, "BACKOFF": 1 / factor, "INTERVAL": interval}.items():
        monkeypatch.setattr(f"meshtune.train.step.loss_scale.{name}", value)
    records = json.loads((shared / "assets/data/llamafactory/alpaca_en_demo.json").read_text())
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    ids = np.array(tokenizer("\n".join(record["output"] for record in records[:10]))["input_ids"])
    rows = [ids[: 6 * 13].reshape(6, 1, 13)[number % 6] for number in range(STEPS)]  # torch takes seconds a row
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float16)
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    model.save_pretrained(tmp_path)
    spec, _ = load_spec(smollm2, "float16")
    spec, params = attach(load_params(smollm2, spec), spec, load_adapter(tmp_path, spec))
    trainable, frozen = split(params, lambda path: path.endswith("/adapter"))
    ours, after = our_run(spec, trainable, frozen, rows, low * factor, rate)
    theirs, scales = torch_run(
        model, rows, low * factor, rate, growth_factor=factor, backoff_factor=1 / factor, growth_interval=interval
    )
    assert [entry["loss_scale"] for entry in after] == scales
    assert after[-1]["skipped_updates"] == scales.count(low) / interval == STEPS / (interval + 1)
    assert np.mean(theirs[-6:]) < 0.9 * np.mean(theirs[:6])
    np.testing.assert_allclose(ours, theirs, rtol=5e-3)


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
    """The result's bytes, and (update, scale, loss) of each update, of a run of the quickstart in float16."""
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
    result = next(file for file in folder.glob("*/*.safetensors")).read_bytes()
    return result, [(step, line.get("loss_scale"), line["loss"]) for step, line in sorted(updates.items())]


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


FULL = ["method=full", "optimizer.learning_rate=1e-4"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "other"),
    [
        ([], ["train.micro_batch=2"]),
        (["data.packing=false"], ["train.micro_batch=2"]),
        ([], ["compute.offload=[weights,residual]"]),
        (FULL, ["compute.offload=[optimizer]"]),
        ([*FULL, "optimizer.name=badam"], ["compute.precision=float32"]),
    ],
    ids=str,
)
def test_other_ways_to_compute_an_update_follow_the_same_losses(tmp_path, overrides, other):
    """Sums of float16 products are rounded in another order, or not at all: 2e-3 of a loss, as beside torch."""
    plain, changed = (
        run_of(tmp_path / name, *keys)[1] for name, keys in (("a", overrides), ("b", [*overrides, *other]))
    )
    np.testing.assert_allclose([loss for *_, loss in changed], [loss for *_, loss in plain], rtol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["nf4", "int8"])
def test_a_quantised_base_trains_in_float16_as_in_float32(tmp_path, weights):
    """2e-3 of a loss, as above; the quickstart's model has rows that no block divides."""
    from meshtune.quickstart import MODEL

    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    config = transformers.AutoConfig.from_pretrained(model)
    config.intermediate_size = 128
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(model)
    plain, changed = (
        run_of(tmp_path / name, f"model={model}", f"quantize={weights}", *keys)[1]
        for name, keys in (("a", []), ("b", ["compute.precision=float32"]))
    )
    np.testing.assert_allclose([loss for *_, loss in changed], [loss for *_, loss in plain], rtol=2e-3)
