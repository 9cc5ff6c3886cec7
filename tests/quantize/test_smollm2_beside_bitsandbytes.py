"""The real 135M model in nf4: the loss is that of the weights that bitsandbytes makes of it, in transformers."""

from __future__ import annotations

import json

import bitsandbytes.functional as bnb
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from meshtune.model.compute import Compute
from meshtune.model.decoder import forward, logits
from meshtune.model.inputs import Inputs
from meshtune.quantize.config import QuantizeConfig
from meshtune.weights.load import load_params, load_spec

ROWS, LENGTH = 8, 192


@pytest.fixture(scope="module")
def ids(smollm2, shared):
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    records = json.loads((shared / "assets/data/llamafactory/alpaca_en_demo.json").read_text())[:60]
    tokens: list[int] = []
    for record in records:
        turns = [("user", f"{record['instruction']}\n{record.get('input', '')}"), ("assistant", record["output"])]
        messages = [{"role": role, "content": text} for role, text in turns]
        tokens += tokenizer.apply_chat_template(messages, return_dict=False)
    return np.array(tokens[: ROWS * LENGTH]).reshape(ROWS, LENGTH).astype(np.int32)


def loss(directory, config, ids):
    spec, _ = load_spec(directory, "float32")
    params = load_params(directory, spec, quantize=config)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), ids.shape)

    @jax.jit
    def mean(params, ids):
        inputs = Inputs(ids, positions, jnp.ones_like(ids))
        hidden = forward(params, spec, Compute(attention="direct"), inputs).hidden
        scores = jax.nn.log_softmax(logits(params, spec, hidden)[:, :-1])
        return -jnp.take_along_axis(scores, ids[:, 1:, None], -1).mean()

    return float(mean(params, jnp.asarray(ids)))


@pytest.mark.slow
def test_nf4_costs_what_it_costs_with_bitsandbytes(smollm2, ids):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    tokens = torch.from_numpy(ids).long()
    with torch.no_grad():
        full = theirs(tokens, labels=tokens).loss.item()
        for module in theirs.model.modules():
            if isinstance(module, torch.nn.Linear):
                packed, state = bnb.quantize_4bit(module.weight.data, blocksize=64, quant_type="nf4")
                module.weight.data = bnb.dequantize_4bit(packed, state)
        expected = theirs(tokens, labels=tokens).loss.item()
    got = loss(smollm2, QuantizeConfig("nf4", double=False), ids)
    assert abs(got - expected) < 1e-4 * expected  # equal weights; float32 sums in another order
    assert abs(loss(smollm2, QuantizeConfig("nf4"), ids) - expected) < 2e-3 * expected  # scales in 8 bits
    assert expected > 1.05 * full, "4 bits cost so small a model a tenth of its loss, whoever makes them"


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_8_bits_leave_the_loss_as_it_was(format, smollm2, ids):
    full = loss(smollm2, None, ids)
    assert abs(loss(smollm2, QuantizeConfig(format), ids) - full) < 5e-3 * full
