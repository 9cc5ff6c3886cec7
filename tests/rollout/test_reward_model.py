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
from meshtune.train import train

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
    return train(load_recipe(str(folder / "recipe.yaml"), overrides)), folder / "run"


def conversations() -> Completions:
    prompts = [[{"role": "user", "content": f"Hello number {n}"}] for n in range(len(ANSWERS))]
    answers = [[{"role": "assistant", "content": text}] for text in ANSWERS]
    return Completions(prompts, answers, [[1]] * len(ANSWERS), {}, [f"d, record {n}" for n in range(len(ANSWERS))])


def test_a_run_of_stage_rm_scores_conversations_as_transformers_does(reward_run, model):
    """Packed and padded rows of float32 agree to some units in the last place of sums over 32 numbers."""
    result, run = reward_run
    batch = conversations()
    with rewards({"model": str(run), "weight": 2}) as ready:
        assert (ready.names, ready.weights.tolist()) == (["model"], [2])
        values = ready.score(batch).values[:, 0]
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, pad_token_id=0)
    reference = peft.PeftModel.from_pretrained(base, result.path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(result.path)
    chats = [[*prompt, *answer] for prompt, answer in zip(batch.prompts, batch.completions, strict=True)]
    with torch.no_grad():
        expected = [
            reference(torch.tensor([tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]])).logits.item()
            for chat in chats
        ]
    assert np.std(expected) > 0.01
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)


def test_texts_get_the_ends_of_training_and_are_scored_as_transformers_does(tmp_path):
    path = save(LlamaForSequenceClassification, tmp_path / "reward", num_labels=1)
    count = len(ANSWERS)
    prompts = [f"Number {n}: " for n in range(count)]
    batch = Completions(prompts, ANSWERS, [[1]] * count, {}, [f"d, record {n}" for n in range(count)])
    with rewards({"model": str(path)}) as ready:
        values, digest = ready.score(batch).values[:, 0], ready.digest
    tokenizer = load_tokenizer(str(path))
    reference = AutoModelForSequenceClassification.from_pretrained(path)
    expected = []
    with torch.no_grad():
        for prompt, answer in zip(prompts, ANSWERS, strict=True):
            parts = [[tokenizer.bos_token_id]] if tokenizer.bos_token_id is not None else []
            parts += [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer)]
            ids = [id_ for part in parts for id_ in part] + [tokenizer.eos_token_id]
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
