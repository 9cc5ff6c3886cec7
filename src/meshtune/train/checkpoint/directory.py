"""The directory of a run's checkpoints: made, cleaned up, and shared by all processes of the job."""

from __future__ import annotations

import pathlib
import shutil
import uuid

from meshtune.errors import UserError
from meshtune.mesh.collective_errors import raise_collectively
from meshtune.mesh.processes import Job
from meshtune.train.checkpoint.disk import disk_errors

UNFINISHED = "orbax-checkpoint-tmp"
DAMAGED = "checkpoints-damaged"  # beside the directory: what cannot be used is moved there, never deleted


def prepare_directory(directory: pathlib.Path, job: Job) -> None:
    """Makes the directory and removes unfinished checkpoints, on process 0.

    Raises: UserError where it cannot be written, or where a process sees another directory than process 0.
    """
    token = f"shared-{job.exchange('checkpoints: token', uuid.uuid4().hex)[0]}.{UNFINISHED}"
    with raise_collectively(job, "checkpoints: directory"), disk_errors(directory):
        if job.is_main_process:
            directory.mkdir(parents=True, exist_ok=True)
            for unfinished in directory.glob(f"*.{UNFINISHED}*"):
                shutil.rmtree(unfinished)
            if job.process_count > 1:
                (directory / token).mkdir()
    with raise_collectively(job, "checkpoints: shared"):
        if job.process_count > 1 and not (directory / token).is_dir():
            raise UserError(
                f"host {job.host} does not see the directory that process 0 made for checkpoints: the output is not on "
                "storage that all hosts share",
                where=str(directory),
                fix="give an output on a shared file system, mounted at the same path on every host",
            )
    if job.is_main_process and job.process_count > 1:
        (directory / token).rmdir()


def check_same_steps(steps: list[int], directory: pathlib.Path, job: Job) -> None:
    """Raises UserError where processes list different checkpoints."""
    steps_by_process = job.exchange("checkpoints: steps", steps)
    for process_index, listed in enumerate(steps_by_process):
        if listed != steps_by_process[0]:
            raise UserError(
                f"process 0 finds the checkpoints {steps_by_process[0]}, and process {process_index} finds {listed}",
                where=str(directory),
                fix="wait until the shared file system shows the same on every host, and start again",
            )


def set_aside(directory: pathlib.Path, step: int, job: Job) -> pathlib.Path:
    """Moves a checkpoint out of `directory`, on process 0, and returns its new path; all processes call this."""
    target = directory.parent / DAMAGED / str(step)
    with raise_collectively(job, f"checkpoints: set {step} aside"), disk_errors(directory):
        if job.is_main_process:
            target.parent.mkdir(exist_ok=True)
            number = 1
            while target.exists():
                number += 1
                target = target.with_name(f"{step}-{number}")
            (directory / str(step)).rename(target)
    return pathlib.Path(job.exchange("checkpoints: aside", str(target))[0])
