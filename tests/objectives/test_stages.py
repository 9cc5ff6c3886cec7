"""Stages whole, on a tiny model: packing changes nothing, DPO starts at ln 2, transformers reads a reward model."""

from __future__ import annotations

import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers
from units_of import loader_of, random_pairs

import meshtune.quickstart
from meshtune.adapters.config import FullConfig, LoraConfig
from meshtune.adapters.method import prepare
from meshtune.arrays.tree import merge
from meshtune.config.load import load_recipe
from meshtune.errors import UserError
from meshtune.generate.api import load
from meshtune.model.compute import Compute
from meshtune.objectives.answers import metric_means
from meshtune.objectives.stages import STAGES
from meshtune.runs.export import export
from meshtune.train.evaluation.reference import log_probabilities, made_start
from meshtune.train.report import plot
from meshtune.train.run import train
from tiny_models import SMALL, same_weights, torch_model

OPTIONS = {
    "dpo": {"ld_alpha": 0.3, "sft_weight": 0.5},
    "orpo": {},
    "simpo": {},
    "cpo": {"loss": "ipo"},
    "kto": {},
}


def adapted_model(rank=4):
    """(spec, trainable with adapters that do something, frozen)."""
    spec, params = same_weights(torch_model("llama3"))
    prepared = prepare(LoraConfig(rank=rank), spec, params, jax.random.key(0))
    leaves, tree = jax.tree.flatten(prepared.trainable)
    moved = [leaf + 0.05 * jax.random.normal(jax.random.key(n), leaf.shape) for n, leaf in enumerate(leaves)]
    return prepared.spec, jax.tree.unflatten(tree, moved), prepared.frozen


def loss_and_gradient(stage, options, spec, trainable, frozen, arrays):
    objective = STAGES[stage].make(STAGES[stage].config(**options))

    @jax.jit
    def both(trainable, batch):
        def loss(trainable):
            score = objective(merge(trainable, frozen), spec, Compute(loss_chunk=16), batch, None)
            return score.loss / score.weight, metric_means(score)

        return jax.value_and_grad(loss, has_aux=True)(trainable)

    return jax.tree.map(np.asarray, both(trainable, {name: jnp.asarray(array[0]) for name, array in arrays.items()}))


@pytest.mark.parametrize(
    "stage",
    [stage if stage == "dpo" else pytest.param(stage, marks=pytest.mark.slow) for stage in OPTIONS],
)
def test_packed_units_equal_units_in_rows_of_their_own(stage, tmp_path):
    """Loss, metrics and gradients of six units: in six rows, and packed into two. Float32 sums in another order."""
    spec, trainable, frozen = adapted_model()
    documents = random_pairs(97, 6, longest=12, seed=2)
    for number, document in enumerate(documents):
        documents[number] = (*document[:2], float(number // 2 % 2))
    nll = "answer" if stage in ("dpo", "orpo", "cpo") else None
    apart = loader_of(documents, tmp_path, nll=nll).batch(0).arrays
    packed = loader_of(documents, tmp_path, packing=True, rows=2, max_length=60, nll=nll).batch(0).arrays
    assert packed["units"].sum() == 6
    assert packed["units"].sum(-1).max() > 1
    first, second = (
        loss_and_gradient(stage, OPTIONS[stage], spec, trainable, frozen, arrays) for arrays in (apart, packed)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), first, second)


@pytest.mark.parametrize("stage", ["dpo", pytest.param("kto", marks=pytest.mark.slow)])
def test_disabled_adapters_equal_the_cached_reference(stage, tmp_path):
    spec, params = same_weights(torch_model("llama3"))
    prepared = prepare(LoraConfig(rank=4), spec, params, jax.random.key(0))
    documents = random_pairs(97, 4, seed=4)
    documents = [(*d[:2], float(n // 2 % 2)) for n, d in enumerate(documents)]
    loader = loader_of(documents, tmp_path)
    cached = log_probabilities(
        merge(prepared.trainable, prepared.frozen), prepared.spec, Compute(loss_chunk=16), loader
    )
    cached_arrays = loader_of(documents, tmp_path, reference=cached).batch(0).arrays
    off = loader.batch(0).arrays
    (loss, metrics), gradient = loss_and_gradient(stage, {}, prepared.spec, prepared.trainable, prepared.frozen, off)
    (again, _), gradient_cached = loss_and_gradient(
        stage, {}, prepared.spec, prepared.trainable, prepared.frozen, cached_arrays
    )
    assert abs(loss - (np.log(2) if stage == "dpo" else 0.5)) < 1e-6
    assert abs(again - loss) < 1e-6
    assert metrics["rewards/chosen"] == 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradient, gradient_cached)


def test_every_headline_metric_is_one_that_the_objective_reports(tmp_path):
    spec, trainable, frozen = adapted_model()
    documents = random_pairs(97, 2, longest=6, seed=5)
    batch = {name: jnp.asarray(array[0]) for name, array in loader_of(documents, tmp_path).batch(0).arrays.items()}
    for name in ("dpo", "kto"):
        objective, params = STAGES[name].make(STAGES[name].config()), merge(trainable, frozen)
        score = jax.eval_shape(functools.partial(objective, params, spec, Compute(loss_chunk=16), batch, None))
        assert {metric for metric, _ in STAGES[name].headline} <= set(score.metrics)
        assert STAGES[name].unit in ("pair", "answer")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    changes = {"vocab_size": 520, "num_hidden_layers": 2, "max_position_embeddings": 4096}
    config = transformers.AutoConfig.for_model("llama", **SMALL | changes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(root)
    source = pathlib.Path(meshtune.quickstart.__file__).parent / "model"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, root)
    return root


def pairs_file(path, count=12):
    rows = [
        {"instruction": f"say {n}", "chosen": f"it is {n}", "rejected": "no " * (n % 3 + 1), "margin": 0.5}
        for n in range(count)
    ]
    path.write_text(json.dumps(rows))
    return path


def run(model, tmp_path, *overrides):
    file = pairs_file(tmp_path / "pairs.json")
    fields = [f"model.path={model}", "model.chat_template=chatml", f"output={tmp_path / 'run'}", f"data.train={file}"]
    small = ["train.steps=3", "train.batch_size=2", "train.micro_batch=1", "data.max_length=96", "data.validation=2"]
    base = tmp_path / "recipe.yaml"
    base.write_text("model: x\ndata: x\noutput: x\n")
    return train(load_recipe(str(base), [*fields, *small, "optimizer.learning_rate=0.01", *overrides]))


@pytest.fixture
def titles(monkeypatch):
    """(title, unit) of every loss plot that is drawn."""
    names = []

    def draw(*data, title, unit):
        names.append((title, unit))
        original(*data, title=title, unit=unit)

    original = plot.draw
    monkeypatch.setattr(plot, "draw", draw)
    return names


def scores_of(reward, tokenizer, rows):
    """Two texts, the shorter one padded, as transformers scores them."""
    padded = torch.tensor([row + [reward.config.pad_token_id] * (max(map(len, rows)) - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (padded.shape[1] - len(row)) for row in rows])
    with torch.no_grad():
        return reward.eval()(input_ids=padded, attention_mask=mask).logits[:, 0].numpy()


@pytest.mark.parametrize("method", [pytest.param("full", marks=pytest.mark.slow), "lora"])
def test_a_reward_model_reloads_in_transformers_with_equal_scores(method, model, tmp_path, titles):
    from meshtune.model.decoder import forward
    from meshtune.model.inputs import Inputs
    from meshtune.objectives.rm import scores
    from meshtune.weights.load import load_params, load_spec

    result = run(model, tmp_path, "stage=rm", f"method={method}")
    assert set(titles) == {(f"{model.name}, reward model, {method}", "pair")}
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert {"rewards/accuracies", "rewards/margins"} <= set(lines[0])
    first = next(line for line in lines if line["kind"] == "train")
    assert first["rewards/chosen"] == first["rewards/rejected"] == 0, "scores begin at zero"
    assert first["loss"] == pytest.approx(np.log1p(np.exp(0.5)), abs=1e-6), "with the records' margin of 0.5"
    tokenizer = transformers.AutoTokenizer.from_pretrained(result.path)
    rows = [tokenizer("a cat sat")["input_ids"], tokenizer("it is seven or eight of them")["input_ids"]]
    if method == "full":
        reward = transformers.AutoModelForSequenceClassification.from_pretrained(result.path)
        spec, _ = load_spec(result.path)
        params = load_params(result.path, spec)
    else:
        from meshtune.adapters.peft_format import attach, load_adapter

        base = transformers.AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, pad_token_id=519)
        reward = peft.PeftModel.from_pretrained(base, result.path)
        spec, _ = load_spec(model)
        spec, params = attach(load_params(model, spec), spec, load_adapter(result.path, spec))
    assert reward.config.num_labels == 1
    theirs = scores_of(reward, tokenizer, rows)
    assert np.abs(theirs).min() > 0.01
    for row, score in zip(rows, theirs, strict=True):
        tokens = jnp.asarray([row], jnp.int32)
        positions = jnp.arange(len(row), dtype=jnp.int32)[None]
        hidden = forward(params, spec, Compute(), Inputs(tokens, positions, jnp.ones_like(tokens))).hidden
        np.testing.assert_allclose(float(scores(params, hidden)[0, -1]), score, rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="a reward model"):
        load(result.path)
    if method == "lora":
        merged = export(tmp_path / "run", tmp_path / "merged", merge=True).path
        reloaded = transformers.AutoModelForSequenceClassification.from_pretrained(merged)
        assert reloaded.config.pad_token_id not in (None, tokenizer.eos_token_id, tokenizer.bos_token_id)
        np.testing.assert_allclose(scores_of(reloaded, tokenizer, rows), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_full_run_is_compared_with_its_cached_start(model, tmp_path, monkeypatch, titles):
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))
    run(model, tmp_path, "stage=dpo", "method=full")
    assert set(titles) == {(f"{model.name}, DPO, full", "pair")}
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert abs(losses[0] - np.log(2)) < 1e-6
    assert abs(losses[-1] - np.log(2)) > 1e-3
    files = sorted((tmp_path / "cache/references").glob("*.npy"))
    assert len(files) == 2  # training and validation data
    before = [file.stat().st_mtime_ns for file in files]
    run(model, tmp_path, "stage=dpo", "method=full", "overwrite=true", "stage.beta=0.2")
    assert [file.stat().st_mtime_ns for file in files] == before
    training = max(files, key=lambda file: file.stat().st_size)
    pristine = training.read_bytes()
    training.write_bytes(pristine[:-1] + bytes([pristine[-1] ^ 1]))
    run(model, tmp_path, "stage=dpo", "method=full", "overwrite=true")
    assert training.read_bytes() == pristine, "a damaged one is computed again"


def test_a_reference_with_another_tokenizer_is_refused(model, tmp_path):
    reference = tmp_path / "other"
    shutil.copytree(model, reference)
    tokenizer_json = json.loads((reference / "tokenizer.json").read_text())
    vocab = tokenizer_json["model"]["vocab"]
    first, second = list(vocab)[300:302]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (reference / "tokenizer.json").write_text(json.dumps(tokenizer_json))
    with pytest.raises(UserError, match="another tokenizer"):
        run(model, tmp_path, "stage=dpo", f"stage.reference={reference}")


@pytest.mark.parametrize(("rows", "is_same"), [(0, True), (4, False)])
def test_a_start_calibrated_on_data_depends_on_the_rows(rows, is_same):
    """The stored log-probabilities of a reference are found again by the data that made the start."""
    method = {"adapter": "loftq", "loftq_calibration": rows}
    raw = {"model": "m", "data": "d.json", "output": "o", "quantize": "nf4", "stage": "dpo", "method": method}
    first, second = (made_start(load_recipe(raw | {"train": {"batch_size": size}}, [])) for size in (4, 8))
    assert (first == second) is is_same


def test_the_base_is_refused_as_reference_where_its_weights_are_trained(model, tmp_path):
    with pytest.raises(UserError, match="no reference here"):
        run(model, tmp_path, "stage=dpo", "stage.reference=base", "method=full")


def test_the_score_head_is_trained_with_every_method():
    import dataclasses

    from meshtune.adapters.config import FreezeConfig
    from meshtune.adapters.method import abstract
    from meshtune.families import scored_spec

    spec, _ = same_weights(torch_model("llama_tied"))
    for method in (LoraConfig(), FullConfig(), FreezeConfig(last_layers=1)):
        prepared = abstract(method, scored_spec(dataclasses.replace(spec)))
        assert prepared.trainable["score"]["weight"].shape == (1, spec.embed)
        assert "head" not in prepared.trainable | prepared.frozen
