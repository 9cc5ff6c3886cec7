"""Runs with every kind of adapter: trained, stopped and resumed, exported, merged, and used by peft."""

from __future__ import annotations

import json
import shutil
import warnings

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import load_file

import meshtune
from meshtune.config.load import load_recipe
from meshtune.errors import UserError
from meshtune.runs.export import export
from meshtune.train.run import train
from tiny_models import save_model_for_runs, write_texts_for_runs

TOKENS = [[1, 5, 9, 22, 7, 8, 300]]
RUNS = {
    "dora": ["method.rank=4", "method.dropout=0.1", "quantize=nf4"],
    "pissa": ["method.rank=4", "method.rslora=true"],
    "loftq": ["method.rank=4", "quantize=int8"],
    "loftq measured": ["method.rank=4", "quantize=nf4", "method.loftq_calibration=6"],
    "loftq in turns": ["method.rank=4", "quantize=nf4", "method.loftq_iterations=3"],
    "oft": ["method.oft_block_size=16", "quantize=nf4"],
    "vera": ["method.rank=16", "method.vera_key=5", "optimizer.learning_rate=0.1"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model_for_runs(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts_for_runs(tmp_path_factory.mktemp("texts") / "texts.jsonl")


def recipe(model, texts, output, *overrides):
    raw = {
        "model": str(model),
        "data": {"train": [{"path": str(texts), "format": "text"}], "max_length": 64},
        "output": str(output),
        "train": {"steps": 4, "batch_size": 4},
        "compute": {"attention": "direct"},
        "optimizer": {"learning_rate": 5e-3},
        "checkpoint": {"every": 2},
    }
    return load_recipe(raw, overrides)


def losses(output):
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_learns_resumes_and_is_used_elsewhere(name, model, texts, tmp_path):
    """Logits to 2e-5 of the largest: float32 in three programs."""
    options = [f"method.adapter={name.split()[0]}", *RUNS[name]]
    full, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert train(recipe(model, texts, full, *options)).steps == 4
    history = losses(full)
    assert history[4] < history[1]
    shutil.copytree(full, stopped)
    for left in [*(stopped / "checkpoints").glob("*4"), stopped / "adapter"]:  # as if killed after the second update
        shutil.rmtree(left)
    train(recipe(model, texts, stopped, *options, "resume=true"))
    assert losses(stopped) == history
    ours, theirs = (load_file(run / "adapter/adapter_model.safetensors") for run in (full, stopped))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[tensor], theirs[tensor]) for tensor in ours)

    trained = meshtune.load(full).logits(TOKENS)
    tolerance = 2e-5 * np.abs(trained).max()
    export(full, tmp_path / "merged", merge=True)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        np.testing.assert_allclose(merged(torch.tensor(TOKENS)).logits.numpy(), trained, atol=tolerance)
    if "quantize=nf4" in options and "in turns" not in name:
        return  # on the quantised base: see tests/adapters/test_kinds.py
    base = transformers.AutoModelForCausalLM.from_pretrained(full / "base" if "in turns" in name else model)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        actual = peft.PeftModel.from_pretrained(base, str(full / "adapter"))(torch.tensor(TOKENS)).logits.numpy()
    if "int8" in str(options):
        trained = meshtune.load(full, quantize="none").logits(TOKENS)
    np.testing.assert_allclose(actual, trained, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dora", "pissa", "loftq in turns", "vera"])
def test_weights_may_wait_on_the_host(name, model, texts, tmp_path):
    """Also those that an adapter takes apart when it begins. The same program but for transfers: 1e-5 of the loss."""
    options = [f"method.adapter={name.split()[0]}", *RUNS[name], "train.steps=2"]
    train(recipe(model, texts, tmp_path / "here", *options))
    train(recipe(model, texts, tmp_path / "there", *options, "compute.offload=[weights]", "compute.remat=full"))
    on_device, on_host = (losses(tmp_path / where) for where in ("here", "there"))
    assert on_host == pytest.approx(on_device, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message", "fix"),
    [
        (["method.adapter=pissa", "quantize=nf4"], "pissa decomposes the base's weights", "loftq with quantize"),
        (["method.adapter=loftq"], "the error of quantising the base", "add quantize: nf4"),
        (["method.adapter=oft", "method.oft_block_size=48"], "do not divide those of", "give 32"),
        (["method.adapter=oft", "method.dropout=0.1"], "dropout is 0.1", "leave it out"),
        (["method.adapter=vera", "method.rank=33"], "rank 33 is above what", "at most 32"),
        (["method.adapter=vera", "method.alpha=8"], "alpha is 8.0", "leave it out"),
        (["method.oft_block_size=16"], "oft_block_size is 16", "method.adapter: oft"),
        (["method.adapter=pissa", "method.pissa_convert=false"], "decomposes the base again", "svd_iterations to null"),
        (["method.adapter=dora", "method.rank=65"], "rank 65 is above", "at most 64"),
        (["method.adapter=dorra"], "dorra", "dora"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(options, message, fix, model, texts, tmp_path):
    with pytest.raises(UserError) as caught:
        train(recipe(model, texts, tmp_path / "run", *options))
    assert message in str(caught.value)
    assert fix in str(caught.value)
    assert not (tmp_path / "run").exists()
