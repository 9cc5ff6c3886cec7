"""Teachers: which are refused before weights are read, and what a plan counts of them."""

from __future__ import annotations

import json
import pathlib
import shutil

import jax
import pydantic
import pytest
import torch
import transformers

import meshtune.quickstart
from meshtune.config.load import load_recipe
from meshtune.data.tokenizer import load_tokenizer
from meshtune.errors import UserError
from meshtune.plan.program import step_of
from meshtune.setup.search import workload_of
from meshtune.setup.teacher import teacher_of
from meshtune.weights.load import load_spec

MODEL = pathlib.Path(meshtune.quickstart.__file__).parent / "model"


def save(folder: pathlib.Path, vocab: int = 512, cls=transformers.LlamaForCausalLM, **options) -> pathlib.Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, **options,
    )  # fmt: skip
    cls(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder / name)
    return folder


def recipe(teacher: object, **sections: object):
    fields = {"model": str(MODEL), "data": "d.jsonl", "stage": "distill", "output": "out", "train": {"batch_size": 2}}
    return load_recipe({**fields, "teacher": teacher, **sections})


def resolve(asked):
    return teacher_of(asked, "float32", load_spec(MODEL)[0], weights=False)


def test_a_teacher_of_another_vocabulary_is_refused_with_both_sizes_and_a_fix_that_works(tmp_path):
    teacher = str(save(tmp_path / "wide", vocab=640))
    with pytest.raises(UserError, match=r"640 tokens .*wide.* the student 512") as refused:
        resolve(recipe(teacher))
    assert "model.pad_vocab_to: 640" in str(refused.value)
    program = step_of(recipe(teacher, model={"path": str(MODEL), "pad_vocab_to": 640}), length=32)
    assert program.run.spec.vocab == program.run.teacher.spec.vocab == 640


def test_another_tokenizer_is_refused_with_a_token_that_differs(tmp_path):
    folder = save(tmp_path / "teacher")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[300:302]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="another tokenizer: ") as refused:
        resolve(recipe(str(folder))).check_tokenizer(load_tokenizer(MODEL))
    assert "stage: sft" in str(refused.value)
    resolve(recipe(str(MODEL))).check_tokenizer(load_tokenizer(MODEL))


def test_reward_models_are_no_teachers_and_servers_have_no_arrays(tmp_path):
    scored = save(tmp_path / "rm", cls=transformers.LlamaForSequenceClassification, num_labels=1, pad_token_id=0)
    with pytest.raises(UserError, match="reward model"):
        resolve(recipe(str(scored)))
    served = recipe("http://localhost:8000/v1", rollout={"prompts": 2, "samples": 1, "max_tokens": 16})
    assert resolve(served) is None
    program = step_of(served, length=300)
    assert program.run.teacher is None


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"teacher": None}, "needs a teacher"),
        ({"stage": "sft"}, "teacher is read by stage distill only"),
        ({"rewards": ["reward.py:score"]}, "no rewards"),
        ({"stage": {"kind": "distill", "on_policy": 0.5}}, "give rollout"),
        ({"rollout": {"max_tokens": 8}}, "rollout is read by online stages only"),
        (
            {"stage": {"kind": "distill", "on_policy": 1}, "rollout": {"max_tokens": 4096}, "train": {}},
            "leave none for the prompt",
        ),
    ],
)
def test_sections_that_do_not_go_together_are_refused(sections, message):
    with pytest.raises((UserError, pydantic.ValidationError), match=message):
        recipe(**{"teacher": str(MODEL), **sections})


def test_a_plan_counts_the_bytes_of_the_teacher(tmp_path):
    """float32 and int8 of a model whose matrices have 2 * (4 * 64 * 64 + 3 * 64 * 64) numbers; the tables stay."""
    teacher = str(save(tmp_path / "teacher"))
    matrices, others = 2 * 7 * 64 * 64, 2 * 512 * 64 + 5 * 64
    alone = step_of(recipe(None, stage="sft"), length=32).breakdown()["frozen"]["device"]
    wide = step_of(recipe(teacher), length=32).breakdown()["frozen"]["device"]
    assert wide - alone == 4 * (matrices + others)
    coded = step_of(recipe({"path": teacher, "quantize": "int8"}), length=32).breakdown()["frozen"]["device"]
    assert coded - alone == pytest.approx(matrices + 4 * others, rel=0.05)
    estimated = [
        sum(array.size * array.itemsize for array in workload_of(asked, "cpu").persistent if array.role == "frozen")
        for asked in (recipe(None, stage="sft"), recipe(teacher))
    ]
    assert estimated[1] - estimated[0] == 4 * (matrices + others)


def test_a_quantised_teacher_loads_as_it_is_planned(tmp_path):
    teacher = resolve(recipe({"path": str(save(tmp_path / "teacher")), "quantize": "nf4"}))
    like = jax.tree.map(lambda x: (x.shape, str(x.dtype)), teacher.parameters)
    assert jax.tree.map(lambda x: (x.shape, str(x.dtype)), teacher.load(None)) == like
