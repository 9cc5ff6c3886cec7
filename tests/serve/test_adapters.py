"""A base and adapters over it under names of their own; adapters that do not fit are refused before serving begins."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import peft
import pytest
import torch
from serving import serving
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from meshtune.adapters.adapter_set import adapter_count
from meshtune.arrays.tree import flatten
from meshtune.errors import UserError
from meshtune.generate.api import load
from meshtune.quantize.config import QuantizeConfig
from meshtune.serve.models import Models, load_served

OPTIONS = {"dtype": "float32", "quantize": "auto", "chat_template": "plain"}


def adapter(model: torch.nn.Module, path, seed: int, **options: Any) -> str:
    """A peft adapter with random weights."""
    torch.manual_seed(seed)
    options |= {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    config = peft.LoraConfig(**options)
    peft.get_peft_model(model, config).save_pretrained(path)  # pyright: ignore[reportArgumentType]
    return str(path)


@pytest.fixture(scope="module")
def adapters(stories260k, tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")

    def base() -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(stories260k, dtype=torch.float32)

    return {name: adapter(base(), folder / name, seed) for seed, name in enumerate(("polite", "rude"))}


def test_base_and_adapters_answer_under_their_names(stories260k, adapters):
    """All at once, from one batch."""
    models = Models(load_served(str(stories260k), "base", adapters, **OPTIONS), rows=2, queue=8)
    expected = {"base": load(stories260k, dtype="float32").generate("Once upon a time", max_tokens=20)}
    for name, path in adapters.items():
        expected[name] = load(path, dtype="float32").generate("Once upon a time", max_tokens=20)
    assert len(set(expected.values())) == 3
    assert models.batches == ["base, polite, rude"]
    assert len(models.workers) == 1
    with serving(models) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == list(expected)

        def text(name: str) -> str:
            request = {"model": name, "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}
            return client.completions.create(**request).choices[0].text

        with ThreadPoolExecutor(len(expected)) as clients:
            assert list(clients.map(text, expected)) == list(expected.values())
        metrics = httpx.get(f"{url}/metrics").text
        for name in expected:
            assert f'meshtune_generated_tokens_total{{model="{name}"}} 20' in metrics
            assert f'meshtune_requests_running{{model="{name}"}} 0' in metrics


def test_an_adapter_that_is_alone_is_merged_where_that_is_possible(stories260k, adapters):
    """Its answers and logits are those of the unmerged adapter (float32: within 1e-4), the base's its own."""
    path, prompt = adapters["polite"], "Once upon a time"
    beside, base = load(path, dtype="float32"), load(stories260k, dtype="float32")
    ids = beside.tokenizer.encode(prompt)
    for merge in (True, None):
        served = load_served(path, "polite", {}, merge=merge, **OPTIONS)
        model, plain = served["polite"], served[stories260k.name]
        assert model.merging is not None
        assert model.merging.merges
        assert adapter_count(model.params) == 0
        assert "adapter" not in "".join(flatten(model.params))
        assert model.generate(prompt, max_tokens=20) == beside.generate(prompt, max_tokens=20)
        np.testing.assert_allclose(model.logits(ids), beside.logits(ids), atol=1e-4)
        np.testing.assert_array_equal(plain.logits(ids), base.logits(ids))  # nothing of its weights was overwritten
        lines = Models(served, rows=1, queue=1).banner()
        assert lines[1].split() == ["batches", "polite", "(merged)"]
        assert "adapter  merged (" in "\n".join(lines)


def test_an_adapter_is_not_merged_over_a_quantised_base_or_beside_others(stories260k, adapters):
    config = QuantizeConfig("int8", modules={"down_proj": "none"})  # whose rows no block divides
    options = OPTIONS | {"quantize": config}
    served = load_served(adapters["polite"], "polite", {}, merge=None, **options)
    assert "adapter  not merged (the base is quantised)" in Models(served, rows=1, queue=1).banner()
    several = load_served(str(stories260k), "base", adapters, merge=None, **OPTIONS)
    assert "adapter  not merged (there are 2 of them)" in Models(several, rows=1, queue=1).banner()
    for path, named, loading, reason in (
        (adapters["polite"], {}, options, "the base is quantised"),
        (str(stories260k), adapters, OPTIONS, "there are 2 of them"),
        (str(stories260k), {}, OPTIONS, "there is none"),
    ):
        with pytest.raises(UserError, match=f"no adapter can be merged: {reason}"):
            load_served(path, "model", named, merge=True, **loading)


def test_an_adapter_that_is_more_than_lora_has_a_batch_of_its_own(stories260k, adapters, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(stories260k, dtype=torch.float32)
    named = {"polite": adapters["polite"], "other": adapter(base, tmp_path / "other", 0, use_dora=True)}
    models = Models(load_served(str(stories260k), "base", named, **OPTIONS), rows=2, queue=8)
    assert models.batches == ["base, polite", "other (its adapters are of the kind dora)"]
    assert [served.worker for served in models] == [models.workers[0]] * 2 + [models.workers[1]]


def test_an_adapter_that_does_not_fit_its_base_is_refused(stories260k, adapters, tmp_path):
    config = LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    path = adapter(LlamaForCausalLM(config), tmp_path / "other", 0)
    with pytest.raises(UserError) as refused:
        load_served(str(stories260k), None, {"polite": adapters["polite"], "other": path}, **OPTIONS)
    assert "other" in str(refused.value)
    with pytest.raises(UserError, match="nowhere"):
        load_served(str(stories260k), None, {"gone": str(tmp_path / "nowhere")}, **OPTIONS)
    with pytest.raises(UserError, match="two models have the name 'base'"):
        load_served(str(stories260k), "base", {"base": adapters["polite"]}, **OPTIONS)
