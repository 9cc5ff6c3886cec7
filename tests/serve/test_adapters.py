"""A base and adapters over it under names of their own; adapters that do not fit are refused before serving begins."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import peft
import pytest
import torch
from serving import serving
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from meshtune.errors import UserError
from meshtune.generate.api import load
from meshtune.serve.models import Models, load_served

OPTIONS = {"dtype": "float32", "quantize": "auto", "chat_template": "plain"}


def adapter(model: torch.nn.Module, path, seed: int, **options: Any) -> str:
    """A peft adapter with weights of its own."""
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
            asked = {"model": name, "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}
            return client.completions.create(**asked).choices[0].text

        with ThreadPoolExecutor(len(expected)) as clients:
            assert list(clients.map(text, expected)) == list(expected.values())
        metrics = httpx.get(f"{url}/metrics").text
        for name in expected:
            assert f'meshtune_generated_tokens_total{{model="{name}"}} 20' in metrics
            assert f'meshtune_requests_running{{model="{name}"}} 0' in metrics


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
    other = adapter(LlamaForCausalLM(config), tmp_path / "other", 0)
    with pytest.raises(UserError) as refused:
        load_served(str(stories260k), None, {"polite": adapters["polite"], "other": other}, **OPTIONS)
    assert "other" in str(refused.value)
    with pytest.raises(UserError, match="nowhere"):
        load_served(str(stories260k), None, {"gone": str(tmp_path / "nowhere")}, **OPTIONS)
    with pytest.raises(UserError, match="two models have the name 'base'"):
        load_served(str(stories260k), "base", {"base": adapters["polite"]}, **OPTIONS)
