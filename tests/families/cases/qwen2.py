"""Qwen2, with windows in its last layer and without."""

from __future__ import annotations

from families.case import Case

CASES = (
    Case("qwen2_window", "qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3}),
    Case("qwen2", "qwen2", variant=True),
)
