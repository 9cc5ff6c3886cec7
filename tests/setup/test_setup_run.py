"""A run is resolved from config and tokenizer only; its quantisation and memory are described in true figures."""

from __future__ import annotations

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
import transformers

import meshtune
from meshtune.arrays.tree import flatten, named_leaves
from meshtune.config.load import load_recipe
from meshtune.errors import UserError
from meshtune.mesh.processes import SINGLE_PROCESS
from meshtune.quantize.weight import QuantisedWeight
from meshtune.setup.machine import this_machine
from meshtune.setup.memory import bytes_on_each, free_memory, memory_in_use, memory_kind
from meshtune.setup.run import Run, resolve_run
from meshtune.weights.load import load_params

MODEL = pathlib.Path(meshtune.__file__).parent / "quickstart/model"
NARROW = "quantize.modules.down_proj=none"  # its rows have 172 numbers, which no block divides


def run(*overrides: str, model: pathlib.Path = MODEL) -> Run:
    fields = {"model": str(model), "data": {"train": "none.jsonl"}, "output": "out", "mesh": {}}
    return resolve_run(load_recipe(fields, overrides), this_machine())


def test_new_tokens_enlarge_the_vocabulary_as_transformers_resizes_it():
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL)
    tokenizer.add_tokens(["<call>", "</call>"])
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64)
    start = run("model.new_tokens=[<call>,</call>]", "model.pad_vocab_to=64").start
    assert start.spec.vocab == model.config.vocab_size
    assert start.changed
    assert start.tokens.ids == tuple(tokenizer.convert_tokens_to_ids(["<call>", "</call>"]))


def test_a_run_on_a_published_model_starts_from_its_files():
    resolved = run()
    assert not resolved.start.changed
    assert resolved.source == MODEL
    assert resolved.spec.layers == transformers.AutoConfig.from_pretrained(MODEL).num_hidden_layers


def test_added_layers_are_counted_in_the_config_and_only_they_are_trained():
    resolved = run("method.kind=llama_pro", "method.blocks=1")
    layers = transformers.AutoConfig.from_pretrained(MODEL).num_hidden_layers
    assert resolved.spec.layers == resolved.start.config["num_hidden_layers"] == layers + 1
    trained = sum(array.size for _, array in named_leaves(resolved.arrays.trainable))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(MODEL)
    assert trained == sum(weight.numel() for weight in loaded.model.layers[0].parameters())


def test_rows_of_new_tokens_need_a_method_that_trains_them():
    with pytest.raises(UserError, match="would not train the embeddings"):
        run("model.new_tokens=[<call>]", "method.kind=freeze", "method.last_layers=1")


def test_a_reward_model_learns_scores_only(tmp_path):
    config = json.loads((MODEL / "config.json").read_text())
    for file in MODEL.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="this is a reward model"):
        run(model=tmp_path)
    assert run("stage=rm", model=tmp_path).spec.scored


@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_bits_a_weight_are_those_of_the_arrays_that_are_loaded(format):
    resolved = run(f"quantize.format={format}", NARROW)
    decision = next(decision for decision in resolved.decisions if decision.name == "quantize")
    shown, count = re.search(r"([\d.]+) bits a weight of ([\d,]+)", decision.reason).groups()  # pyright: ignore[reportOptionalMemberAccess]
    params = flatten(load_params(MODEL, resolved.spec, quantize=resolved.quantize))
    weights = [leaf for leaf in params.values() if isinstance(leaf, QuantisedWeight)]
    stored = sum(array.nbytes for weight in weights for array in jax.tree.leaves(weight))
    assert int(count.replace(",", "")) == sum(weight.size for weight in weights)
    assert float(shown) == pytest.approx(8 * stored / sum(weight.size for weight in weights), abs=0.005)


def test_an_unquantised_recipe_has_no_quantisation():
    assert run().quantize is None
    assert run("quantize=none").quantize is None
    assert run("quantize.format=nf4", NARROW).quantize is not None


def test_memory_of_a_tree_is_that_of_its_arrays():
    tree = {"a": jnp.zeros((8, 16)), "b": jnp.zeros(3, jnp.bfloat16)}
    assert bytes_on_each(tree) == 8 * 16 * 4 + 3 * 2
    assert bytes_on_each(tree, itemsize=1) == 8 * 16 + 3
    layout = jax.sharding.NamedSharding(jax.make_mesh((1,), ("x",)), jax.sharding.PartitionSpec("x"))
    assert bytes_on_each(jax.device_put(np.zeros((8, 4), np.float32), layout)) == 128


def test_a_cpus_memory_is_the_hosts():
    free = free_memory(SINGLE_PROCESS, 1)
    assert memory_kind() == "host"
    assert free.shared
    assert 0 < free.device <= psutil.virtual_memory().total
    assert free_memory(SINGLE_PROCESS, 4).device <= free.device / 3
    before = memory_in_use()
    held = np.ones(1 << 27, np.uint8)
    assert memory_in_use() - before > 0.9 * held.nbytes
