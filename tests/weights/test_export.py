"""Exports, read again by transformers and the safetensors library."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.merge import merge_adapters
from meshtune.adapters.method import prepare
from meshtune.arrays.tree import flatten, merge, unflatten
from meshtune.errors import UserError
from meshtune.weights import export, verify
from meshtune.weights.export import export_model
from meshtune.weights.load import load_params, load_spec
from meshtune.weights.verify import ExportError, probe, probe_logits, verify_export, written_logits
from model_specs import split_stacks

FAMILIES = ["llama", "llama-tied", "qwen3"]  # every family: tests/families/test_matrix.py


def load_exported(directory: Path, dtype: str | None = None):
    spec, _ = load_spec(directory, dtype)
    return load_params(directory, spec), spec


def reference_logits(directory: Path) -> np.ndarray:
    """Logits of a directory by transformers for the probe, in float32."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = probe(load_spec(directory)[0])[0]
    with torch.no_grad():
        return model(torch.tensor(np.asarray(tokens))).logits.numpy()


def refusal(kind: type[UserError], *arguments, **options) -> str:
    with pytest.raises(kind) as caught:
        export_model(*arguments, **options)
    return str(caught.value)


@jax.jit
def scale_params(params):
    """Parameters as training would leave them: all moved."""
    return jax.tree.map(lambda leaf: leaf * 1.0625, params)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", "bfloat16"),
        ("llama-tied", "float32"),
        ("qwen3", "float32"),
        pytest.param("llama", "float32", marks=pytest.mark.slow),
    ],
)
def test_transformers_computes_what_was_trained(make_model, tmp_path, family, dtype):
    """1e-4 on logits of order 1: the two programs order float32 sums differently."""
    source = make_model(family, dtype)
    params, spec = load_exported(source)
    params = scale_params(params)
    result = export_model(params, spec, source, tmp_path / "out", max_shard_bytes=20_000)
    np.testing.assert_allclose(reference_logits(tmp_path / "out"), probe_logits(params, spec), atol=1e-4, rtol=1e-4)
    assert result.dtype == dtype
    assert result.verified.difference == 0
    assert result.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_an_unchanged_model_comes_back_bit_for_bit(make_model, tmp_path, family):
    source = make_model(family, "bfloat16", max_shard_size=20_000)
    params, spec = load_exported(source)
    export_model(params, spec, source, tmp_path / "out")
    written = load_file(tmp_path / "out/model.safetensors")
    original = {k: v for file in source.glob("*.safetensors") for k, v in load_file(file).items()}
    assert set(written) == set(original)
    assert all(written[name].tobytes() == original[name].tobytes() for name in original)
    np.testing.assert_array_equal(reference_logits(tmp_path / "out"), reference_logits(source))


def test_split_stacks_are_written_as_one_model(make_model, tmp_path):
    source = make_model("llama")
    spec = split_stacks(load_spec(source)[0], 3)
    export_model(load_params(source, spec), spec, source, tmp_path / "out")
    np.testing.assert_array_equal(reference_logits(tmp_path / "out"), reference_logits(source))


def test_shards_are_named_sized_and_indexed_as_transformers_does(make_model, tmp_path):
    source = make_model("llama")
    params, spec = load_exported(source)
    result = export_model(params, spec, source, tmp_path / "out", max_shard_bytes=30_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert list(result.files) == files
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == result.nbytes
    assert index["metadata"]["total_parameters"] * 4 == result.nbytes
    for file in files:
        with safe_open(tmp_path / "out" / file, "np") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert all(index["weight_map"][name] == file for name in opened.keys())  # noqa: SIM118 (no mapping)
            assert sum(opened.get_tensor(name).nbytes for name in opened.keys()) <= 30_000  # noqa: SIM118


def test_the_dtype_is_the_bases_unless_another_is_asked_for(make_model, tmp_path, edit_config):
    source = make_model("llama", "bfloat16")
    params, spec = load_exported(source, "float32")
    assert export_model(params, spec, source, tmp_path / "base").dtype == "bfloat16"
    assert export_model(params, spec, source, tmp_path / "wide", dtype="float32").dtype == "float32"
    half = export_model(scale_params(params), spec, source, tmp_path / "half", dtype="float16")
    assert 0 < half.verified.difference < half.verified.tolerance
    for name, dtype in (("base", "bfloat16"), ("wide", "float32"), ("half", "float16")):
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == dtype
        assert {info.dtype.name for info in load_file(tmp_path / name / "model.safetensors").values()} == {dtype}
    assert "dtype 'int8' cannot be exported" in refusal(UserError, params, spec, source, tmp_path / "x", dtype="int8")


def test_the_configs_other_fields_are_kept(make_model, tmp_path, edit_config):
    source = make_model("llama")
    edit_config(source, torch_dtype="float32", eos_token_id=[1, 2], _name_or_path="somewhere")
    params, spec = load_exported(source)
    export_model(params, spec, source, tmp_path / "out", dtype="bfloat16")
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "out"))
    assert after == before | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}


def test_tokenizer_template_and_licence_travel_and_nothing_that_runs(make_model, tmp_path):
    source = make_model("llama")
    copied = [
        "tokenizer.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
        "LICENSE",
        "generation_config.json",
    ]
    for name in [*copied, "modeling_x.py", "tokenization_x.py", "pytorch_model.bin", "training_args.bin", "README.md"]:
        (source / name).write_text(name)
    (source / "tokenizer_config.json").write_text('{"chat_template": "old", "bos_token": "<s>"}')
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates/tool.jinja").write_text("tool")
    params, spec = load_exported(source)
    out = tmp_path / "out"
    export_model(params, spec, source, out)
    expected = {*copied, "tokenizer_config.json", "additional_chat_templates", "config.json", "model.safetensors"}
    assert {path.name for path in out.iterdir()} == expected
    assert all((out / name).read_text() == name for name in copied)
    export_model(params, spec, source, out, chat_template="mine", overwrite=True)
    assert (out / "chat_template.jinja").read_text() == "mine"
    assert json.loads((out / "tokenizer_config.json").read_text()) == {"bos_token": "<s>"}


def test_a_full_destination_is_refused_unless_overwriting(make_model, tmp_path):
    source = make_model("llama")
    params, spec = load_exported(source)
    out = tmp_path / "out"
    export_model(params, spec, source, out, max_shard_bytes=20_000)
    assert "destination is not empty" in refusal(UserError, params, spec, source, out)
    export_model(params, spec, source, out, overwrite=True)
    assert len(list(out.glob("*.safetensors"))) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "thesis.txt").write_text("years of work")
    assert "notes" in refusal(UserError, params, spec, source, notes, overwrite=True)
    assert (notes / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("place", [".", "inside", ".."])
def test_the_source_is_never_written_over(make_model, place):
    source = make_model("llama")
    params, spec = load_exported(source)
    before = sorted(source.iterdir())
    assert "same folder, or one inside" in refusal(UserError, params, spec, source, source / place, overwrite=True)
    assert sorted(source.iterdir()) == before


def test_a_disk_without_room_is_refused_before_writing(make_model, tmp_path, monkeypatch):
    source = make_model("llama")
    params, spec = load_exported(source)
    usage = export.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(export.shutil, "disk_usage", lambda _: usage._replace(free=50_000))
    message = refusal(UserError, params, spec, source, tmp_path / "new/out")
    assert re.search(r"not enough room on the disk: the export needs 0\.00 GB, 0\.00 GB are free", message)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_leaves_nothing_behind(make_model, tmp_path, monkeypatch):
    source = make_model("llama")
    params, spec = load_exported(source)
    real, written = os.pwrite, []

    def pwrite(descriptor, content, at):
        written.append(len(content))
        if len(written) == 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, content, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    assert "No space left on device" in refusal(UserError, params, spec, source, tmp_path / "out")
    assert len(written) == 20  # nothing more after that
    assert not list(tmp_path.iterdir())


def test_a_shard_size_of_nothing_is_refused(make_model, tmp_path):
    source = make_model("llama")
    params, spec = load_exported(source)
    assert "a shard of 0 bytes" in refusal(UserError, params, spec, source, tmp_path / "out", max_shard_bytes=0)


def spoil(monkeypatch, edit) -> None:
    """Lets `edit` change the folder between writing and verifying, as a bad disk or a defect would."""
    real = verify.verify_export

    def verify_spoilt(params, spec, folder, **options):
        edit(folder)
        return real(params, spec, folder, **options)

    monkeypatch.setattr(export, "verify_export", verify_spoilt)


def flip_a_bit_of(name: str):
    def edit(folder: Path) -> None:
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "np") as opened:
                present = name in opened.keys()  # noqa: SIM118 (no mapping)
            if present:
                from meshtune.weights.safetensors_files import read_header

                info, data = read_header(file)[name], bytearray(file.read_bytes())
                data[info.start + 4 * 32 * 5] ^= 1
                file.write_bytes(data)

    return edit


def test_one_flipped_bit_is_found_and_the_export_not_called_done(make_model, tmp_path, monkeypatch):
    source = make_model("llama")
    params, spec = load_exported(source)
    name = "model.layers.3.mlp.up_proj.weight"
    spoil(monkeypatch, flip_a_bit_of(name))
    message = refusal(ExportError, params, spec, source, tmp_path / "out", max_shard_bytes=20_000)
    assert "not called done" in message
    assert f"tensor '{name}' differs from what was trained: first at row 5" in message
    assert [path.name for path in tmp_path.iterdir()] == ["out.failed-verification"]


@pytest.mark.parametrize(
    ("fields", "phrase"),
    [
        ({"rope_theta": 5.0, "rope_parameters": None}, "theta is 5.0, trained was"),
        ({"num_hidden_layers": 3}, "it has 3 layers, trained were"),
        ({"hidden_act": "gelu"}, "activation is gelu, trained was silu"),
    ],
)
def test_a_config_that_says_something_else_is_found(make_model, tmp_path, monkeypatch, fields, phrase):
    source = make_model("llama")
    params, spec = load_exported(source)

    def edit(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    spoil(monkeypatch, edit)
    message = refusal(ExportError, params, spec, source, tmp_path / "out")
    assert "describes another model" in message
    assert phrase in message


def with_lora(make_model):
    """A model with adapters that are no longer zero, as after training."""
    source = make_model("llama")
    params, spec = load_exported(source)
    config = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "down_proj"))
    prepared = prepare(config, spec, params, jax.random.key(0))
    return source, merge(prepared.frozen, jax.tree.map(lambda leaf: leaf + 0.05, prepared.trainable)), prepared.spec


def test_a_merged_adapter_computes_what_was_trained(make_model, tmp_path):
    source, params, spec = with_lora(make_model)
    expected = probe_logits(params, spec)
    result = export_model(merge_adapters(params), spec, source, tmp_path / "out", expected=expected)
    assert result.verified.difference < 1e-5  # float32: merging reorders sums
    np.testing.assert_allclose(reference_logits(tmp_path / "out"), expected, atol=1e-4, rtol=1e-4)
    assert np.abs(expected - reference_logits(source)).max() > 0.01  # the adapter does something


def test_a_lost_adapter_is_found(make_model, tmp_path):
    """A merge that never visits a module writes exactly the tensors it was given; only the logits tell."""
    source, params, spec = with_lora(make_model)
    expected = probe_logits(params, spec)
    weights = unflatten({path: leaf for path, leaf in flatten(params).items() if not path.endswith("/adapter")})
    message = refusal(ExportError, weights, spec, source, tmp_path / "out", expected=expected)
    assert "the logits of the written model differ from those of what was trained" in message
    assert not (tmp_path / "out").exists()


def test_numbers_that_are_not_finite_are_refused(make_model, tmp_path):
    source = make_model("llama")
    params, spec = load_exported(source)
    params["norm"]["weight"] = params["norm"]["weight"].at[3].set(jnp.nan)
    assert "model.norm.weight' has numbers that are not finite" in refusal(
        UserError, params, spec, source, tmp_path / "out"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_read_layer_by_layer_equal_transformers(make_model, family):
    """1e-4, as float32 sums in another order need."""
    source = make_model(family)
    np.testing.assert_allclose(written_logits(source), reference_logits(source), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_smollm2_comes_back_through_transformers(smollm2, tmp_path):
    """Both in float32 from bfloat16 files; 1e-3 on logits of order 10."""
    params, spec = load_exported(smollm2)
    result = export_model(params, spec, smollm2, tmp_path / "out", max_shard_bytes=100_000_000)
    assert len(result.files) == 3
    assert verify_export(params, spec, tmp_path / "out", dtype="bfloat16").difference == 0
    np.testing.assert_allclose(reference_logits(tmp_path / "out"), probe_logits(params, spec), atol=1e-3, rtol=1e-3)
