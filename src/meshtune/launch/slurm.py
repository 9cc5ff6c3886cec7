"""A batch script for Slurm: readable, requeued after preemption or a lost node, checked before it spends time."""

from __future__ import annotations

import pathlib
import re
import shlex
import shutil
import signal
import subprocess

from meshtune.errors import UserError
from meshtune.launch.options import SlurmOptions, check_text
from meshtune.launch.train_command import TrainCommand, dns_label, meshtune_executable
from meshtune.mesh.client import EXIT_PROCESS_LOST

TEMPLATE = pathlib.Path(__file__).with_name("slurm_body.sh")
MAX_RESTARTS = 20  # in succession after a lost process, without a new checkpoint


def batch_script(command: TrainCommand, options: SlurmOptions) -> str:
    return "\n".join(_header(command, options)) + "\n" + _body(command, options)


def submit(path: pathlib.Path) -> str:
    """Submits the script with sbatch; returns the job id. Raises: UserError with sbatch's message if refused."""
    if shutil.which("sbatch") is None:
        raise UserError("sbatch is not on this machine", where="--submit", fix=f"on the login node: sbatch {path}")
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"sbatch refused the script: {done.stderr.strip()}", where=str(path), fix="change the options")
    return done.stdout.strip().split(";")[0]


def _header(command: TrainCommand, options: SlurmOptions) -> list[str]:
    check_text("the current folder", str(pathlib.Path.cwd()))
    directives = [
        f"--job-name={dns_label(options.name or command.name)}",
        f"--nodes={options.nodes + options.spare_nodes}",
        f"--ntasks-per-node={options.processes}",
        f"--gpus-per-node={options.gpus}" if options.gpus else None,
        f"--cpus-per-task={options.cpus}" if options.cpus else None,
        f"--mem={shlex.quote(options.memory)}" if options.memory else None,
        f"--time={options.time}" if options.time else None,
        f"--partition={shlex.quote(options.partition)}" if options.partition else None,
        f"--account={shlex.quote(options.account)}" if options.account else None,
        f"--qos={shlex.quote(options.qos)}" if options.qos else None,
        f"--mail-user={shlex.quote(options.mail)}" if options.mail else None,
        f"--mail-type={options.mail_type}" if options.mail else None,
        f"--switches={options.switches}" if options.switches else None,
        f"--segment={options.segment}" if options.segment else None,
        "--no-kill" if options.spare_nodes else None,
        *options.extra,
    ]
    if options.processes == 1:
        reason = "# One process per node uses all its GPUs: JAX needs no more, and each node reads the weights once."
    else:
        reason = "# The processes of a node divide its GPUs. Each must see all: no --gpus-per-task and no --gpu-bind."
    return [
        "#!/bin/bash",
        "# Written by meshtune launch slurm. Submit with: sbatch THIS_FILE",
        reason,
        *(f"#SBATCH {directive}" for directive in directives if directive),
        f"#SBATCH --chdir={shlex.quote(str(pathlib.Path.cwd()))}",
        "# A job that is preempted or loses a node is requeued and resumes; its output is appended.",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"# Seconds before the time limit at which every process gets SIGTERM, saves, and exits with "
        f"{128 + signal.SIGTERM}.",
        f"#SBATCH --signal=TERM@{options.warning}",
    ]


def _body(command: TrainCommand, options: SlurmOptions) -> str:
    program = meshtune_executable() if options.container is None else "meshtune"
    train = shlex.join([program, "train", *command.arguments])
    container = _container(command, options)
    cpus = f" --cpus-per-task={options.cpus}" if options.cpus else ""
    values = {
        "OUTPUT": shlex.quote(str(command.output)),
        "SETTINGS": "" if options.gpus else "export JAX_PLATFORMS=cpu",
        "FILES": shlex.join(map(str, command.input_files)),
        "SRUN": f"--ntasks-per-node={options.processes}{cpus}",
        "NODES": str(options.nodes),
        "TASKS": str(options.nodes * options.processes),
        "COMMAND": f"{container} \\\n  {train}" if container else train,
        "STOPPED": str(128 + signal.SIGTERM),
        "LOST": str(EXIT_PROCESS_LOST),
        "RESTARTS": str(MAX_RESTARTS),
    }
    return re.sub(r"@([A-Z]+)@", lambda match: values[match[1]], TEMPLATE.read_text(encoding="utf-8"))


def _container(command: TrainCommand, options: SlurmOptions) -> str | None:
    """srun's options for pyxis, or the command that runs Apptainer; None without a container."""
    if options.container is None:
        return None
    image = options.container
    runtime = options.runtime or ("apptainer" if image.endswith(".sif") else "pyxis")
    workdir = str(pathlib.Path.cwd())
    inputs = [str(path.parent) for path in command.input_files]
    mounts = list(dict.fromkeys([workdir, str(command.output.parent), *inputs, *options.mounts]))
    if runtime == "pyxis":
        pairs = ",".join(f"{path}:{path}" for path in mounts)
        return shlex.join(
            [f"--container-image={image}", f"--container-mounts={pairs}", f"--container-workdir={workdir}"]
        )
    gpu_flag = "--rocm" if "rocm" in image.lower() else "--nv"
    binds = [argument for path in mounts for argument in ("--bind", path)]
    return shlex.join(["apptainer", "exec", gpu_flag, *binds, "--pwd", workdir, image])
