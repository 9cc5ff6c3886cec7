"""What is trained, and how: adapters as data beside the weights, the methods, PEFT's format in and out, merging.

A new kind of adapter is one module with a class like `lora.LoRA` and one line in ADAPTERS.
"""

from __future__ import annotations

from typing import Any

from meshtune.adapters.lora import LoRA

ADAPTERS: dict[str, Any] = {"lora": LoRA}
