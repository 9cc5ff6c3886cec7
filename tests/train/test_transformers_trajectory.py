"""Thirty steps of LoRA and of full tuning follow transformers' own Trainer (with peft), step by step.

Same weights, same adapter start (written by peft, read here), same rows in the same order, AdamW, linear schedule with
warm-up, gradient clipping, accumulation of two. The Trainer's batches are padded and its loss divides by all supervised
tokens of the update; ours are packed. Tolerance: 1e-3 relative on every step's loss and on the last one, which float32
sums in different orders keep with ease and any wrong weight, mask, schedule or scale does not.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers
from optimizer_problems import abstract_of

from meshtune.adapters.config import FullConfig
from meshtune.adapters.method import prepare
from meshtune.adapters.peft_format import attach, load_adapter
from meshtune.arrays.tree import split
from meshtune.model.compute import Compute
from meshtune.objectives.sft import sft_objective
from meshtune.optim.build import OptimizerConfig, make_optimizer
from meshtune.train.step.build import make_train_step
from meshtune.train.step.state import init_state
from tiny_models import same_weights, torch_model

STEPS, ROWS, ACCUMULATION = 30, 4, 2


def documents(vocab: int, longest: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids, supervised) of every document, in the order of the run: the first third is not learned from."""
    rng = np.random.default_rng(7)
    common = rng.integers(5, vocab, 40)  # a small vocabulary to learn, so that the loss falls
    pairs = []
    for _ in range(STEPS * ROWS * ACCUMULATION):
        ids = rng.choice(common, rng.integers(longest // 2, longest))
        pairs.append((ids, np.arange(len(ids)) >= len(ids) // 3))
    return pairs


class Rows(torch.utils.data.Dataset):
    def __init__(self, docs):
        self.docs = docs

    def __len__(self):
        return len(self.docs)

    def __getitem__(self, index):
        ids, learned = self.docs[index]
        return {"input_ids": ids.tolist(), "labels": np.where(learned, ids, -100).tolist()}


def pad_rows(rows):
    longest = max(len(row["input_ids"]) for row in rows)

    def fill(key, value):
        return torch.tensor([row[key] + [value] * (longest - len(row[key])) for row in rows])

    ids = fill("input_ids", 0)
    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": fill("labels", -100)}


def trainer_losses(model, docs, rate, where) -> np.ndarray:
    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(Rows(docs))

    arguments = transformers.TrainingArguments(
        output_dir=str(where),
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=ACCUMULATION,
        max_steps=STEPS,
        learning_rate=rate,
        lr_scheduler_type="linear",
        warmup_steps=3,
        weight_decay=0.01,
        max_grad_norm=1.0,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    model.train()
    trainer = InOrder(model=model, args=arguments, train_dataset=Rows(docs), data_collator=pad_rows)
    trainer.train()
    return np.array([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


def pack_rows(docs, length) -> dict[str, np.ndarray]:
    """One update's documents as [A, rows, T], two documents a row."""
    batch = {k: np.zeros((ROWS, length), np.int32) for k in ("tokens", "targets", "positions", "segment_ids")}
    batch["weights"] = np.zeros((ROWS, length), np.float32)
    for number, (ids, learned) in enumerate(docs):
        row, at = number // 2, int(batch["segment_ids"][number // 2].astype(bool).sum())
        n = len(ids) - 1
        span = np.s_[row, at : at + n]
        batch["tokens"][span], batch["targets"][span], batch["positions"][span] = ids[:-1], ids[1:], np.arange(n)
        batch["segment_ids"][span], batch["weights"][span] = number % 2 + 1, learned[1:]
    return {k: v.reshape(2, ROWS // 2, length) for k, v in batch.items()}


def our_losses(spec, trainable, frozen, docs, rate, length) -> np.ndarray:
    config = OptimizerConfig(
        learning_rate=rate,
        weight_decay=0.01,
        schedule="linear",
        warmup_steps=3,
    )
    optimizer, _ = make_optimizer(config, STEPS, abstract_of(trainable))
    step = make_train_step(sft_objective, spec, Compute(loss_chunk=64), optimizer, max_grad_norm=1.0)
    state, losses, update = init_state(trainable, optimizer), [], ROWS * ACCUMULATION
    for number in range(STEPS):
        batch = pack_rows(docs[number * update : (number + 1) * update], length)
        state, metrics = step(state, frozen, jax.tree.map(jnp.asarray, batch), jnp.int32(0))
        losses.append(float(metrics["loss"]))
    return np.array(losses)


def start(model, method, tmp_path):
    """(torch model to train, our spec, trainable, frozen), from the same numbers."""
    spec, params = same_weights(model)
    if method == "full":
        prepared = prepare(FullConfig(), spec, params, jax.random.key(0))
        return model, prepared.spec, prepared.trainable, prepared.frozen
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)
    model.save_pretrained(tmp_path / "start")
    spec, params = attach(params, spec, load_adapter(tmp_path / "start", spec))
    trainable, frozen = split(params, lambda path: path.endswith("/adapter"))
    return model, spec, trainable, frozen


def follow(model, method, vocab, longest, rate, tmp_path):
    docs = documents(vocab, longest)
    model, spec, trainable, frozen = start(model, method, tmp_path)
    ours = our_losses(spec, trainable, frozen, docs, rate, length=2 * longest)
    theirs = trainer_losses(model, docs, rate, tmp_path / "trainer")
    assert theirs.shape == (STEPS,)
    assert theirs[-5:].mean() < theirs[:5].mean() * 0.95, "the run must learn, or following it proves nothing"
    np.testing.assert_allclose(ours, theirs, rtol=1e-3)


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("qwen3", "lora"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("llama_tied", "full"), ("qwen3", "full"), ("llama_tied", "lora"))
        ),
    ],
)
def test_thirty_steps_follow_the_trainer(family, method, tmp_path):
    follow(torch_model(family), method, 97, 24, {"lora": 1e-2, "full": 3e-3}[method], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # transformers takes most of it
@pytest.mark.parametrize("method", ["lora", "full"])
def test_thirty_steps_on_smollm2_follow_the_trainer(smollm2, method, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    follow(model, method, 49152, 48, {"lora": 2e-4, "full": 2e-5}[method], tmp_path)
