"""Apertus: the numbers of its activation, xIELU, are in the metadata, one of every layer."""

from __future__ import annotations

from meshtune.families.gguf.architecture import QKV, Architecture
from meshtune.model.mlp import XIELU

NUMBERS = ("alpha_p", "alpha_n", "beta", "eps")


APERTUS = Architecture(
    "apertus",
    "ApertusForCausalLM",
    activation=XIELU,
    biases=QKV | {"attn/o"},
    head="own",
    config={"hidden_act": XIELU},
    listed={f"mlp/{XIELU}/{number}": f"{XIELU}.{number}" for number in NUMBERS},
)
