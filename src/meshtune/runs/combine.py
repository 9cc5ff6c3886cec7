"""Combines adapters after verifying their digests, and writes digests of the result."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Literal

from meshtune.adapters.combine import Combined, combine
from meshtune.digests import write_digests
from meshtune.runs.output import check_result


def combine_checked(
    sources: Sequence[str | os.PathLike[str]],
    dest: str | os.PathLike[str],
    weights: Sequence[float],
    method: str = "svd",
    *,
    rank: int | None = None,
    density: float | None = None,
    majority: Literal["total", "frequency"] = "total",
    seed: int = 0,
    any_base: bool = False,
) -> Combined:
    """Verifies the digests of each adapter, calls `adapters.combine.combine`, and writes digests of the result.

    Raises: UserError as `combine` does, and DamagedError for an adapter with damaged files.
    """
    for source in sources:
        check_result(pathlib.Path(source).expanduser())
    return combine(
        sources,
        dest,
        weights,
        method,
        rank=rank,
        density=density,
        majority=majority,
        seed=seed,
        any_base=any_base,
        finish=write_digests,
    )
