"""meshtune.load and what it gives, against transformers and peft; the texts are stories260K's."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import meshtune
from meshtune.errors import UserError

torch.set_num_threads(1)  # the test machine's cores are shared, and torch's threads wait for each other by spinning
IDS = [[1, 403, 407, 261, 378], [1, 432, 383, 286, 99]]


@pytest.fixture(scope="module")
def model(stories260k):
    return meshtune.load(stories260k, dtype="float32")


@pytest.fixture(scope="module")
def theirs(stories260k):
    return AutoModelForCausalLM.from_pretrained(stories260k, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def golden(stories260k):
    return json.loads((stories260k / "golden_greedy_200.json").read_text())


def adapter_of(base, dest, seed=0):
    """An adapter that peft made, with B away from zero, so that it changes the text."""
    torch.manual_seed(seed)
    config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config).eval()
    adapted.save_pretrained(dest)
    return adapted


@torch.no_grad()
def logits_of(reference, ids):
    return reference(torch.tensor(ids)).logits.numpy()


def test_importing_the_package_imports_neither_jax_nor_transformers():
    code = "import sys, meshtune; print(sorted({'jax', 'transformers', 'torch', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_the_package_offers_its_names():
    assert {"load", "train", "Recipe", "__version__"} <= set(dir(meshtune))
    assert meshtune.Recipe.__name__ == "Recipe"
    assert meshtune.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="trian"):
        meshtune.trian  # noqa: B018


def test_train_is_a_package_that_can_be_called(monkeypatch):
    import meshtune.train.step.build

    monkeypatch.setattr("meshtune.train.run.train", lambda recipe, job: (recipe.output, recipe.seed))
    fields = {"model": "m", "data": {"train": "d.jsonl"}, "output": "runs/one"}
    assert meshtune.train(fields, "seed=1") == ("runs/one", 1)
    assert meshtune.train.step.build.TrainState


@pytest.mark.parametrize("ids", [IDS[0], IDS[:1], IDS, np.array(IDS), np.array(IDS[0], np.int64)])
def test_logits_are_those_of_transformers(model, theirs, ids):
    """1e-4: float32 in another order of summation."""
    logits = model.logits(ids)
    assert logits.dtype == np.float32
    assert logits.shape == (np.atleast_2d(ids).shape[0], 5, 512)
    np.testing.assert_allclose(logits, logits_of(theirs, np.atleast_2d(ids)), atol=1e-4)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[1, 2], [3]], "length"),
        ([], "shape"),
        ([[1.5]], "float"),
        ([[1, 512]], "512"),
        ([-1], "-1"),
        ([[[1]]], "shape"),
    ],
)
def test_ids_that_are_no_rows_are_refused(model, ids, message):
    with pytest.raises(UserError, match=message):
        model.logits(ids)


def test_greedy_text_is_the_golden_one(model, golden):
    text = golden["text"]
    # The empty prompt is this tokenizer's beginning-of-text token: all of the golden prompt.
    assert model.generate("", max_tokens=200) == text
    continuation = model.generate("Once upon a time", max_tokens=196)
    assert "Once upon a time" + continuation == text


def test_streamed_pieces_join_to_the_text(model):
    pieces = list(model.stream("Once upon a time", max_tokens=60))
    assert len(pieces) > 10
    assert "".join(pieces) == model.generate("Once upon a time", max_tokens=60)


def test_several_prompts_give_their_own_texts_in_any_grouping(model):
    prompts = ["Once upon a time", "The dog", "One day, a very big"]
    expected = [model.generate(prompt, max_tokens=30) for prompt in prompts]
    assert model.generate(prompts, max_tokens=30) == expected
    assert model.generate(prompts, max_tokens=30, batch_size=2) == expected
    assert model.generate([], max_tokens=30) == []


@pytest.mark.slow
def test_prompt_i_draws_with_seed_plus_i(model):
    together = model.generate(["The dog"] * 3, max_tokens=20, temperature=1.0, seed=4, batch_size=2)
    assert together == [model.generate("The dog", max_tokens=20, temperature=1.0, seed=4 + i) for i in range(3)]
    assert len(set(together)) == 3


def test_a_stop_string_ends_the_text_before_it(model, golden):
    text = model.generate("", max_tokens=200, stop="Lily")
    assert text == golden["text"][: golden["text"].index("Lily")]


def test_unknown_and_unfit_options_are_refused(model):
    with pytest.raises(TypeError, match="temprature"):
        model.generate("x", temprature=1.0)
    with pytest.raises(UserError, match="top_p"):
        model.generate("x", temperature=1.0, top_p=1.5)
    with pytest.raises(UserError, match="no room"):
        model.generate("word " * 600)
    with pytest.raises(UserError, match="mixed"):
        model.generate(["x", [{"role": "user", "content": "y"}]])


def test_a_base_with_an_adapter_is_what_peft_makes_of_it(stories260k, tmp_path):
    adapted = adapter_of(stories260k, tmp_path / "adapter")
    model = meshtune.load(stories260k, adapter=tmp_path / "adapter", dtype="float32")
    np.testing.assert_allclose(model.logits(IDS), logits_of(adapted, IDS), atol=1e-4)
    prompt = torch.tensor(IDS[:1])
    expected = adapted.generate(input_ids=prompt, max_new_tokens=40, do_sample=False, pad_token_id=0)[0, 5:].tolist()
    assert model.engine.generate(IDS[:1], max_tokens=40) == [expected]


def test_an_adapter_alone_finds_its_base(stories260k, tmp_path):
    adapted = adapter_of(stories260k, tmp_path / "adapter")
    model = meshtune.load(tmp_path / "adapter", dtype="float32")
    np.testing.assert_allclose(model.logits(IDS), logits_of(adapted, IDS), atol=1e-4)
    assert model.generate("Once", max_tokens=5)


def edit_json(file, **changes):
    fields = json.loads(file.read_text())
    file.write_text(json.dumps(fields | changes))


def test_an_adapter_whose_base_is_gone_says_so(stories260k, tmp_path):
    adapter_of(stories260k, tmp_path / "adapter")
    config = tmp_path / "adapter/adapter_config.json"
    edit_json(config, base_model_name_or_path="/nowhere/model")
    with pytest.raises(UserError, match="'/nowhere/model'"):
        meshtune.load(tmp_path / "adapter")
    edit_json(config, base_model_name_or_path=None)
    with pytest.raises(UserError, match="which model"):
        meshtune.load(tmp_path / "adapter")


def ours(base, dest):
    """An adapter that Meshtune wrote, with the hash of its base."""
    from meshtune.adapters.config import LoraConfig as Config
    from meshtune.adapters.method import prepare
    from meshtune.adapters.peft_format import BaseRecord, save_adapter
    from meshtune.weights.inspect import base_hash
    from meshtune.weights.load import load_params, load_spec

    spec, _ = load_spec(base, "float32")
    config = Config(rank=2)
    prepared = prepare(config, spec, load_params(base, spec), jax.random.key(0))
    trainable = jax.tree.map(lambda leaf: leaf + 0.02, prepared.trainable)
    save_adapter(dest, trainable, prepared.spec, config, BaseRecord(str(base), base_hash(base)))


def test_an_adapter_of_another_base_is_refused(stories260k, tmp_path):
    ours(stories260k, tmp_path / "adapter")
    assert meshtune.load(tmp_path / "adapter", dtype="float32").generate("Once", max_tokens=4)
    damaged_base = tmp_path / "other"
    shutil.copytree(stories260k, damaged_base)
    for path in [damaged_base, *damaged_base.iterdir()]:
        path.chmod(0o755)
    damaged = bytearray((damaged_base / "model.safetensors").read_bytes())
    damaged[-2] ^= 1
    (damaged_base / "model.safetensors").write_bytes(damaged)
    with pytest.raises(UserError, match="another base"):
        meshtune.load(damaged_base, adapter=tmp_path / "adapter")


def test_a_run_directory_is_its_result(stories260k, tmp_path):
    run = tmp_path / "run"
    recipe = f"model: {{path: {stories260k}, chat_template: plain}}\ndata: {{train: x.jsonl}}\noutput: {run}\n"
    run.mkdir()
    (run / "recipe.yaml").write_text(recipe)
    with pytest.raises(UserError, match="no result yet"):
        meshtune.load(run)
    ours(stories260k, run / "adapter")
    model = meshtune.load(run, dtype="float32")
    beside = meshtune.load(stories260k, adapter=run, dtype="float32")
    alone = meshtune.load(run / "adapter", dtype="float32")
    assert model.tokenizer.chat_template is not None
    np.testing.assert_array_equal(model.logits(IDS), alone.logits(IDS))
    np.testing.assert_array_equal(model.logits(IDS), beside.logits(IDS))
    shutil.rmtree(run / "adapter")
    shutil.copytree(stories260k, run / "model")
    np.testing.assert_array_equal(
        meshtune.load(run, dtype="float32").logits(IDS), meshtune.load(stories260k, dtype="float32").logits(IDS)
    )


def test_what_is_not_there_is_named(stories260k, tmp_path):
    with pytest.raises(UserError, match="stories260K"):
        meshtune.load(str(stories260k) + "x")
    with pytest.raises(UserError, match="no adapter at"):
        meshtune.load(stories260k, adapter=tmp_path / "absent")
    with pytest.raises(UserError, match="int7"):
        meshtune.load(stories260k, dtype="int7")


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(stories260k, tmp_path):
    shutil.copytree(stories260k, tmp_path / "model")
    for path in [tmp_path / "model", *(tmp_path / "model").iterdir()]:
        path.chmod(0o755)
    file = tmp_path / "model/tokenizer.json"
    fields = json.loads(file.read_text())
    fields["added_tokens"].append({**fields["added_tokens"][0], "id": 600, "content": "<|new|>"})
    file.write_text(json.dumps(fields))
    with pytest.raises(UserError, match="512 entries"):
        meshtune.load(tmp_path / "model")


def test_a_model_without_a_tokenizer_still_gives_logits(stories260k, theirs, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(stories260k / name, tmp_path)
    model = meshtune.load(tmp_path, dtype="float32")
    np.testing.assert_allclose(model.logits(IDS), logits_of(theirs, IDS), atol=1e-4)
    with pytest.raises(UserError, match="no tokenizer"):
        model.generate("Once")


@pytest.mark.parametrize(("dtype", "difference"), [("bfloat16", 0.1), ("float16", 0.0125)])
def test_16_bits_are_near(model, stories260k, dtype, difference):
    """bfloat16 keeps 8 bits, logits of size 10 within a few hundredths on the mean; float16 has 3 more."""
    logits = meshtune.load(stories260k, dtype=dtype).logits(IDS)
    assert logits.dtype == np.float32
    assert np.abs(logits - model.logits(IDS)).mean() < difference


def test_float16_is_decoded_as_transformers_decodes_it(stories260k):
    """Over a cache in float16, greedily; log-probabilities within what its 11 bits leave of logits of size 10."""
    theirs = AutoModelForCausalLM.from_pretrained(stories260k, dtype=torch.float16)
    prompt = IDS[0]
    ids = torch.tensor([prompt])
    tokens = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)[0].tolist()
    engine = meshtune.load(stories260k, dtype="float16").engine
    scheduler = engine.scheduler(rows=2)
    generation = scheduler.submit(engine.request(prompt, max_tokens=24, stop_ids=[], alternatives=0))
    while not scheduler.idle:
        scheduler.step()
    assert {leaf.dtype for leaf in jax.tree.leaves(scheduler._rows._caches.layers)} == {np.dtype(np.float16)}
    assert generation.ids == tokens[len(prompt) :]
    with torch.no_grad():
        scores = torch.log_softmax(theirs(torch.tensor([tokens])).logits.float(), -1)[0]
    expected = [float(scores[len(prompt) + n - 1, token]) for n, token in enumerate(generation.ids)]
    np.testing.assert_allclose([token.log_probability for token in generation.tokens], expected, atol=0.05)


def test_peft_reads_the_same_adapter(stories260k, tmp_path, theirs):
    ours(stories260k, tmp_path / "adapter")
    model = meshtune.load(tmp_path / "adapter", dtype="float32")
    base = AutoModelForCausalLM.from_pretrained(stories260k, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    np.testing.assert_allclose(model.logits(IDS), logits_of(adapted, IDS), atol=1e-4)
    assert np.abs(model.logits(IDS) - logits_of(theirs, IDS)).max() > 0.01
