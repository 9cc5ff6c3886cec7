"""Cases for tests that run on a GPU, and in small on the CPU."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def on_both(cases: Iterable[tuple[Any, ...]], quick: Collection[tuple[Any, ...]]) -> list[Any]:
    """Parameters (platform, *case): all on the GPU; on the CPU `quick` in the fast tier, the others in the slow one."""
    cases = list(cases)
    on_cpu = [pytest.param("cpu", *case, marks=[] if case in quick else [pytest.mark.slow]) for case in cases]
    return on_cpu + [pytest.param("gpu", *case, marks=pytest.mark.gpu) for case in cases]
