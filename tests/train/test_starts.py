"""Runs that do not start from a model as published: more layers, more tokens, adapters folded in or gone on with.

A run writes its start as a model directory (base/), which transformers reads; what comes out is compared with
transformers and peft. Tolerance 2e-4 on float32 logits of size ~10: the libraries sum in different orders.
"""

from __future__ import annotations

import io
import json
import pathlib

import numpy as np
import peft
import pytest
import torch
import transformers
from rich.console import Console
from safetensors.numpy import load_file

from meshtune.config.load import load_recipe
from meshtune.data.tokenizer import tokenizer_of
from meshtune.errors import UserError
from meshtune.generate.api import load
from meshtune.mesh.processes import SINGLE_PROCESS
from meshtune.setup.materialize import materialize_start
from meshtune.setup.start import start_of
from meshtune.train.result.final import Result
from meshtune.train.run import train
from meshtune.weights.load import load_spec
from tiny_models import torch_model

TOKENS = np.random.default_rng(0).integers(3, 512, (2, 12))
TOLERANCE = 2e-4


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHTUNE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def lesson(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("data") / "lesson.jsonl"
    texts = [f"<call>{name}</call> had a red {thing}." for name in ("Tom", "Lily", "Ben") for thing in ("hat", "kite")]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def run(source, data, output, /, *overrides: str, steps: int = 2, **fields) -> Result:
    config = {
        "data": {"train": str(data), "max_length": 32},
        "output": str(output),
        "train": {"steps": steps, "batch_size": 2},
        "optimizer": {"learning_rate": 0.02, "schedule": "constant", "warmup_steps": 0},
        "checkpoint": {"every": 1},
        "mesh": {},
        "model": {"path": str(source)},
    }
    for key, value in fields.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) and key in config else value
    return train(load_recipe(config, overrides), console=Console(file=io.StringIO(), width=200))


def logits(directory: pathlib.Path, adapter: pathlib.Path | None = None, tokens=TOKENS) -> np.ndarray:
    """Logits of a directory by transformers, with peft."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, str(adapter)).eval()
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.numpy()


def ours(path: pathlib.Path, tokens=TOKENS) -> np.ndarray:
    """Logits by Meshtune of a run, or of a model or adapter."""
    from twins import forward

    model = load(str(path))
    return np.asarray(forward(model.params, model.spec, model.compute, tokens.astype(np.int32)))


def tensors(directory: pathlib.Path) -> dict[str, np.ndarray]:
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("name", ["llama_bias", "qwen2_window", "qwen3_bias_window"])
def test_a_deeper_model_gives_its_bases_logits(name, stories260k, tmp_path):
    """Exactly, in transformers: a new layer adds zero."""
    torch_model(name).save_pretrained(tmp_path / "base")
    base_model = {"path": str(tmp_path / "base"), "tokenizer": str(stories260k)}
    start = made_start(tmp_path / "base", tmp_path, model=base_model, method={"kind": "llama_pro", "blocks": 2})
    assert load_spec(start)[0].layers == 6
    tokens = TOKENS % 97
    np.testing.assert_array_equal(logits(start, None, tokens), logits(tmp_path / "base", None, tokens))


@pytest.mark.slow
def test_new_layers_add_nothing_until_they_are_trained(stories260k, lesson, tmp_path):
    result = run(stories260k, lesson, tmp_path / "run", method={"kind": "llama_pro", "blocks": 5})
    base, start, end = (tensors(path) for path in (stories260k, tmp_path / "run/base", tmp_path / "run/model"))
    assert json.loads((tmp_path / "run/model/config.json").read_text())["num_hidden_layers"] == 10
    # Each layer of the base is layer 2n of the deeper model, bit for bit, before and after; 2n + 1 alone is trained.
    for name, value in base.items():
        parts = name.split(".layers.")
        number = parts[1].split(".")[0] if len(parts) == 2 else None
        moved_name = name if number is None else name.replace(f".layers.{number}.", f".layers.{2 * int(number)}.")
        if moved_name not in start:
            assert name == "lm_head.weight"
            continue
        np.testing.assert_array_equal(start[moved_name], value)
        np.testing.assert_array_equal(end[moved_name], value)
        if number is not None:
            new = name.replace(f".layers.{number}.", f".layers.{2 * int(number) + 1}.")
            silent = "o_proj" in name or "down_proj" in name
            np.testing.assert_array_equal(start[new], np.zeros_like(value) if silent else value)
    changed = {name for name in end if not np.array_equal(end[name], start[name])}
    assert {int(name.split(".layers.")[1].split(".")[0]) for name in changed} == {1, 3, 5, 7, 9}
    np.testing.assert_array_equal(logits(tmp_path / "run/base"), logits(stories260k))
    np.testing.assert_array_equal(ours(tmp_path / "run/base"), ours(stories260k))
    trained = logits(result.path)
    assert np.abs(trained - logits(stories260k)).max() > 0.01
    assert np.abs(trained - ours(tmp_path / "run")).max() < TOLERANCE
    with pytest.raises(UserError, match="give one of 1, 5"):
        run(stories260k, lesson, tmp_path / "uneven", method={"kind": "llama_pro", "blocks": 2})


@pytest.fixture(scope="module")
def small(stories260k, tmp_path_factory) -> pathlib.Path:
    """A random model whose rows divide into blocks, with the tokenizer of the other."""
    where = tmp_path_factory.mktemp("small")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=512, num_key_value_heads=2, max_position_embeddings=64, **sizes)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(where)
    transformers.AutoTokenizer.from_pretrained(stories260k).save_pretrained(where)
    return where


NF4 = {"format": "nf4", "block_size": 32}


@pytest.mark.slow
def test_new_layers_beside_layers_in_few_bits(small, lesson, tmp_path):
    """Old layers are codes while the new ones are trained; the written model holds the dequantised numbers."""
    result = run(small, lesson, tmp_path / "run", method={"kind": "llama_pro", "blocks": 2}, quantize=NF4)
    assert np.abs(logits(result.path) - ours(result.path)).max() < TOLERANCE
    end, start = tensors(result.path), tensors(tmp_path / "run/base")
    name = "model.layers.{}.self_attn.q_proj.weight"
    old, new = ({"a": end[name.format(n)], "b": start[name.format(n)]} for n in (0, 1))
    assert 0 < np.abs(old["a"] - old["b"]).max() < 0.2 * np.abs(old["b"]).max()
    moved = np.abs(new["a"] - new["b"])
    assert moved.max() < 0.05  # two updates of 0.02, and no codes


NEW = {"new_tokens": ["<call>"], "new_special_tokens": ["</call>"], "pad_vocab_to": 8}


def made_start(source: pathlib.Path, output: pathlib.Path, /, **fields) -> pathlib.Path:
    """The start of a recipe, written without a run."""
    recipe = load_recipe({"data": "d", "output": "o", **fields})
    start = start_of(recipe, source, "float32")
    return materialize_start(
        start, recipe, output, tokenizer_of(recipe.model, source)[0], "sha256:0", SINGLE_PROCESS, print
    )


def test_new_tokens_begin_as_the_mean_of_their_pieces(stories260k, tmp_path):
    base = made_start(stories260k, tmp_path, model={"path": str(stories260k), **NEW})
    assert json.loads((base / "config.json").read_text())["vocab_size"] == 520
    # New rows begin as the mean of the pieces that the text was before.
    old = transformers.AutoTokenizer.from_pretrained(stories260k)
    table, before = (tensors(path)["model.embed_tokens.weight"] for path in (base, stories260k))
    np.testing.assert_array_equal(table[:512], before)
    for number, token in ((512, "<call>"), (513, "</call>")):
        pieces = old(token, add_special_tokens=False).input_ids
        np.testing.assert_allclose(table[number], before[pieces].mean(0), atol=1e-6)
    np.testing.assert_allclose(table[514:], np.tile(before.mean(0), (6, 1)), atol=1e-6)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    assert tokenizer.convert_tokens_to_ids(["<call>", "</call>"]) == [512, 513]
    np.testing.assert_allclose(logits(base)[..., :512], logits(stories260k), atol=1e-5)  # a larger product's rounding


@pytest.mark.slow
def test_rows_of_new_tokens_are_trained_alone(stories260k, lesson, tmp_path):
    result = run(stories260k, lesson, tmp_path / "run", model=NEW)
    base, fields = tmp_path / "run/base", json.loads((result.path / "adapter_config.json").read_text())
    config = json.loads((base / "config.json").read_text())
    assert config["vocab_size"] == 520
    tokenizer = transformers.AutoTokenizer.from_pretrained(result.path)
    assert tokenizer.convert_tokens_to_ids(["<call>", "</call>"]) == [512, 513]
    assert tokenizer.decode(tokenizer("<call>Tom</call>").input_ids, skip_special_tokens=True).strip() == "<call>Tom"
    indices = fields["trainable_token_indices"]
    assert indices["embed_tokens"] == list(range(512, 520))
    tokens = np.concatenate([TOKENS, np.array([[512, 5, 6, 513, 512, 7, 8, 9, 10, 513, 11, 12]])])
    actual = ours(tmp_path / "run", tokens)
    assert actual.shape[-1] == 520
    assert np.abs(logits(base, result.path, tokens) - actual).max() < TOLERANCE
    assert np.abs(logits(base, None, tokens) - actual).max() > 0.01
    # Somebody who enlarges the original, with whatever start, and puts the adapter on it has the same model.
    model = transformers.AutoModelForCausalLM.from_pretrained(stories260k, dtype=torch.float32)
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=8)
    model = peft.PeftModel.from_pretrained(model, str(result.path)).eval()
    with torch.no_grad():
        assert np.abs(model(torch.from_numpy(tokens)).logits.numpy() - actual).max() < TOLERANCE
    from meshtune.runs.export import export

    export(tmp_path / "run", tmp_path / "merged", merge=True)
    assert np.abs(logits(tmp_path / "merged", None, tokens) - actual).max() < TOLERANCE
    merged = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert merged.convert_tokens_to_ids("</call>") == 513


@pytest.mark.slow
@pytest.mark.parametrize("method", [{"kind": "full"}, {"kind": "lora", "train_modules": ["embed_tokens"]}])
def test_whole_embeddings_are_trained_with_new_tokens(method, stories260k, lesson, tmp_path):
    result = run(stories260k, lesson, tmp_path / "run", model=NEW, method=method)
    base = result.path if method["kind"] == "full" else tmp_path / "run/base"
    actual = logits(base, None if method["kind"] == "full" else result.path)
    assert actual.shape[-1] == 520
    assert np.abs(actual - ours(tmp_path / "run")).max() < TOLERANCE


def test_new_tokens_that_cannot_be_are_refused(stories260k, lesson, tmp_path):
    for tokens, reason in ((["<s>"], "is a token already"), (["<x>", "<x>"], "given twice"), ([" "], "not blank")):
        with pytest.raises(UserError, match=reason):
            run(stories260k, lesson, tmp_path / "run", model={"new_tokens": tokens})
    frozen = {"kind": "freeze", "last_layers": 1}
    with pytest.raises(UserError, match="would not train the embeddings"):
        run(stories260k, lesson, tmp_path / "run", model={"new_tokens": ["<x>"]}, method=frozen)


@pytest.fixture(scope="module")
def first(stories260k, lesson, tmp_path_factory) -> pathlib.Path:
    """A run whose adapter others start from."""
    output = tmp_path_factory.mktemp("first") / "run"
    run(stories260k, lesson, output, method={"rank": 4, "alpha": 6, "targets": ["q_proj", "down_proj"]})
    return output


@pytest.mark.slow
def test_an_adapter_is_gone_on_with(first, stories260k, lesson, tmp_path):
    before = {name: value.copy() for name, value in tensors(first / "adapter").items()}
    result = run(stories260k, lesson, tmp_path / "run", model={"adapter": str(first)}, steps=3)
    config = json.loads((result.path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 6, ["down_proj", "q_proj"])
    after = tensors(result.path)
    assert after.keys() == before.keys()
    assert all(not np.array_equal(after[name], value) for name, value in before.items())
    assert np.abs(logits(stories260k, result.path) - ours(tmp_path / "run")).max() < TOLERANCE
    for name, value in tensors(first / "adapter").items():
        np.testing.assert_array_equal(value, before[name])
    # It begins where the first ended: the loss of its first update is that of the first run's model, not of the base's.
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    began = [json.loads(line)["loss"] for line in (first / "metrics.jsonl").read_text().splitlines()]
    assert losses[0] < began[0] - 0.2
    # Stopped after two updates and resumed, bit for bit.
    again = tmp_path / "again"
    run(stories260k, lesson, again, model={"adapter": str(first)}, steps=2)
    run(stories260k, lesson, again, "resume=true", model={"adapter": str(first)}, steps=3)
    for name, value in tensors(again / "adapter").items():
        np.testing.assert_array_equal(value, after[name])


@pytest.mark.slow
def test_an_adapter_of_something_else_is_refused(first, stories260k, lesson, tmp_path):
    of_another_base = tmp_path / "other"
    model = transformers.AutoModelForCausalLM.from_pretrained(stories260k, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight += 0.1
    model.save_pretrained(of_another_base)
    transformers.AutoTokenizer.from_pretrained(stories260k).save_pretrained(of_another_base)
    for key, value in (("adapter", str(first)), ("merge_adapters", [str(first / "adapter")])):
        with pytest.raises(UserError, match="trained on another base"):
            run(of_another_base, lesson, tmp_path / f"run-{key}", model={key: value})
    run(of_another_base, lesson, tmp_path / "said", model={"adapter": str(first), "any_base": True}, steps=1)
    with pytest.raises(UserError, match="rank is 16, and the adapter to go on with has 4"):
        run(stories260k, lesson, tmp_path / "run", model={"adapter": str(first)}, method={"rank": 16})
    with pytest.raises(UserError, match="method full trains none"):
        run(stories260k, lesson, tmp_path / "run", model={"adapter": str(first)}, method={"kind": "full"})


@pytest.mark.slow
def test_an_adapter_of_codes_is_gone_on_with_on_the_same_codes(small, lesson, tmp_path):
    run(small, lesson, tmp_path / "first", quantize=NF4)
    with pytest.raises(UserError, match="this run has a base as it is"):
        run(small, lesson, tmp_path / "run", model={"adapter": str(tmp_path / "first")})
    fields = {"model": {"adapter": str(tmp_path / "first")}, "method": {"dropout": 0.1}}
    result = run(small, lesson, tmp_path / "run", quantize=NF4, **fields)
    assert tensors(result.path).keys() == tensors(tmp_path / "first/adapter").keys()


@pytest.mark.slow
def test_adapters_are_folded_in_first(first, stories260k, lesson, tmp_path):
    result = run(stories260k, lesson, tmp_path / "run", model={"merge_adapters": [str(first)]}, steps=1)
    base = tmp_path / "run/base"
    assert np.abs(logits(base) - ours(first)).max() < TOLERANCE
    assert np.abs(logits(base, result.path) - ours(tmp_path / "run")).max() < TOLERANCE
    named = json.loads((result.path / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert pathlib.Path(named) == base


@pytest.mark.slow
def test_dpo_after_sft_begins_at_its_own_start(first, stories260k, tmp_path):
    """The reference is base and adapter together, so that the first update's loss is ln 2; with the bare base it would
    not be. 1e-5: sums of log-probabilities in float32."""
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"Tom {n}", "chosen": " had a red hat.", "rejected": " saw a blue cat."} for n in range(4)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"stage": {"kind": "dpo"}, "model": {"adapter": str(first)}}
    run(stories260k, pairs, tmp_path / "run", data={"train": str(pairs), "max_length": 32}, **fields)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert losses[0] == pytest.approx(np.log(2), abs=1e-5)
    with pytest.raises(UserError, match="the run goes on with an adapter"):
        run(stories260k, pairs, tmp_path / "base", **(fields | {"stage": {"kind": "dpo", "reference": "base"}}))


@pytest.mark.slow
def test_a_run_from_a_start_of_its_own_resumes(small, lesson, tmp_path):
    """The start is written once, and the resumed run ends with the bits of one that never stopped."""
    fields = {"model": {"new_tokens": ["<call>"]}, "method": {"rank": 4}}
    full = run(small, lesson, tmp_path / "whole", steps=2, **fields)
    run(small, lesson, tmp_path / "run", steps=1, **fields)
    written = (tmp_path / "run/base/model.safetensors").stat().st_mtime_ns
    result = run(small, lesson, tmp_path / "run", "resume=true", steps=2, **fields)
    assert (tmp_path / "run/base/model.safetensors").stat().st_mtime_ns == written
    after = tensors(result.path)
    for name, value in tensors(full.path).items():
        np.testing.assert_array_equal(after[name], value)
