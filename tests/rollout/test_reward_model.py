"""Reward models score completions as transformers does, and what is none is refused."""

from __future__ import annotations

import json
import pathlib
import shutil

import numpy as np
import peft
import pytest
import torch
import transformers
from pydantic import TypeAdapter
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

import meshtune.quickstart
from meshtune.config.load import load_recipe
from meshtune.config.rewards import RewardSection, rewards_written_out
from meshtune.data.tokenizer import load_tokenizer
from meshtune.errors import UserError
from meshtune.rollout.reward_functions import Completions
from meshtune.rollout.rewards import Rewards, check_rewards
from meshtune.train.run import train

MODEL = pathlib.Path(meshtune.quickstart.__file__).parent / "model"
ANSWERS = [
    "A dog.",
    "",
    "Once upon a time there was a cat who sang all day long, and then it was gone.",
    "no",
    "A dog.",
] * 4


def rewards(*entries):
    return Rewards(TypeAdapter(list[RewardSection]).validate_python(rewards_written_out(list(entries))))


def save(cls, path: pathlib.Path, **options) -> pathlib.Path:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=520, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, pad_token_id=0, **options,
    )  # fmt: skip
    cls(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, path / name)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(transformers.LlamaForCausalLM, tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def reward_run(model, tmp_path_factory):
    """A run of stage rm: three updates of LoRA from twelve pairs."""
    folder = tmp_path_factory.mktemp("rm")
    pairs = [{"instruction": f"say {n}", "chosen": f"it is {n}", "rejected": "no " * (n % 3 + 1)} for n in range(12)]
    (folder / "pairs.json").write_text(json.dumps(pairs))
    (folder / "recipe.yaml").write_text("model: x\ndata: x\noutput: x\n")
    overrides = [
        f"model.path={model}", "model.chat_template=chatml", f"output={folder / 'run'}",
        f"data.train={folder / 'pairs.json'}", "train.steps=3", "train.batch_size=2", "data.max_length=64",
        "stage=rm", "optimizer.learning_rate=0.01", "compute.remat=none",
    ]  # fmt: skip
    return train(load_recipe(str(folder / "recipe.yaml"), overrides)).path, folder / "run"


def conversations() -> Completions:
    prompts = [[{"role": "user", "content": f"Hello number {n}"}] for n in range(len(ANSWERS))]
    answers = [[{"role": "assistant", "content": text}] for text in ANSWERS]
    return Completions(prompts, answers, [[1]] * len(ANSWERS), {}, [f"d, record {n}" for n in range(len(ANSWERS))])


@pytest.fixture(scope="module")
def reward_adapter(model, tmp_path_factory):
    """An adapter with a head of one score that peft wrote."""
    folder = tmp_path_factory.mktemp("adapter")
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, pad_token_id=0)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS", init_lora_weights=False)
    peft.get_peft_model(base, config).save_pretrained(folder)
    written = json.loads((folder / "adapter_config.json").read_text())
    written["modules_to_save"] = ["score"]  # peft adds a classifier, which Llama does not have
    (folder / "adapter_config.json").write_text(json.dumps(written))
    tokenizer = load_tokenizer(str(model), "chatml")
    tokenizer.save_pretrained(folder)
    return folder, folder


@pytest.mark.parametrize("source", ["reward_adapter", pytest.param("reward_run", marks=pytest.mark.slow)])
def test_conversations_are_scored_as_transformers_does(source, model, request):
    """Packed and padded rows of float32 agree to some units in the last place of sums over 32 numbers."""
    result, path = request.getfixturevalue(source)
    batch = conversations()
    with rewards({"model": str(path), "weight": 2}) as ready:
        assert (ready.names, ready.weights.tolist()) == (["model"], [2])
        values = ready.score(batch).values[:, 0]
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, pad_token_id=0)
    reference = peft.PeftModel.from_pretrained(base, result).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(result)
    chats = [[*prompt, *answer] for prompt, answer in zip(batch.prompts, batch.completions, strict=True)]
    with torch.no_grad():
        expected = [
            reference(torch.tensor([tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]])).logits.item()
            for chat in chats
        ]
    assert np.std(expected) > 1e-3
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)


def test_texts_get_the_ends_of_training_and_are_scored_as_transformers_does(tmp_path):
    path = save(LlamaForSequenceClassification, tmp_path / "reward", num_labels=1)
    count = len(ANSWERS)
    prompts = [f"Number {n}:" for n in range(count)]
    batch = Completions(prompts, ANSWERS, [[1]] * count, {}, [f"d, record {n}" for n in range(count)])
    with rewards({"model": str(path)}) as ready:
        values, digest = ready.score(batch).values[:, 0], ready.digest
    tokenizer = load_tokenizer(str(path))
    reference = AutoModelForSequenceClassification.from_pretrained(path)
    expected = []
    with torch.no_grad():
        for prompt, answer in zip(prompts, ANSWERS, strict=True):
            ids = [tokenizer.bos_token_id, *tokenizer(prompt + answer, add_special_tokens=False)["input_ids"]]
            ids.append(tokenizer.eos_token_id)
            expected.append(reference(torch.tensor([ids])).logits.item())
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)
    long = Completions(["a"] * 2, ["b", "so " * 400], [[1]] * 2, {}, ["d, record 0", "d, record 1"])
    with rewards({"model": str(path)}) as ready, pytest.raises(UserError, match="more than max_length 128") as error:
        ready.score(long)
    assert error.value.where == "d, record 1"
    save(LlamaForSequenceClassification, path, num_labels=1, rms_norm_eps=1e-3)
    torch.manual_seed(5)
    state = LlamaForSequenceClassification.from_pretrained(path)
    torch.nn.init.normal_(state.score.weight)
    state.save_pretrained(path)
    with rewards({"model": str(path)}) as ready:
        assert ready.digest != digest


def test_what_is_no_reward_model_is_refused_before_it_is_loaded(model, tmp_path):
    adapter = tmp_path / "adapter"
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    peft.get_peft_model(base, peft.LoraConfig(r=2, task_type="CAUSAL_LM")).save_pretrained(adapter)
    for path in (model, adapter):
        sections = TypeAdapter(list[RewardSection]).validate_python([{"kind": "model", "model": str(path)}])
        with pytest.raises(UserError, match="is no reward model") as error:
            check_rewards(sections)
        assert "stage rm" in error.value.fix
    with pytest.raises(UserError):
        rewards({"model": str(tmp_path / "nowhere")})
