"""RUN@best and RUN@STEP are the adapters and models that a run was in the states that its checkpoints keep."""

from __future__ import annotations

import json
import pathlib
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

import meshtune
from meshtune.config.load import load_recipe
from meshtune.errors import UserError
from meshtune.evaluate.run import default_output
from meshtune.quickstart import MODEL
from meshtune.runs.export import export
from meshtune.runs.output import read_run
from meshtune.runs.sources import find, split_state
from meshtune.train.run import train

LESSON = (MODEL.parent / "lesson.jsonl").read_text().splitlines(keepends=True)
RISING = ("optimizer.learning_rate=0.5", "optimizer.warmup_ratio=0.9", "optimizer.schedule=constant")  # gets worse


def run(output: pathlib.Path, *overrides: str) -> pathlib.Path:
    """A run of four updates on a few records, with two to validate on."""
    data = output.parent
    (data / "train.jsonl").write_text("".join(LESSON[:8]))
    (data / "val.jsonl").write_text("".join(LESSON[30:32]))
    fields = {
        "model": str(MODEL),
        "data": {"train": str(data / "train.jsonl"), "validation": [str(data / "val.jsonl")], "max_length": 128},
        "output": str(output),
        "eval": {"every": 1},
        "checkpoint": {"every": 4, "keep": 1},
    }
    train(load_recipe(fields, ["train.steps=4", "train.batch_size=2", *overrides]))
    return output


def losses(folder: pathlib.Path) -> dict[int, float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "eval"}


@pytest.fixture(scope="module")
def worse(tmp_path_factory) -> pathlib.Path:
    """A run whose best state is an early one."""
    return run(tmp_path_factory.mktemp("states") / "run", "method.rank=2", *RISING)


def test_the_best_state_is_exported_and_used_like_a_result(worse, tmp_path):
    measured = losses(worse)
    best = min(measured, key=measured.__getitem__)
    assert best < 4
    exported = export(f"{worse}@best", tmp_path / "best").path
    assert (exported / "adapter_model.safetensors").read_bytes() == weights(worse / f"results/{best}").read_bytes()
    assert find(MODEL, f"{worse}@{best}").adapter == find(worse / f"checkpoints/{best}").adapter
    assert meshtune.load(f"{worse}@best").generate("Once", max_tokens=2)
    assert split_state(f"{worse}@best") == (worse, "best")
    assert default_output(f"{worse}@best", "evaluation", "val.jsonl") == worse / "evaluation/val-best"


@pytest.mark.slow
def test_the_best_state_has_the_best_validation_loss(worse, tmp_path):
    measured = losses(worse)
    again = run(
        tmp_path / "again", f"model.adapter={worse}@best", "method.rank=2", "train.steps=1", "eval.at_start=true"
    )
    assert losses(again)[0] == pytest.approx(min(measured.values()), abs=1e-5)


def test_states_that_are_not_there_list_those_that_are(worse, tmp_path):
    steps = sorted(int(path.name) for path in (worse / "checkpoints").iterdir())
    with pytest.raises(UserError, match="after update 3 is not kept" if 3 not in steps else "no state") as error:
        find(f"{worse}@{3 if 3 not in steps else 'three'}")
    for step in steps:
        assert f"{worse}@{step}" in (error.value.fix or "")
        assert find(f"{worse}@{step}").adapter is not None  # what the message offers works
    with pytest.raises(UserError, match="'last' names no state of a run"):
        find(f"{worse}@last")
    unjudged = tmp_path / "run"
    shutil.copytree(worse, unjudged, ignore=shutil.ignore_patterns("checkpoints", "results"))
    fields = json.loads((unjudged / "run.json").read_text())
    (unjudged / "run.json").write_text(
        json.dumps({name: value for name, value in fields.items() if name not in ("best", "digest")})
    )
    with pytest.raises(UserError, match="no best state: nothing was evaluated") as error:
        find(f"{unjudged}@best")
    assert "keeps no checkpoints" in (error.value.fix or "")


@pytest.mark.slow
def test_a_state_is_written_anew_of_another_checkpoint_and_a_damaged_one_is_named(worse, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(worse, copy)
    (copy / "results").exists() and shutil.rmtree(copy / "results")
    first = find(f"{copy}@4").adapter
    assert first is not None
    state = first.parent / "state.json"
    written = state.stat().st_mtime_ns
    assert find(f"{copy}@4").adapter == first
    assert state.stat().st_mtime_ns == written  # used again
    state.write_text('{"checkpoint": "of an earlier run"}')
    assert find(f"{copy}@4").adapter == first
    assert state.read_text() != '{"checkpoint": "of an earlier run"}'
    file = next((copy / "checkpoints/4/state/d").iterdir())
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    shutil.rmtree(copy / "results")
    with pytest.raises(UserError, match="is damaged"):
        find(f"{copy}@4")


def weights(folder: pathlib.Path) -> pathlib.Path:
    return next(folder.glob("*/*.safetensors"))


KINDS = {
    "dora": ("method.adapter=dora",),
    "rows": ("model.new_special_tokens=['<|one|>', '<|two|>']", "method.rank=2"),
    "pissa": ("method.adapter=pissa", "method.rank=2"),
    "vera": ("method.adapter=vera",),
    "oft": ("method.adapter=oft", "method.oft_block_size=4"),
    "nf4": ("quantize.format=nf4", "method.rank=2"),
    "loftq": ("quantize.format=nf4", "method.adapter=loftq", "method.loftq_iterations=2", "method.rank=2"),
    "loftq, calibrated": ("quantize.format=nf4", "method.adapter=loftq", "method.loftq_calibration=2", "method.rank=2"),
    "modules in full": ("method.train_modules=[lm_head]", "method.rank=2"),
    "full": ("method=full",),
    "full, averaged": ("method=full", "optimizer={name: schedule_free, schedule: constant}"),
    "full, galore": ("method=full", "optimizer={name: galore, rank: 8}"),
    "freeze": ("method=freeze", "method.last_layers=1"),
    "llama_pro": ("method={kind: llama_pro, blocks: 1}",),
    "bfloat16": ("method=full", "compute.precision=bfloat16"),
    "rm": ("stage=rm", "method.rank=2"),
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> pathlib.Path:
    """A model whose matrices are divided by blocks of 64."""
    directory = tmp_path_factory.mktemp("wide")
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, directory)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_last_state_of_every_kind_of_run_is_its_result_byte_for_byte(kind, wide, tmp_path):
    if kind == "rm":
        pairs = [
            {"prompt": "Say hi.", "chosen": "Hi.", "rejected": "No."},
            {"prompt": "And?", "chosen": "Yes.", "rejected": "x"},
        ]
        extra = (f"data.train={tmp_path / 'pairs.jsonl'}", "data.validation=null", "eval.every=null")
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs * 2))
    else:
        extra = ()
    folder = run(tmp_path / "run", f"model.path={wide}", *KINDS[kind], *extra)
    source = find(f"{folder}@4")
    result = folder / read_run(folder)["result"]
    state = source.adapter or source.base
    names = {path.name for path in result.iterdir()} - {"digests.json"}
    assert names == {path.name for path in state.iterdir()} - {"digests.json"}
    differing = [name for name in names if (result / name).read_bytes() != (state / name).read_bytes()]
    if kind == "loftq":  # which records the base that lies beside it
        assert set(differing) == {"adapter_config.json", "adapter_model.safetensors"}
        ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (state, result))
        assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
        bases = (folder / "base", state.parent / "base")
        assert len({(base / "model.safetensors").read_bytes() for base in bases}) == 1
    else:
        assert differing == []


@pytest.mark.slow
def test_the_result_is_the_best_state_where_the_recipe_says_so(tmp_path):
    folder = run(tmp_path / "run", "method.rank=2", *RISING, "checkpoint.result=best")
    fields = read_run(folder)
    assert fields["exported_step"] == fields["best"]["step"] < 4
    best = find(f"{folder}@best").adapter
    assert best is not None
    assert (best / "adapter_model.safetensors").read_bytes() == weights(folder).read_bytes()
    with pytest.raises(UserError, match=r"checkpoint.result: best needs data.validation and eval.every"):
        run(tmp_path / "other", "checkpoint.result=best", "data.validation=null", "eval.every=null")
    with pytest.raises(UserError, match=r"needs checkpoint.keep_best: true"):
        run(tmp_path / "other", "checkpoint.result=best", "checkpoint.keep_best=false")
