"""A reward model behind LLaMA-Factory's path gives the scores of transformers."""

from __future__ import annotations

import shutil

import httpx
import numpy as np
import openai
import pytest
import torch
from serving import serving
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from meshtune.data.tokenizer import load_tokenizer
from meshtune.serve.models import Models, load_served

TEXTS = ["Once upon a time there was a dog.", "A cat", "The sun is big and round, and Tom likes to look at it."]


@pytest.fixture(scope="module")
def reward_model(stories260k, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "reward"
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(stories260k / name, path / name)
    return path


@pytest.fixture(scope="module")
def address(reward_model):
    options = {"dtype": "float32", "quantize": "auto", "chat_template": "plain"}
    models = Models(load_served(str(reward_model), "reward", {}, **options), rows=1, queue=1)
    models.warm_up()
    with serving(models) as url:
        yield url


def test_scores_are_those_of_transformers(address, reward_model):
    answer = httpx.post(f"{address}/v1/score/evaluation", json={"model": "reward", "messages": TEXTS}).json()
    assert answer["object"] == "score.evaluation"
    assert answer["model"] == "reward"
    reference = AutoModelForSequenceClassification.from_pretrained(reward_model)
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    with torch.no_grad():
        expected = [reference(**tokenizer(text, return_tensors="pt")).logits.item() for text in TEXTS]
    # Two float32 programs: a few units in the last place of sums over 32 numbers.
    np.testing.assert_allclose(answer["scores"], expected, atol=1e-5)


def test_a_conversation_is_rendered_by_the_chat_template(address, reward_model):
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "A dog."}]
    request = {"model": "reward", "messages": [chat]}
    (score,) = httpx.post(f"{address}/v1/score/evaluation", json=request).json()["scores"]
    tokenizer = load_tokenizer(str(reward_model), "plain")
    ids = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)["input_ids"]
    with torch.no_grad():
        expected = AutoModelForSequenceClassification.from_pretrained(reward_model)(ids).logits.item()
    assert score == pytest.approx(expected, abs=1e-5)


REFUSED = [
    ({"messages": []}, "messages"),
    ({"messages": ["x " * 400]}, "context of"),
    ({"messages": [""], "model": "unheard"}, "does not exist"),
    ({"messages": [3]}, "messages"),
    ({"max_length": 5}, "'max_length' is not known"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_cannot_be_scored_is_a_clear_error(address, changes, message):
    answer = httpx.post(f"{address}/v1/score/evaluation", json={"model": "reward", "messages": TEXTS} | changes)
    assert answer.status_code in (400, 404)
    assert message in answer.json()["error"]["message"]


def test_a_reward_model_writes_nothing(address):
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="is a reward model"):
            client.chat.completions.create(model="reward", messages=[{"role": "user", "content": "x"}], stream=stream)
    assert [model.id for model in client.models.list()] == ["reward"]
