"""`export` writes the weights that peft and transformers make of the same files."""

from __future__ import annotations

import pathlib

import numpy as np
import peft
import pytest
import torch
import transformers

from meshtune import quickstart
from meshtune.errors import UserError
from meshtune.runs.export import export

IDS = torch.arange(3, 203)[None]


def base() -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(quickstart.MODEL)


def logits(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model(IDS).logits.numpy()


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """An adapter that peft made, with random B so that it does something."""
    path = tmp_path_factory.mktemp("made") / "adapter"
    torch.manual_seed(0)
    model = peft.get_peft_model(base(), peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
    model.save_pretrained(path)
    return path


def test_a_merged_adapter_gives_the_logits_of_peft(adapter, tmp_path):
    """1e-4 is the issue's bound; merging adds one rounding of each weight."""
    done = export(adapter, tmp_path / "merged", merge=True, max_shard_bytes=300_000)
    ours = logits(transformers.AutoModelForCausalLM.from_pretrained(done.path))
    theirs = logits(peft.PeftModel.from_pretrained(base(), adapter))
    assert np.abs(theirs - logits(base())).max() > 0.1
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert len(list(done.path.glob("*.safetensors"))) > 2
    transformers.AutoTokenizer.from_pretrained(done.path)


def test_an_adapter_is_copied_whole_and_loads_in_peft(adapter, tmp_path):
    done = export(adapter, tmp_path / "copy")
    copy, original = (logits(peft.PeftModel.from_pretrained(base(), path)) for path in (done.path, adapter))
    np.testing.assert_array_equal(copy, original)


def test_a_moved_base_can_be_named(adapter, tmp_path):
    moved = tmp_path / "moved"
    model = base()
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)  # as far as logits go, another model
    model.save_pretrained(moved)
    transformers.AutoTokenizer.from_pretrained(quickstart.MODEL).save_pretrained(moved)
    done = export(adapter, tmp_path / "merged", merge=True, base=moved, any_base=True)
    ours = logits(transformers.AutoModelForCausalLM.from_pretrained(done.path))
    theirs = logits(peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(moved), adapter))
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_bfloat16_can_be_asked_for(adapter, tmp_path):
    done = export(adapter, tmp_path / "merged", merge=True, dtype="bfloat16")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(done.path, dtype="auto")
    assert {weight.dtype for weight in loaded.parameters()} == {torch.bfloat16}


@pytest.fixture(scope="module")
def bfloat16_base(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The base, rounded to bfloat16."""
    path = tmp_path_factory.mktemp("bfloat16") / "base"
    base().to(torch.bfloat16).save_pretrained(path)
    transformers.AutoTokenizer.from_pretrained(quickstart.MODEL).save_pretrained(path)
    return path


def test_an_adapter_on_a_bfloat16_base_is_merged_in_float32_where_that_is_asked_for(adapter, bfloat16_base, tmp_path):
    """The sum as peft makes it in float32: within its own rounding, and far from what bfloat16 could hold."""
    done = export(adapter, tmp_path / "merged", merge=True, base=bfloat16_base, dtype="float32", any_base=True)
    float32_base = transformers.AutoModelForCausalLM.from_pretrained(bfloat16_base, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(float32_base, adapter).merge_and_unload().state_dict()
    ours = transformers.AutoModelForCausalLM.from_pretrained(done.path, dtype="auto").state_dict()
    for name, weight in theirs.items():
        assert ours[name].dtype == torch.float32
        np.testing.assert_allclose(ours[name].numpy(), weight.numpy(), rtol=1e-6, atol=1e-7, err_msg=name)
    weight = theirs["model.layers.0.self_attn.q_proj.weight"]
    assert not torch.equal(weight, weight.to(torch.bfloat16).float()), "bfloat16 cannot hold this sum"


def test_a_sum_in_another_dtype_is_rounded_once(adapter, bfloat16_base, tmp_path):
    done = export(adapter, tmp_path / "merged", merge=True, base=bfloat16_base, dtype="float16", any_base=True)
    float32_base = transformers.AutoModelForCausalLM.from_pretrained(bfloat16_base, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(float32_base, adapter).merge_and_unload().state_dict()
    ours = transformers.AutoModelForCausalLM.from_pretrained(done.path, dtype="auto").state_dict()
    name = "model.layers.0.mlp.down_proj.weight"
    spacing = torch.finfo(torch.float16).eps * theirs[name].abs() + 1e-7  # one float16 step, half on either side
    assert bool(((ours[name].float() - theirs[name]).abs() <= 0.51 * spacing).all())


def test_what_cannot_be_exported_is_said(adapter, tmp_path):
    with pytest.raises(UserError, match="dtype is for whole models"):
        export(adapter, tmp_path / "x", dtype="bfloat16")
    with pytest.raises(UserError, match="there is no adapter to merge"):
        export(quickstart.MODEL, tmp_path / "x", merge=True)
    with pytest.raises(UserError, match="are the same directory"):
        export(adapter, adapter)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("keep me")
    for merge in (False, True):
        with pytest.raises(UserError, match=r"is not empty|holds"):
            export(adapter, tmp_path / "full", merge=merge)
    with pytest.raises(UserError):
        export(adapter, tmp_path / "full", overwrite=True)  # it is no adapter, so it is not replaced
    assert (tmp_path / "full/mine.txt").read_text() == "keep me"
    assert not (tmp_path / "x").exists()
