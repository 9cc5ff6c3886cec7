"""Whole runs with optimizers that step differently: stopped in the middle and gone on with, they end the same."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from meshtune.config.load import load_recipe
from meshtune.train.run import train

CASES = {
    "badam": ["method=full", "optimizer.name=badam", "optimizer.switch_every=2", "train.micro_batch=2"],
    "fused": ["method=full", "optimizer.name=adamw8bit", "optimizer.in_backward=true", "optimizer.max_grad_norm=null"],
    "galore": ["method=full", "optimizer.name=galore", "optimizer.rank=8", "optimizer.update_gap=3"],
    "rounded": ["method=full", "compute.precision=bfloat16", "optimizer.stochastic_rounding=true"],
    "schedule_free": ["optimizer.name=schedule_free"],
    "prodigy": ["optimizer.name=prodigy", "optimizer.learning_rate=1"],
    "sophia": ["optimizer.name=sophia", "optimizer.curvature_every=2", "train.micro_batch=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_run_gone_on_with_equals_one_that_never_stopped(name, stories260k, tmp_path, monkeypatch):
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "lesson.jsonl"
    data.write_text("".join(json.dumps({"text": f"Tom had {n} red hats. They were his."}) + "\n" for n in range(20)))

    def run(output, steps, *overrides):
        fields = {
            "model": str(stories260k),
            "data": {"train": str(data), "max_length": 64},
            "output": str(tmp_path / output),
            "train": {"steps": steps, "batch_size": 4},
            "optimizer": {"learning_rate": 0.01, "schedule": "constant", "warmup_steps": 0},
        }
        return train(load_recipe(fields, [*CASES[name], *overrides]))

    def written_tensors(result):
        files = sorted(result.path.glob("*.safetensors"))
        return {key: value for file in files for key, value in load_file(file).items()}

    full = run("whole", 6)
    run("parts", 3)
    parts = run("parts", 6, "resume=true")
    assert parts.loss == full.loss
    expected, actual = written_tensors(full), written_tensors(parts)
    assert expected
    for key, value in expected.items():
        np.testing.assert_array_equal(actual[key], value, err_msg=key)
