"""The types of adapters. A new one is one module with a class that implements `kind.AdapterType`, and a line in each
table here."""

from __future__ import annotations

from collections.abc import Mapping

from meshtune.adapters.config import AdapterName
from meshtune.adapters.kind import AdapterType
from meshtune.lazy import LazyTable

ADAPTERS: Mapping[AdapterName, type[AdapterType]] = LazyTable(
    {
        "lora": "meshtune.adapters.lora:LoRA",
        "dora": "meshtune.adapters.dora:DoRA",
        "pissa": "meshtune.adapters.pissa:PiSSA",
        "loftq": "meshtune.adapters.pissa:LoftQ",
        "oft": "meshtune.adapters.oft:OFT",
        "vera": "meshtune.adapters.vera:VeRA",
    }
)

# The fields of an adapter_config.json that identify the type; where several fit, the one with the most fields.
PEFT_FIELDS: dict[AdapterName, dict[str, object]] = {
    "lora": {"peft_type": "LORA", "use_dora": False},
    "dora": {"peft_type": "LORA", "use_dora": True},
    "pissa": {"peft_type": "LORA", "use_dora": False, "init_lora_weights": "pissa"},
    "loftq": {"peft_type": "LORA", "use_dora": False},
    "oft": {"peft_type": "OFT"},
    "vera": {"peft_type": "VERA"},
}
