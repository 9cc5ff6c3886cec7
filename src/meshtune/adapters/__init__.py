"""Training methods: adapters as data beside the weights, PEFT's file format, merging.

A new type of adapter is one module with a class that implements `kind.AdapterType`, and one line in ADAPTERS.
"""

from __future__ import annotations

from meshtune.adapters.dora import DoRA
from meshtune.adapters.kind import AdapterType
from meshtune.adapters.loftq import LoftQ
from meshtune.adapters.lora import LoRA
from meshtune.adapters.oft import OFT
from meshtune.adapters.pissa import PiSSA
from meshtune.adapters.vera import VeRA

ADAPTERS: dict[str, type[AdapterType]] = {
    "lora": LoRA,
    "dora": DoRA,
    "pissa": PiSSA,
    "loftq": LoftQ,
    "oft": OFT,
    "vera": VeRA,
}
