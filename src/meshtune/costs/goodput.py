"""Goodput of a run that fails now and then: the share of its time that goes into updates that are kept.

All times are in seconds. `interval` is the time of updates between two saves, `save` the time that a save keeps the
updates waiting, `write` the time that it is written in the background after that, `restart` the time from a failure to
the next update, and `mtbf` the mean time from a restart to the next failure.
"""

from __future__ import annotations

import math

# Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 H100 (https://arxiv.org/abs/2407.21783, 3.3.4).
FAILURES_PER_CHIP_DAY = 419 / (54 * 16384)


def mean_time_between_failures(chips: int) -> float:
    """The expected time between failures of a job on `chips` devices, at the rate of Llama 3's training."""
    return 86400 / (FAILURES_PER_CHIP_DAY * chips)


def goodput(interval: float, save: float, restart: float, mtbf: float, write: float = 0.0) -> float:
    """The expected share of useful time, where failures come at random (a Poisson process) between restarts.

    On average a failure loses half an interval and `write`, the saves cost `save` each, and `restart` passes without
    updates. Source: J. T. Daly, Future Generation Computer Systems 22 (2006), section 3, with restarts that do not
    fail. There a save counts when updates go on; one written in the background counts only if no failure comes in the
    `write` seconds after that, the share exp(-write / mtbf) of them.
    """
    try:
        return interval * math.exp(-write / mtbf) / ((mtbf + restart) * math.expm1((interval + save) / mtbf))
    except OverflowError:
        return 0.0


def best_interval(save: float, mtbf: float) -> float:
    """The interval with the highest goodput, which does not depend on the time of a restart.

    Daly's higher-order estimate (equation 37), whose first term is Young's sqrt(2 * save * mtbf).
    """
    if save >= 2 * mtbf:
        return mtbf
    ratio = math.sqrt(save / (2 * mtbf))
    return math.sqrt(2 * save * mtbf) * (1 + ratio / 3 + ratio**2 / 9) - save
