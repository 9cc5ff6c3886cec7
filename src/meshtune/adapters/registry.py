"""The types of adapters. A new one is one module with a class that implements `kind.AdapterType`, and one line here."""

from __future__ import annotations

from meshtune.adapters.config import AdapterName
from meshtune.adapters.dora import DoRA
from meshtune.adapters.kind import AdapterType
from meshtune.adapters.lora import LoRA
from meshtune.adapters.oft import OFT
from meshtune.adapters.pissa import LoftQ, PiSSA
from meshtune.adapters.vera import VeRA

ADAPTERS: dict[AdapterName, type[AdapterType]] = {
    "lora": LoRA,
    "dora": DoRA,
    "pissa": PiSSA,
    "loftq": LoftQ,
    "oft": OFT,
    "vera": VeRA,
}
