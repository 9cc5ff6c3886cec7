"""What `export` writes is what peft and transformers make of the same files."""

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
    done = export(adapter, tmp_path / "merged", merge=True, base=quickstart.MODEL)
    assert (done.path / "model.safetensors").is_file()


def test_bfloat16_can_be_asked_for(adapter, tmp_path):
    done = export(adapter, tmp_path / "merged", merge=True, dtype="bfloat16")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(done.path, dtype="auto")
    assert {weight.dtype for weight in loaded.parameters()} == {torch.bfloat16}


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
