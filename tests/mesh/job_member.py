"""One process of a small job, as the tests start them: `python job_member.py WHAT`, placed by the environment.

It prints a line of JSON for each thing worth asserting.
"""

from __future__ import annotations

import json
import os
import sys
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshtune.errors import UserError
from meshtune.mesh.agreement import agree, code_version
from meshtune.mesh.processes import Job, start
from meshtune.mesh.stop_flag import StopFlag
from meshtune.train.interrupt import interruptible


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def summing():
    """(a step that every device takes part in, its argument)"""
    mesh = Mesh(np.array(jax.devices()), ("all",))
    sharding = NamedSharding(mesh, PartitionSpec("all"))
    ones = jax.make_array_from_process_local_data(sharding, np.ones((jax.local_device_count(), 64), np.float32))
    return jax.jit(lambda x: (x @ x.T).sum()), ones


def work(job: Job) -> None:
    """Collective steps until something ends the job; process 1 may raise."""
    step, ones = summing()
    job.exchange("ready", None)
    say(devices=jax.device_count(), local=jax.local_device_count())
    for number in range(10**6):
        value = float(step(ones))
        if number == 3:
            say(value=value, pid=os.getpid())
        if number == 5 and job.process == 1 and "raise" in sys.argv:
            raise UserError("record 7 is not JSON", where="data.jsonl, line 7", fix="correct it")
        if number == 5 and job.process == 1 and "crash" in sys.argv:
            raise OSError(28, "No space left on device")
        if number == 5 and job.process == 0 and "idle" in sys.argv:
            time.sleep(1000)  # not in a collective operation when the other is lost
        if number == 20 and "short" in sys.argv:
            return


def stop(job: Job) -> int:
    """Updates that end together after one process has a signal."""
    step, ones = summing()
    flag, done = StopFlag(), 0
    job.exchange("ready", None)
    with interruptible() as interrupt:
        say(pid=os.getpid())
        while True:
            step(ones)
            done += 1
            flag.submit(interrupt.received, 1.0 + job.process)
            if done > 1 and (agreed := flag.agreed()).signal:
                break
            time.sleep(0.01)
    say(done=done, signal=agreed.signal, skew=agreed.skew)
    return 128 + agreed.signal


def main() -> int:
    with start(timeout=float(os.environ.get("TIMEOUT", "30"))) as job:
        fields = {"seed": 0, "train": {"batch_size": 16 if "differ" not in sys.argv else 16 + job.process}}
        agree(job, "the code", code_version(), fix="run the same image")
        agree(job, "the recipe", fields, fix="give every process the same recipe")
        if "stop" in sys.argv:
            return stop(job)
        work(job)
    return 0


if __name__ == "__main__":
    try:
        code = main()
    except UserError as error:
        print(f"user error: {error.what}", file=sys.stderr, flush=True)
        sys.exit(2)
    sys.exit(code)
