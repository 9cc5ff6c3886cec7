"""Runs whose residual stream, optimizer state and frozen weights wait in the host's memory: trained, evaluated,
sampled from, interrupted, resumed and exported as any other."""

from __future__ import annotations

import json
import pathlib
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from meshtune.config.load import load_recipe
from meshtune.errors import UserError
from meshtune.mesh import placement
from meshtune.train.run import train
from tiny_models import save_model_for_runs

CHUNKS = {"attention_chunk": 32, "mlp_chunk": 16}
OFFLOAD = {"offload": ["residual", "optimizer", "weights"]}
# See test_offload: some 1e-7 of a number an update.
CLOSE = 2e-5


@pytest.fixture(scope="module", autouse=True)
def small_arrays_wait_too():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "MIN_OFFLOAD_BYTES", 1)
        yield


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("offload")
    save_model_for_runs(folder / "model")
    texts = [{"text": f"Once upon a time number {n} went to the park {n % 7} times."} for n in range(60)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in texts))

    def make(output, compute, *overrides):
        raw = {
            "model": str(folder / "model"),
            "data": {"train": [{"path": str(folder / "texts.jsonl"), "format": "text"}], "validation": 6},
            "output": str(folder / output),
            "method": {"rank": 4},
            "train": {"steps": 4, "batch_size": 4, "micro_batch": 2},
            "compute": compute,
            "optimizer": {"learning_rate": 5e-3},
            "checkpoint": {"every": 2},
            "eval": {"every": 4},
            "sample": {"prompts": ["Once upon"], "max_tokens": 4},
        }
        raw["data"]["max_length"] = 64
        return load_recipe(raw, overrides)

    return make


def events(result, kind):
    lines = [json.loads(line) for line in (result.output / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == kind}


@pytest.fixture(scope="module")
def plain(recipe):
    return train(recipe("plain", {}))


@pytest.fixture(scope="module")
def offloaded_run(recipe):
    return train(recipe("offloaded", CHUNKS | OFFLOAD))


def assert_same(first, second):
    for kind in ("train", "eval"):
        ours, theirs = events(first, kind), events(second, kind)
        assert ours.keys() == theirs.keys()
        np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=CLOSE)
    adapters = [load_file(run.path / "adapter_model.safetensors") for run in (first, second)]
    for name, leaf in adapters[0].items():
        np.testing.assert_allclose(adapters[1][name], leaf, atol=CLOSE * 10, err_msg=name)


@pytest.mark.slow
def test_a_run_with_all_offloaded_is_the_run(plain, offloaded_run):
    assert_same(plain, offloaded_run)


@pytest.mark.slow
def test_a_run_goes_on_from_state_that_waits_on_the_host(recipe, offloaded_run):
    newest = offloaded_run.output / "checkpoints"
    again = recipe("again", CHUNKS | OFFLOAD)
    shutil.copytree(offloaded_run.output, again.output)
    shutil.rmtree(pathlib.Path(again.output) / "checkpoints/4")
    assert (newest / "4").is_dir()
    resumed = train(recipe("again", CHUNKS | OFFLOAD, "resume=true"))
    np.testing.assert_array_equal(
        *(load_file(run.path / "adapter_model.safetensors")["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"]
          for run in (resumed, offloaded_run))
    )  # fmt: skip


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        ({"offload": ["residual"], "remat": "none"}, "remat: none keeps all"),
        ({"offload": ["weights", "weights"]}, "twice"),
        ({"offload": ["gradients"]}, "offload"),
        ({"mlp_chunk": 0}, "mlp_chunk"),
    ],
)
def test_what_cannot_be_is_refused(recipe, compute, message):
    with pytest.raises(UserError, match=message):
        recipe("refused", compute)
