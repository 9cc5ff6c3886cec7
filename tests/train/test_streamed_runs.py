"""Full tuning with weights and optimizer state on the host, layer by layer: a run like any other, from file to file."""

from __future__ import annotations

import json
import pathlib
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from meshtune.config.load import load_recipe
from meshtune.errors import UserError
from meshtune.mesh import placement
from meshtune.train.run import train
from meshtune.train.step import host_state as update
from tiny_models import save_model_for_runs

STREAMED = {"offload": ["weights", "optimizer", "residual"]}
# The same sums, compiled as other programs: some 1e-7 of a number an update (see test_offload).
CLOSE = 2e-5


@pytest.fixture(scope="module", autouse=True)
def small_arrays_wait_too():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "MIN_OFFLOAD_BYTES", 1)
        patch.setattr(update, "PIECE", 4 * 64 * 100)  # 520 rows of the embedding by the hundred
        yield


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streamed")
    save_model_for_runs(folder / "model", torch.bfloat16)
    texts = [{"text": f"Once upon a time number {n} went to the park {n % 7} times."} for n in range(60)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in texts))

    def make(output, compute, optimizer, *overrides):
        raw = {
            "model": str(folder / "model"),
            "data": {"train": [{"path": str(folder / "texts.jsonl"), "format": "text"}], "validation": 6},
            "output": str(folder / output),
            "method": "full",
            "train": {"steps": 4, "batch_size": 4},
            "compute": compute,
            "optimizer": {"learning_rate": 1e-3, "eps": 1e-6, "max_grad_norm": None} | optimizer,
            "checkpoint": {"every": 2},
            "eval": {"every": 2},
            "sample": {"prompts": ["Once upon"], "max_tokens": 4},
        }
        raw["data"]["max_length"] = 64
        return load_recipe(raw, overrides)

    return make


def losses(result, kind):
    lines = [json.loads(line) for line in (result.output / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == kind}


@pytest.fixture(scope="module")
def streamed_run(recipe):
    return train(recipe("streamed", STREAMED, {"in_backward": True}))


@pytest.mark.slow
def test_a_streamed_run_is_ordinary_full_tuning(recipe, streamed_run):
    """Trained, evaluated, sampled from, exported (in the base's bfloat16) and verified; from a base in bfloat16."""
    plain = train(recipe("plain", {}, {}))
    for kind in ("train", "eval"):
        ours, theirs = losses(streamed_run, kind), losses(plain, kind)
        assert ours.keys() == theirs.keys()
        np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=CLOSE)
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(str(run.path)).state_dict() for run in (streamed_run, plain)
    ]
    for name, leaf in models[1].items():
        # One rounding to bfloat16 apart at most, where the float32 numbers lie at its edge.
        torch.testing.assert_close(models[0][name].float(), leaf.float(), rtol=2**-7, atol=CLOSE, msg=name)


@pytest.mark.slow
def test_a_streamed_run_goes_on_bit_for_bit(recipe, streamed_run):
    again = recipe("again", STREAMED, {"in_backward": True})
    shutil.copytree(streamed_run.output, again.output)
    shutil.rmtree(pathlib.Path(again.output) / "checkpoints/4")
    shutil.rmtree(pathlib.Path(again.output) / "model")
    resumed = train(recipe("again", STREAMED, {"in_backward": True}, "resume=true"))
    files = [load_file(f"{run.path}/model.safetensors") for run in (resumed, streamed_run)]
    assert files[0].keys() == files[1].keys()
    for name, leaf in files[1].items():
        np.testing.assert_array_equal(files[0][name].view(np.uint16), leaf.view(np.uint16), err_msg=name)
    assert losses(resumed, "train") == losses(streamed_run, "train")


@pytest.mark.parametrize(
    ("compute", "optimizer", "message"),
    [
        (STREAMED, {}, "optimizer.in_backward: true"),
        (STREAMED, {"in_backward": True, "max_grad_norm": 1.0}, "max_grad_norm"),
        (
            STREAMED,
            {"name": "schedule_free", "schedule": "constant", "in_backward": True},
            "an average of all weights",
        ),
    ],
)
def test_what_cannot_be_streamed_is_refused(recipe, compute, optimizer, message):
    with pytest.raises(UserError, match=message):
        recipe("refused", compute, optimizer)
