"""Twenty updates of DPO, KTO, ORPO and a reward model follow trl's own trainers, loss by loss.

Full tuning of a tiny random model from the same weights, on trl's own batches (recorded as its trainers make them),
AdamW, linear schedule with warm-up, clipping. Ours packs the two documents of a unit into a row, so that chosen and
rejected share it. Tolerance: 1e-3 relative on every loss, which sums of float32 in other orders keep with ease.
"""

from __future__ import annotations

import json
import pathlib

import datasets
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from units_of import loader_of

import meshtune.quickstart
from meshtune.adapters.config import FullConfig
from meshtune.adapters.method import abstract, prepare
from meshtune.families import model_spec
from meshtune.model.compute import Compute
from meshtune.objectives.stages import STAGES
from meshtune.optim.build import OptimizerConfig, make_optimizer
from meshtune.train.evaluation.reference import log_probabilities
from meshtune.train.step.build import make_train_step
from meshtune.train.step.state import init_state
from meshtune.weights.load import load_params, load_spec
from tiny_models import SMALL

pytestmark = pytest.mark.slow  # a minute and a half of CPU time

STEPS, PAIRS, RATE = 20, 4, 2e-3
TOKENIZER = pathlib.Path(meshtune.quickstart.__file__).parent / "model"
VOCABULARY = "the cat sat on a mat while seven birds sang of rain and old red boats near some hill".split()


@pytest.fixture(scope="module")
def tokenizer():
    prepared = transformers.AutoTokenizer.from_pretrained(str(TOKENIZER))
    prepared.chat_template = None
    # transformers keeps the padding token's embedding at zero and lets nothing flow into it: no text may hold it.
    prepared.add_special_tokens({"pad_token": "<unused>"})
    return prepared


def directory(root, kind, tokenizer):
    """A tiny random model of one score or over the vocabulary, as a Hugging Face directory."""
    torch.manual_seed(0)
    changes = {"vocab_size": 520, "num_hidden_layers": 2, "max_position_embeddings": 256, "num_labels": 1}
    changes |= {"pad_token_id": tokenizer.pad_token_id}
    config = transformers.AutoConfig.for_model("llama", **SMALL | changes)
    kind.from_config(config).save_pretrained(root)
    return root


def texts(seed=0):
    rng = np.random.default_rng(seed)

    def phrase(low, high):
        return " " + " ".join(rng.choice(VOCABULARY, rng.integers(low, high)))

    return [
        {"prompt": phrase(2, 5).strip(), "chosen": phrase(2, 9), "rejected": phrase(2, 9)} for _ in range(STEPS * PAIRS)
    ]


def arguments(kind, where, **options):
    return kind(
        output_dir=str(where),
        per_device_train_batch_size=PAIRS,
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="linear",
        warmup_steps=3,
        weight_decay=0.01,
        max_grad_norm=1.0,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        gradient_checkpointing=False,
        logging_steps=1000,
        **options,
    )


def recording_trainer(kind):
    """A trainer that notes the inputs and the loss of every update."""

    class Recorded(kind):
        def compute_loss(self, model, inputs, *args, **kwargs):
            tensors = {k: v.clone() for k, v in inputs.items() if isinstance(v, torch.Tensor)}
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            self.__dict__.setdefault("recorded_steps", []).append((tensors, loss.item()))
            return loss

    return Recorded


def unpad_rows(ids, mask, learned):
    """(ids, learned) of every row."""
    return [
        (i[t > 0].tolist(), (m[t > 0] > 0).tolist())
        for i, t, m in zip(ids.numpy(), mask.numpy(), learned.numpy(), strict=True)
    ]


def side_by_side(first, second, values):
    return [
        (*document, value)
        for record, two, value in zip(first, second, values, strict=True)
        for document in (record, two)
    ]


def dpo_units(inputs):
    rows = unpad_rows(inputs["input_ids"], inputs["attention_mask"], inputs["completion_mask"])
    return side_by_side(rows[: len(rows) // 2], rows[len(rows) // 2 :], [0.0] * (len(rows) // 2))


def kto_units(inputs):
    first, second = (
        unpad_rows(*(inputs[prefix + name] for name in ("input_ids", "attention_mask", "completion_mask")))
        for prefix in ("", "KL_")
    )
    return side_by_side(first, second, inputs["label"].float().tolist())


def orpo_units(inputs):
    sides = [
        unpad_rows(inputs[f"{s}_input_ids"], inputs[f"{s}_attention_mask"], (inputs[f"{s}_labels"] != -100).int())
        for s in ("chosen", "rejected")
    ]
    return side_by_side(*sides, [0.0] * len(sides[0]))


def reward_units(inputs):
    """As data.units makes them: the score is read where a token after the last would be predicted."""
    rows = [ids for ids, _ in unpad_rows(inputs["input_ids"], inputs["attention_mask"], inputs["attention_mask"])]
    rows = [([*ids, ids[-1]], [0] * len(ids) + [1]) for ids in rows]
    return side_by_side(rows[: len(rows) // 2], rows[len(rows) // 2 :], [0.0] * (len(rows) // 2))


def our_losses(stage, options, batches, root, cache, **units):
    spec, _ = load_spec(root, "float32")
    prepared = prepare(FullConfig(), spec, load_params(root, spec), jax.random.key(0))
    config = OptimizerConfig(learning_rate=RATE, weight_decay=0.01, schedule="linear", warmup_steps=3)
    optimizer, _ = make_optimizer(config, STEPS, abstract(FullConfig(), spec).trainable)
    kind = STAGES[stage]
    objective, compute = kind.make(kind.config(**options)), Compute(loss_chunk=64)
    loaders = [loader_of(documents, cache, max_length=64, **units) for documents in batches]
    for loader in loaders:
        loader.row_length = 128  # one shape, one compilation
        if kind.needs_reference:
            start = jax.tree.map(jnp.copy, prepared.trainable)
            loader.units = loader.units.__class__(
                reference=log_probabilities(start, prepared.spec, compute, loader), **units
            )
    step = make_train_step(objective, prepared.spec, compute, optimizer, max_grad_norm=1.0)
    state, losses = init_state(prepared.trainable, optimizer), []
    for loader in loaders:
        batch = jax.tree.map(jnp.asarray, loader.batch(0).arrays)
        state, metrics = step(state, prepared.frozen, batch, jnp.int32(0))
        losses.append(float(metrics["loss"]))
    return np.array(losses)


def follow(trainer, units, stage, options, root, tmp_path, **unit_options):
    trainer.train()
    recorded_steps = trainer.recorded_steps
    assert len(recorded_steps) == STEPS
    theirs = np.array([loss for _, loss in recorded_steps])
    batches = [units(inputs) for inputs, _ in recorded_steps]
    ours = our_losses(stage, options, batches, root, tmp_path / "cache", **unit_options)
    np.testing.assert_allclose(ours, theirs, rtol=1e-3)
    assert np.abs(theirs - theirs[0]).max() > 0.01, "the run must move, or following it proves nothing"


def test_dpo(tmp_path, tokenizer):
    root = directory(tmp_path / "model", transformers.AutoModelForCausalLM, tokenizer)
    model = transformers.AutoModelForCausalLM.from_pretrained(root)
    ask = arguments(DPOConfig, tmp_path / "run", beta=0.3, max_length=64)
    trainer = recording_trainer(DPOTrainer)(
        model=model, args=ask, train_dataset=datasets.Dataset.from_list(texts()), processing_class=tokenizer
    )
    follow(trainer, dpo_units, "dpo", {"beta": 0.3}, root, tmp_path)
    assert trainer.recorded_steps[0][1] == pytest.approx(np.log(2), abs=1e-6)


def test_kto(tmp_path, tokenizer):
    root = directory(tmp_path / "model", transformers.AutoModelForCausalLM, tokenizer)
    model = transformers.AutoModelForCausalLM.from_pretrained(root)
    rows = [
        {"prompt": record["prompt"], "completion": record["chosen"], "label": bool(n % 3)}
        for n, record in enumerate(texts(1))
    ]
    ask = arguments(KTOConfig, tmp_path / "run", beta=0.3, max_length=64, undesirable_weight=1.5)
    trainer = recording_trainer(KTOTrainer)(
        model=model, args=ask, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
    )
    follow(trainer, kto_units, "kto", {"beta": 0.3, "undesirable_weight": 1.5}, root, tmp_path)


def test_orpo(tmp_path, tokenizer):
    root = directory(tmp_path / "model", transformers.AutoModelForCausalLM, tokenizer)
    model = transformers.AutoModelForCausalLM.from_pretrained(root)
    ask = arguments(ORPOConfig, tmp_path / "run", beta=0.3, max_length=64, remove_unused_columns=False)
    trainer = recording_trainer(ORPOTrainer)(
        model=model, args=ask, train_dataset=datasets.Dataset.from_list(texts(2)), processing_class=tokenizer
    )
    follow(trainer, orpo_units, "orpo", {"beta": 0.3}, root, tmp_path, nll="all")  # trl's covers the prompt too


def test_reward_model(tmp_path, tokenizer):
    root = directory(tmp_path / "model", transformers.AutoModelForSequenceClassification, tokenizer)
    assert model_spec(json.loads((root / "config.json").read_text())).scored
    model = transformers.AutoModelForSequenceClassification.from_pretrained(root, num_labels=1)
    ask = arguments(RewardConfig, tmp_path / "run", max_length=64, center_rewards_coefficient=0.05)
    trainer = recording_trainer(RewardTrainer)(
        model=model, args=ask, train_dataset=datasets.Dataset.from_list(texts(3)), processing_class=tokenizer
    )
    follow(trainer, reward_units, "rm", {"centre": 0.05}, root, tmp_path)
