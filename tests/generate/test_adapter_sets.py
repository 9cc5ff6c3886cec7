"""Several adapters over one base in one batch: each row answers as its adapter does by itself, in peft and here;
float32.

The references are computed in float64; log-probabilities may differ by 1e-5, the rounding of float32.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from meshtune.generate import programs
from meshtune.generate.api import Model, load_variants
from meshtune.generate.engine import Engine
from meshtune.generate.request import Generation
from meshtune.generate.scheduler import Scheduler
from meshtune.quantize.config import QuantizeConfig
from meshtune.runs.sources import find

OPTIONS: dict[str, dict[str, Any]] = {
    "small": {"r": 2, "lora_alpha": 2, "target_modules": ["q_proj", "v_proj", "lm_head"]},  # of a tied head
    # Another rank, rank-stabilised, of other modules, in some layers, which do not have the same rank.
    "large": {
        "r": 5, "lora_alpha": 6, "use_rslora": True, "target_modules": ["q_proj", "down_proj"],
        "layers_to_transform": [1, 2, 4], "rank_pattern": {"layers.2.mlp.down_proj": 3},
    },
}  # fmt: skip
NAMES = ("base", *OPTIONS)
TOKENS = 12


def in_peft(stories260k, name: str) -> Any:
    """The base in transformers, with the adapter of a name that is one."""
    model = AutoModelForCausalLM.from_pretrained(stories260k, dtype=torch.float32)
    if name not in OPTIONS:
        return model.eval()
    torch.manual_seed(len(name))
    config = peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **OPTIONS[name])
    return peft.get_peft_model(model, config).eval()


@pytest.fixture(scope="module")
def references(stories260k) -> dict[str, Any]:
    return {name: in_peft(stories260k, name).double() for name in NAMES}


@pytest.fixture(scope="module")
def paths(references, tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    for name in OPTIONS:
        references[name].float().save_pretrained(folder / name)
        references[name].double()
    return {name: str(folder / name) for name in OPTIONS}


def load_models(base, paths: dict[str, str], share_batch: bool, quantize: Any = "auto") -> dict[str, Model]:
    sources = {"base": find(str(base))} | {name: find(str(base), path) for name, path in paths.items()}
    return load_variants(sources, dtype="float32", quantize=quantize, share_batch=share_batch)


@pytest.fixture(scope="module")
def models(stories260k, paths) -> dict[str, Model]:
    return load_models(stories260k, paths, share_batch=True)


@pytest.fixture(scope="module")
def prompt(stories260k) -> list[int]:
    return np.random.default_rng(0).integers(3, 500, 40).tolist()


def run_to_end(scheduler: Scheduler) -> None:
    while not scheduler.idle:
        scheduler.step()


def submit(scheduler: Scheduler, models: dict[str, Model], name: str, prompt: list[int]) -> Generation:
    request = models[name].engine.request(prompt, max_tokens=TOKENS, stop_ids=[], alternatives=0)
    return scheduler.submit(request)


def expected_tokens(reference: Any, prompt: list[int], tokens: list[int]) -> tuple[list[int], np.ndarray]:
    """(the likeliest token after each of the prompt and of `tokens`, the log-probabilities of `tokens`)."""
    with torch.no_grad():
        logits = reference(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    chosen = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    return logits.argmax(-1).tolist(), chosen.numpy()


def probabilities(generation: Generation) -> np.ndarray:
    return np.asarray([token.log_probability for token in generation.tokens])


@pytest.mark.parametrize("copied", [False, True], ids=["stacked", "decode_layout"])
def test_rows_of_one_batch_answer_as_their_adapters_do_alone(models, references, prompt, copied):
    shared = models["base"].engine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshtune.generate.weights.LEAST_COPIED", 0 if copied else 1 << 60)
        engine = Engine(shared.weights.params, shared.spec, shared.compute, resident=True)
    scheduler = engine.scheduler(rows=4)
    assert isinstance(next(iter(engine.weights.decoding["layers"].values())), tuple) == copied
    prompts = {name: prompt[: 20 + 7 * n] for n, name in enumerate(NAMES)}
    generations = {name: submit(scheduler, models, name, prompts[name]) for name in NAMES}
    run_to_end(scheduler)
    for name, generation in generations.items():
        likeliest, chosen = expected_tokens(references[name], prompts[name], generation.ids)
        assert generation.ids == likeliest
        np.testing.assert_allclose(probabilities(generation), chosen, atol=1e-5)
    assert len({tuple(generation.ids) for generation in generations.values()}) == len(NAMES)


def test_a_model_of_a_set_computes_with_its_own_adapter(models, references, prompt):
    for name in NAMES:
        with torch.no_grad():
            logits = references[name](input_ids=torch.tensor([prompt])).logits.numpy()
        np.testing.assert_allclose(models[name].logits([prompt]), logits, atol=1e-4)


def test_what_one_adapter_read_is_reused_by_itself_alone(models, references, prompt, monkeypatch):
    """Rows that have read the prompt are free, and the same prompt comes under another adapter, and again."""
    counts: list[int] = []

    def count(*args, original=programs.read, **options):
        counts.append(int(np.sum(options["count"])))
        return original(*args, **options)

    monkeypatch.setattr(programs, "read", count)
    scheduler, unread = models["base"].engine.scheduler(rows=4), len(prompt) - 1
    for names, read in (
        (["small", "base"], 2 * unread),
        (["base", "large", "small"], unread),
        (["large", "small", "small"], 0),
    ):
        counts.clear()
        generations = [(name, submit(scheduler, models, name, prompt)) for name in names]
        run_to_end(scheduler)
        assert sum(counts) == read
        for name, generation in generations:
            likeliest, chosen = expected_tokens(references[name], prompt, generation.ids)
            assert generation.ids == likeliest
            np.testing.assert_allclose(probabilities(generation), chosen, atol=1e-5)


def test_samples_of_one_adapter_read_their_prompt_once(models, prompt, monkeypatch):
    counts: list[int] = []

    def count(*args, original=programs.read, **options):
        counts.extend([1] if "source" not in options else [])
        return original(*args, **options)

    monkeypatch.setattr(programs, "read", count)
    scheduler = models["base"].engine.scheduler(rows=4)
    generations = [submit(scheduler, models, name, prompt) for name in ("small", "base", "small", "small")]
    run_to_end(scheduler)
    assert generations[0].ids == generations[2].ids == generations[3].ids != generations[1].ids
    assert len(counts) == 1  # both prompts in one program, the other rows from there


@pytest.mark.slow
def test_a_quantised_base_is_shared_too(stories260k, paths, prompt):
    config = QuantizeConfig("int8", modules={"down_proj": "none"})  # whose rows no block divides
    together = load_models(stories260k, paths, True, config)
    alone = load_models(stories260k, {"large": paths["large"]}, False, config)["large"]
    scheduler = together["large"].engine.scheduler(rows=4)
    generations = {name: submit(scheduler, together, name, prompt) for name in NAMES}
    run_to_end(scheduler)
    single_scheduler = alone.engine.scheduler(rows=1)
    single = submit(single_scheduler, {"large": alone}, "large", prompt)
    run_to_end(single_scheduler)
    assert generations["large"].ids == single.ids != generations["base"].ids
    np.testing.assert_allclose(probabilities(generations["large"]), probabilities(single), atol=1e-5)


def test_adapters_that_are_more_than_lora_have_a_batch_of_their_own(stories260k, paths, tmp_path):
    configs = {
        "dora": peft.LoraConfig(use_dora=True, target_modules=["q_proj"]),
        "trained": peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"]),
        "broken": peft.LoraConfig(target_modules=["q_proj"]),
    }
    for name, config in configs.items():
        base = AutoModelForCausalLM.from_pretrained(stories260k, dtype=torch.float32)
        adapted = peft.get_peft_model(base, dataclasses.replace(config, r=2, task_type="CAUSAL_LM"))
        if name == "broken":
            next(p for key, p in adapted.named_parameters() if "lora_B" in key).data[0, 0] = float("nan")
        adapted.save_pretrained(tmp_path / name)
    models = load_models(
        stories260k, {"small": paths["small"]} | {name: str(tmp_path / name) for name in configs}, True
    )
    assert {name: model.own_batch for name, model in models.items()} == {
        "base": None,
        "small": None,
        "dora": "its adapters are of the kind dora",
        "trained": "it has modules or rows that were trained in full",
        "broken": "its weights hold NaN or infinity",
    }
    assert models["base"].engine.weights is models["small"].engine.weights is not models["dora"].engine.weights
    assert [model.engine.weights.adapters for model in models.values()] == [1, 1, 0, 0, 0]
