"""Models and places that GGUF export refuses, before it writes anything."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest

from families import case
from families.cases import BY_NAME
from gguf_models import model_of, small_model, with_tokenizer
from meshtune.errors import UserError
from meshtune.runs.export import export
from meshtune.weights.hub import locate


def test_a_file_that_is_there_is_not_replaced_unasked(stories260k: Path, tmp_path: Path):
    file = tmp_path / "stories.gguf"
    file.write_bytes(b"mine")
    with pytest.raises(UserError, match="exists already"):
        export(stories260k, file, gguf="F16")
    assert file.read_bytes() == b"mine"
    export(stories260k, file, gguf="F16", overwrite=True)
    assert (tmp_path / "stories.Modelfile").read_text(encoding="utf-8").startswith("FROM ./stories.gguf\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gguf": "Q4_K_S"}, "did you mean 'Q4_K_M'"),
        ({"gguf": "F16", "dtype": "float32"}, "types of its own"),
        ({"gguf": "F16", "merge": True}, "no adapter to merge"),
    ],
)
def test_options_that_do_not_fit_are_refused(stories260k: Path, tmp_path: Path, options: dict, message: str):
    with pytest.raises(UserError, match=message):
        export(stories260k, tmp_path / "x.gguf", **options)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gemma3n", "altup_num_inputs is 3, and llama.cpp computes 4"),
        ("granitemoehybrid", "it has mamba/in/bias"),
        ("deepseek_v3_no_query_latents", "rope_interleave"),
        ("qwen3_5", "linear_key_head_dim and linear_value_head_dim differ"),
    ],
)
def test_a_model_that_llama_cpp_does_not_compute_is_refused(tmp_path: Path, name: str, reason: str):
    with pytest.raises(UserError, match=reason):
        export(small_model(name), tmp_path / "x.gguf", gguf="F16")
    assert list(tmp_path.iterdir()) == []


def test_experts_whose_weights_are_not_normalised_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="norm_topk_prob is False"):
        export(model_of("qwen3_moe", norm_topk_prob=False), tmp_path / "x.gguf", gguf="F16")


def test_a_model_type_that_is_rarely_deployed_is_refused_with_the_way_out(tmp_path: Path):
    with pytest.raises(UserError, match="models of type 'olmo2' are not written as GGUF") as error:
        export(small_model("olmo2"), tmp_path / "x.gguf", gguf="F16")
    assert "convert_hf_to_gguf.py" in (error.value.fix or "")
    export(small_model("olmo2"), tmp_path / "folder")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (tmp_path / "folder").iterdir()
    }


def test_a_file_of_another_architecture_is_refused_with_the_way_out(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "olmo2")
    writer.add_tensor("token_embd.weight", np.ones((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"llama\.cpp's architecture 'olmo2' are not read from GGUF") as error:
        locate(tmp_path / "x.gguf")
    assert "Hugging Face repository" in (error.value.fix or "")


def test_a_vocabulary_larger_than_the_embedding_is_refused(tmp_path: Path):
    directory = case.directory(BY_NAME["llama_tied"].changed(vocab_size=90))
    with_tokenizer(directory, 97)
    with pytest.raises(UserError, match="ids up to 96, and the model's embedding has 90 rows"):
        export(directory, tmp_path / "x.gguf", gguf="F16")


def test_an_unknown_pre_tokenizer_is_refused_both_ways(tmp_path: Path):
    from meshtune.weights.gguf.tokenizer import tokenizer_files

    directory = case.directory(BY_NAME["llama_tied"].changed(rms_norm_eps=2e-5))
    with_tokenizer(directory, 97)
    content = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    split = {"type": "Split", "pattern": {"Regex": "[A-Z]+"}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, content["pre_tokenizer"]]}
    (directory / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UserError, match="no name that is known"):
        export(directory, tmp_path / "x.gguf", gguf="F16")
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen-2", "tokenizer.ggml.tokens": ["a"]}
    with pytest.raises(UserError, match=r"says tokenizer\.ggml\.pre is 'qwen-2'"):
        tokenizer_files(metadata, "x.gguf")


def test_a_head_of_its_own_is_refused_where_llama_cpp_has_the_embedding(tmp_path: Path):
    with pytest.raises(UserError, match="its head is not its embedding"):
        export(model_of("gemma", tie_word_embeddings=False), tmp_path / "x.gguf", gguf="F16")


def test_a_destination_that_is_a_folder_or_has_another_name_is_refused(stories260k: Path, tmp_path: Path):
    with pytest.raises(UserError, match="--to is a folder, and a GGUF model is one file") as error:
        export(stories260k, tmp_path, gguf="F16")
    assert str(tmp_path / "model.gguf") in (error.value.fix or "")
    with pytest.raises(UserError, match=r"'model' does not end in \.gguf"):
        export(stories260k, tmp_path / "model", gguf="F16")
    with pytest.raises(UserError, match="is the name of a GGUF file, and this writes a folder") as error:
        export(stories260k, tmp_path / "model.gguf")
    assert "--gguf" in (error.value.fix or "")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_found_before_writing(
    stories260k: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=500_000))
    with pytest.raises(UserError, match=r"the export needs 0\.00 GB"):
        export(stories260k, tmp_path / "model.gguf", gguf="F32")
    assert list(tmp_path.iterdir()) == []


def test_folders_are_made(stories260k: Path, tmp_path: Path):
    export(stories260k, tmp_path / "new/folder/model.gguf", gguf="Q8_0")
    assert sorted(path.name for path in (tmp_path / "new/folder").iterdir()) == ["model.Modelfile", "model.gguf"]
