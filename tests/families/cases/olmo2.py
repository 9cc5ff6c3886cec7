"""OLMo 2: norms after the blocks, queries and keys normalised over all heads."""

from __future__ import annotations

from families.case import Case

CASES = (Case("olmo2", "olmo2"), Case("olmo2_bias", "olmo2", {"attention_bias": True}))
