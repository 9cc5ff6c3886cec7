"""One process of a small job, for tests: `python job_process.py WORDS` in an environment as a launcher sets it.

Prints a line of JSON for each fact that tests assert.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshtune.errors import UserError
from meshtune.mesh.agreement import StopFlag, code_version, require_agreement
from meshtune.mesh.processes import Job, start
from meshtune.train.loop import interruptible
from meshtune.train.watchdog import Watchdog


def record(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def collective_step():
    """(a jitted function with a collective over all devices, its argument)"""
    mesh = Mesh(np.array(jax.devices()), ("all",))
    sharding = NamedSharding(mesh, PartitionSpec("all"))
    ones = jax.make_array_from_process_local_data(sharding, np.ones((jax.local_device_count(), 64), np.float32))
    return jax.jit(lambda x: (x @ x.T).sum()), ones


def work(job: Job) -> None:
    """Runs collective steps until the job ends; the arguments decide which process raises, idles or returns."""
    step, ones = collective_step()
    job.barrier("ready")
    record(devices=jax.device_count(), local=jax.local_device_count())
    if job.process_index == 1 and "late" in sys.argv:
        time.sleep(1000)
    for index in range(10**6):
        value = float(step(ones))
        if index == 3:
            record(value=value, pid=os.getpid())
        if index == 5 and job.process_index == 1 and "raise" in sys.argv:
            raise UserError("record 7 is not JSON", where="data.jsonl, line 7", fix="correct it")
        if index == 5 and job.process_index == 1 and "crash" in sys.argv:
            raise OSError(28, "No space left on device")
        if index == 5 and job.process_index == 0 and "idle" in sys.argv:
            if "thread" in sys.argv:  # that waits for the others, as a server's when its first request comes
                threading.Thread(target=job.barrier, args=("a request",), daemon=True).start()
            time.sleep(1000)  # not in a collective operation when the other process is lost
        if index == 20 and "short" in sys.argv:
            return


def run_until_signal(job: Job) -> int:
    """Runs updates until the stop flag says that a process received a signal."""
    step, ones = collective_step()
    flag, updates = StopFlag(), 0
    job.barrier("ready")
    with interruptible() as interrupt:
        record(pid=os.getpid())
        while True:
            step(ones)
            updates += 1
            flag.submit(interrupt.received, 1.0 + job.process_index)
            if updates > 1 and (decision := flag.decision()).signal:
                break
            time.sleep(0.01)
    record(updates=updates, signal=decision.signal, skew=decision.skew)
    return 128 + decision.signal


def stall(job: Job) -> None:
    """Runs updates under a watchdog, until the main thread of process 1 sleeps before one of them."""
    step, ones = collective_step()
    job.barrier("ready")
    with Watchdog(job, factor=2.0, seconds=8.0) as watchdog:
        for index in range(10**6):
            if index == 5 and job.process_index == 1:
                time.sleep(1000)
            watchdog.step()
            value = step(ones)
            watchdog.step()
            value.block_until_ready()
            watchdog.update()


def main() -> int:
    with start(timeout=float(os.environ.get("TIMEOUT", "30"))) as job:
        fields = {"seed": 0, "train": {"batch_size": 16 if "differ" not in sys.argv else 16 + job.process_index}}
        require_agreement(job, "the code", code_version(), fix="run the same image")
        require_agreement(job, "the recipe", fields, fix="give every process the same recipe")
        if "stop" in sys.argv:
            return run_until_signal(job)
        if "stall" in sys.argv:
            stall(job)
        work(job)
    return 0


if __name__ == "__main__":
    try:
        code = main()
    except UserError as error:
        print(f"user error: {error.what}", file=sys.stderr, flush=True)
        sys.exit(2)
    sys.exit(code)
