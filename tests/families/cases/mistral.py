"""Mistral, with and without a sliding window."""

from __future__ import annotations

from families.case import Case

CASES = (
    Case("mistral_window", "mistral", {"sliding_window": 7}),
    Case("mistral", "mistral", {"sliding_window": None}, variant=True),
)
