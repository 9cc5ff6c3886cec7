"""Cases for tests that run on a GPU, and in small on the CPU."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def on_both(
    cases: Iterable[tuple[Any, ...]],
    quick: Collection[tuple[Any, ...]],
    slow: Collection[tuple[Any, ...]] | None = None,
) -> list[Any]:
    """Parameters (platform, *case): all cases on the GPU; on the CPU `quick` in the fast and `slow` in the slow tier.

    Without `slow` those are all the others.
    """
    cases = list(cases)
    slow = [case for case in cases if case not in quick] if slow is None else slow
    on_cpu = [pytest.param("cpu", *case, marks=[] if case in quick else [pytest.mark.slow]) for case in (*quick, *slow)]
    return on_cpu + [pytest.param("gpu", *case, marks=pytest.mark.gpu) for case in cases]
