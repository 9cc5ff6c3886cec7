"""A batch script for Slurm: readable, restarted where it was stopped, checked before it spends time."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shlex
import shutil
import signal
import subprocess

from meshtune.errors import UserError, nearest
from meshtune.launch.order import Order, label, program
from meshtune.mesh.protocol import EXIT_PROCESS_LOST

BODY = pathlib.Path(__file__).with_name("slurm_body.sh")
RESTARTS = 20  # after losing a process; a time limit or preemption restarts without end
TIMES = r"\d+(:[0-5]?\d){0,2}|\d+-\d+(:[0-5]?\d){0,2}"  # sbatch: minutes, h:m[:s], days-hours[:m[:s]]
MAIL = ("NONE", "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "TIME_LIMIT", "TIME_LIMIT_90", "TIME_LIMIT_80")
RUNTIMES = ("pyxis", "apptainer")


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked of Slurm. `gpus` and `processes` are for each node, `warning` seconds before the time limit.

    `container` is an image: a .sif file runs by Apptainer, any other by pyxis unless `runtime` says so; `mounts` are
    shared directories it sees besides those of the run.
    """

    nodes: int
    gpus: int
    processes: int = 1
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    name: str | None = None
    cpus: int | None = None
    memory: str | None = None
    mail: str | None = None
    mail_type: str = "END,FAIL"
    warning: int = 120
    container: str | None = None
    runtime: str | None = None
    mounts: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    def __post_init__(self):
        if self.time is not None and not re.fullmatch(TIMES, self.time):
            raise UserError(f"'{self.time}' is not a time", where="--time", fix="write it as 4:00:00 or 2-00:00:00")
        if self.gpus and self.gpus % self.processes:
            raise UserError(
                f"{self.gpus} GPUs a node do not divide by {self.processes} processes",
                where="--processes-per-node",
                fix="leave it out: one process drives all GPUs of its node",
            )
        for kind in self.mail_type.split(","):
            if kind not in MAIL:
                raise UserError(
                    f"'{kind}' is not a kind of mail", where="--mail-type", fix=nearest(kind, MAIL) + ", ".join(MAIL)
                )
        if self.runtime not in (None, *RUNTIMES):
            raise UserError(
                f"'{self.runtime}' is no container runtime",
                where="--container-runtime",
                fix=nearest(self.runtime or "", RUNTIMES) + ", ".join(RUNTIMES),
            )
        for option in self.options:
            if not option.startswith("-"):
                raise UserError(
                    f"'{option}' is not an option of sbatch", where="--sbatch", fix="as in --constraint=h100"
                )


def script(order: Order, request: Request) -> str:
    """The batch script."""
    return "\n".join(_header(order, request)) + "\n" + _body(order, request)


def submit(path: pathlib.Path) -> str:
    """Hands the script to sbatch; returns the job's number. Raises UserError with what sbatch says."""
    if shutil.which("sbatch") is None:
        raise UserError("sbatch is not on this machine", where="--submit", fix=f"on the login node: sbatch {path}")
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"sbatch refused the script: {done.stderr.strip()}", where=str(path), fix="change the options")
    return done.stdout.strip().split(";")[0]


def _header(order: Order, request: Request) -> list[str]:
    asked = [
        f"--job-name={label(request.name or order.name)}",
        f"--nodes={request.nodes}",
        f"--ntasks-per-node={request.processes}",
        f"--gpus-per-node={request.gpus}" if request.gpus else None,
        f"--cpus-per-task={request.cpus}" if request.cpus else None,
        f"--mem={request.memory}" if request.memory else None,
        f"--time={request.time}" if request.time else None,
        f"--partition={request.partition}" if request.partition else None,
        f"--account={request.account}" if request.account else None,
        f"--qos={request.qos}" if request.qos else None,
        f"--mail-user={request.mail}" if request.mail else None,
        f"--mail-type={request.mail_type}" if request.mail else None,
        *request.options,
    ]
    if request.processes == 1:
        why = (
            "# One process a node drives all its GPUs: JAX needs no process for each, and the node reads weights once."
        )
    else:
        why = "# The processes of a node divide its GPUs; each sees them all, so no --gpus-per-task and no --gpu-bind."
    return [
        "#!/bin/bash",
        "# Written by meshtune launch slurm. Submit with: sbatch THIS_FILE",
        why,
        *(f"#SBATCH {one}" for one in asked if one),
        f"#SBATCH --chdir={shlex.quote(str(pathlib.Path.cwd()))}",
        "# What is preempted, or loses a node, is queued again and goes on; its output is added to.",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"# So many seconds before the limit every process gets SIGTERM, saves, and exits with {128 + signal.SIGTERM}.",
        f"#SBATCH --signal=TERM@{request.warning}",
    ]


def _body(order: Order, request: Request) -> str:
    command = shlex.join([program() if request.container is None else "meshtune", "train", *order.arguments])
    around = _container(order, request)
    settings = [] if request.gpus else ["export JAX_PLATFORMS=cpu"]
    filled = {
        "OUTPUT": shlex.quote(str(order.output)),
        "SETTINGS": "\n".join(settings),
        "FILES": shlex.join(map(str, order.files)),
        "SRUN": f"--ntasks-per-node={request.processes}" + (f" --cpus-per-task={request.cpus}" if request.cpus else ""),
        "COMMAND": f"{around} \\\n  {command}" if around else command,
        "STOPPED": str(128 + signal.SIGTERM),
        "LOST": str(EXIT_PROCESS_LOST),
        "RESTARTS": str(RESTARTS),
    }
    text = BODY.read_text(encoding="utf-8")
    return re.sub(r"@([A-Z]+)@", lambda found: filled[found[1]], text)


def _container(order: Order, request: Request) -> str | None:
    if request.container is None:
        return None
    image = request.container
    runtime = request.runtime or ("apptainer" if image.endswith(".sif") else "pyxis")
    here = str(pathlib.Path.cwd())
    seen = [here, str(order.output.parent), *(str(path.parent) for path in order.files), *request.mounts]
    mounts = list(dict.fromkeys(seen))
    if runtime == "pyxis":
        shared = ",".join(f"{path}:{path}" for path in mounts)
        return shlex.join([f"--container-image={image}", f"--container-mounts={shared}", f"--container-workdir={here}"])
    vendor = "--rocm" if "rocm" in image.lower() else "--nv"
    binds = [word for path in mounts for word in ("--bind", path)]
    return shlex.join(["apptainer", "exec", vendor, *binds, "--pwd", here, image])
