"""The goodput of a long run on many devices, the bytes of its saves and restarts, and its first limit."""

from __future__ import annotations

import dataclasses
import math

from meshtune.costs.goodput import best_interval, goodput, mean_time_between_failures
from meshtune.costs.roofline import EFFICIENCY, device_rate
from meshtune.costs.workload import Candidate
from meshtune.errors import UserError

STORAGE = 10e9  # bytes/s of a job's shared storage, if it is not given
# Assumed seconds from a failure to the first update without reading anything: to notice it, to start processes again in
# their place, and to compile from a cache.
START = 120.0
SAVE_START = 1.0  # assumed seconds that updates wait for any save, however small
SAVES = 10  # of a run, by default
RESTARTS = 20  # after lost processes, by launch slurm and launch k8s (launch/slurm.py)
# Measured on one core: what a stream tokenises, and the tokens of batches that the loader builds.
STREAM_TOKENS, BATCH_TOKENS = 0.95e6, 25e6  # a second
LOST = 0.05  # of the time, above which failures are worth doing something about
TRAINED = ("full", "adapter", "optimizer")


@dataclasses.dataclass(frozen=True)
class Limit:
    """Something that grows with a run: `load` is its share of what it may be, and it breaks above 1."""

    name: str
    load: float
    text: str


@dataclasses.dataclass(frozen=True)
class Reliability:
    """A run of `seconds` on devices that fail every `mtbf` seconds on average.

    `save_bytes` are those of a checkpoint. Updates wait for it for `save_seconds`, and writing it takes `write_seconds`
    more.
    `restart_bytes` are read from storage at a restart, by all replicas together, in a time that `restart_seconds`
    includes. `interval` is the best one between saves and `goodput` the share of time in updates with it;
    `default_goodput` that with SAVES saves a run. `limits` has the one that breaks first at its head.
    """

    seconds: float
    mtbf: float
    save_bytes: float
    write_seconds: float
    save_seconds: float
    restart_bytes: float
    restart_seconds: float
    interval: float
    goodput: float
    default_goodput: float
    limits: list[Limit]

    @property
    def failures(self) -> float:
        """The expected number of failures."""
        return self.seconds / self.mtbf


def reliability_of(
    candidate: Candidate, step_seconds: float, seconds: float, *, mtbf: float | None = None, storage: float = STORAGE
) -> Reliability:
    """The reliability of a run with this step. `mtbf` of the whole job is by default that of Llama 3's training,
    `storage` is in bytes a second. Raises: UserError for times and speeds that are not positive."""
    for flag, value in (("--days", seconds), ("--mtbf", mtbf), ("--storage", storage)):
        if value is not None and not value > 0:
            raise UserError(f"{value:g} is not above 0", where=flag, fix="give a positive number, or leave it out")
    devices, device = candidate.target.devices, candidate.target.device
    mtbf = mean_time_between_failures(devices) if mtbf is None else mtbf
    save_bytes = _total_bytes(candidate, *TRAINED)
    # A copy in the hosts' memory, while updates wait; it is written while they go on.
    snapshot = SAVE_START + save_bytes / devices / (device_rate(device, "host_link") * EFFICIENCY["host"])
    write_seconds = save_bytes / storage
    readers = 1 if candidate.workload.recipe.model.load == "replica" else candidate.mesh.dp
    restart_bytes = readers * (_total_bytes(candidate, "frozen") + save_bytes)
    restart_seconds = START + restart_bytes / storage
    unlimited = best_interval(snapshot, mtbf)  # by a storage that is fast enough
    interval = max(unlimited, write_seconds, step_seconds)
    default = seconds / SAVES
    limits = _limits(candidate, step_seconds, seconds, mtbf, unlimited, write_seconds, restart_seconds)
    return Reliability(
        seconds=seconds,
        mtbf=mtbf,
        save_bytes=save_bytes,
        write_seconds=write_seconds,
        save_seconds=snapshot,
        restart_bytes=restart_bytes,
        restart_seconds=restart_seconds,
        interval=interval,
        goodput=goodput(interval, snapshot, restart_seconds, mtbf, write_seconds),
        default_goodput=goodput(default, snapshot, restart_seconds, mtbf, write_seconds),
        limits=sorted(limits, key=lambda limit: -limit.load),
    )


def _limits(
    candidate: Candidate,
    step: float,
    seconds: float,
    mtbf: float,
    interval: float,
    write: float,
    restart: float,
) -> list[Limit]:
    """Loads of 1 are: a twentieth of the time lost to repeated updates or to restarts, storage that writes all the
    time, all restarts used up, and one core that only tokenises or builds batches."""
    tokens = candidate.rows * candidate.length * candidate.accumulation
    lost = seconds / SAVES / 2 / mtbf
    limits = [
        Limit("saves", lost / LOST, f"{SAVES} saves a run repeat {math.ceil(seconds / SAVES / 120):,} min a failure"),
        Limit("restarts", restart / mtbf / LOST, f"{START:,.0f} s and {restart - START:,.0f} s of reading at each"),
        Limit(
            "storage", write / interval, f"writing a save takes {write:,.0f} s, and one is due every {interval:,.0f} s"
        ),
        Limit("restart budget", seconds / mtbf / RESTARTS, f"{seconds / mtbf:,.1f} failures, of {RESTARTS} restarts"),
        Limit("batches", tokens / BATCH_TOKENS / step, f"a core builds a batch of {tokens:,} tokens"),
    ]
    if candidate.workload.recipe.data.streaming:
        each = tokens / step / candidate.target.hosts
        limits.append(Limit("stream", each / STREAM_TOKENS, f"{each:,.0f} tokens a second to tokenise on each host"))
    return limits


def _total_bytes(candidate: Candidate, *roles: str) -> float:
    """Bytes of a whole copy of the persistent arrays with these roles."""
    arrays = (array for array in candidate.workload.persistent if array.role in roles)
    return sum(array.size * array.itemsize for array in arrays)
