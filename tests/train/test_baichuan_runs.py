"""Runs on Baichuan2: from its own files and data to a merged model in the original's form, and a fused full step."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from test_step import documents, micro, pack
from test_walked_steps import run

import meshtune
from baichuan_files import directory, train_tokenizer
from baichuan_in_torch import SEVEN, THIRTEEN, Baichuan
from meshtune.config.load import load_recipe
from meshtune.mesh import placement
from meshtune.optim.build import OptimizerConfig
from meshtune.runs.export import export
from meshtune.train.run import train
from meshtune.weights.load import load_params, load_spec

SIZE = {"vocab_size": 640, "max_position_embeddings": 256}
TURNS = [
    {"from": "human", "value": "How many times?"},
    {"from": "gpt", "value": "1234 times."},
    {"from": "human", "value": "a girl"},
    {"from": "gpt", "value": "went to the park"},
]


@pytest.mark.slow
@pytest.mark.parametrize("size", ["7B", "13B"])
def test_a_run_ends_in_a_model_of_the_originals_form(tmp_path, size):
    """torch generates greedily from the merged files the tokens that base and adapter give here."""
    config = (SEVEN | SIZE) if size == "7B" else (THIRTEEN | SIZE | {"max_position_embeddings": None})
    config = {name: value for name, value in config.items() if value is not None}
    folder, _ = directory(tmp_path, config)
    train_tokenizer(folder)
    records = [{"id": str(n), "conversations": TURNS[: 2 + 2 * (n % 2)]} for n in range(24)]
    (tmp_path / "chat.json").write_text(json.dumps(records))
    raw = {
        "model": str(folder),
        "data": {"train": str(tmp_path / "chat.json"), "max_length": 64},
        "output": str(tmp_path / "run"),
        "method": {"rank": 4, "train_modules": ["lm_head"]},
        "train": {"steps": 4, "batch_size": 2},
        "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
    }
    train(load_recipe(raw, []))
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert losses[-1] < losses[0]
    export(tmp_path / "run", tmp_path / "merged", merge=True)
    tensors = load_file(tmp_path / "merged/model.safetensors")
    assert tensors["model.layers.0.self_attn.W_pack.weight"].shape == (3 * config["hidden_size"], config["hidden_size"])
    assert np.ptp(np.linalg.norm(tensors["lm_head.weight"], axis=1)) > 1  # the head's rows are as long as they were
    model = Baichuan(config)
    model.load_state_dict({name: torch.tensor(tensor) for name, tensor in tensors.items()})
    tuned = meshtune.load(tmp_path / "run")
    prompt = tuned.tokenizer("a girl", add_special_tokens=False)["input_ids"]
    text = list(prompt)
    with torch.no_grad():
        for _ in range(6):
            if text[-1] != tuned.tokenizer.eos_token_id:
                text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    assert tuned.engine.generate([prompt], max_tokens=6)[0] == text[len(prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize("offload", [(), ("weights", "optimizer", "residual")], ids=["here", "host"])
def test_a_fused_full_update_equals_one_with_all_gradients_at_hand(tmp_path, offload, monkeypatch):
    """Through the layers gone through by hand, and the head's division. Adam turns rounding into some 1e-5: 2e-5."""
    monkeypatch.setattr(placement, "MIN_OFFLOAD_BYTES", 1)
    folder, _ = directory(tmp_path, SEVEN)
    spec, _ = load_spec(folder)
    tiny = spec, load_params(folder, spec)
    batches = [micro(pack([[d] for d in documents(4, seed)], 16), 1) for seed in range(3)]
    config = OptimizerConfig("adamw", 1e-2, "constant", weight_decay=0.1, eps=1e-4)
    usual = run(tiny, batches, config)
    fused = run(tiny, batches, dataclasses.replace(config, in_backward=True), offload=offload)
    for expected, actual in zip(usual[0], fused[0], strict=True):
        assert expected == pytest.approx(actual, rel=1e-4)
    for path, leaf in usual[1].items():
        np.testing.assert_allclose(fused[1][path], leaf, rtol=0, atol=2e-5, err_msg=path)
