"""What is trained, and how: adapters as data beside the weights, the methods, PEFT's format in and out, merging.

A new kind of adapter is one module with a class as `kind.Kind` describes it, and one line in ADAPTERS.
"""

from __future__ import annotations

from typing import Any

from meshtune.adapters.dora import DoRA
from meshtune.adapters.loftq import LoftQ
from meshtune.adapters.lora import LoRA
from meshtune.adapters.oft import OFT
from meshtune.adapters.pissa import PiSSA
from meshtune.adapters.vera import VeRA

ADAPTERS: dict[str, Any] = {"lora": LoRA, "dora": DoRA, "pissa": PiSSA, "loftq": LoftQ, "oft": OFT, "vera": VeRA}
