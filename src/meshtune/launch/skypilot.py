"""A task for SkyPilot (https://docs.skypilot.co), which provisions machines and runs `meshtune train` on them."""

from __future__ import annotations

import secrets
import shlex

import yaml

from meshtune.errors import UserError
from meshtune.launch.options import TaskOptions
from meshtune.launch.train_command import TrainCommand, dns_label
from meshtune.mesh.rendezvous import SECRET

RECOVERABLE_CODES = [75, 137, 143]  # a process was lost, was killed, or stopped and saved


def task(command: TrainCommand, options: TaskOptions) -> dict[str, object]:
    """The task object. Raises: UserError if the machines would not share the output, or would not see the recipe."""
    _check_shared_paths(command, options)
    resources: dict[str, object] = {
        **({"infra": options.infra} if options.infra else {}),
        **({"accelerators": options.accelerators} if options.accelerators else {"cpus": "8+"}),
        **({"image_id": f"docker:{options.image}"} if options.image else {}),
        **({"use_spot": True} if options.spot else {}),
        # A managed job (sky jobs launch) restarts after these exit codes; any other ends it.
        "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": RECOVERABLE_CODES},
    }
    spec: dict[str, object] = {
        "name": dns_label(options.name or command.name),
        "num_nodes": options.nodes,
        "resources": resources,
        "workdir": ".",
    }
    # Known to the machines of this task alone: others cannot join it.
    spec["envs"] = {SECRET: secrets.token_hex(32)} | ({} if options.accelerators else {"JAX_PLATFORMS": "cpu"})
    if options.bucket:
        spec["file_mounts"] = {options.mount: {"source": options.bucket, "mode": "MOUNT"}}
    if options.volume:
        spec["volumes"] = {options.mount: options.volume}
    # exec, so that SIGTERM reaches the process that saves and not a shell.
    return spec | {"setup": options.setup, "run": f"exec {shlex.join(['meshtune', 'train', *command.arguments])}"}


def task_yaml(command: TrainCommand, options: TaskOptions) -> str:
    """The YAML file for `sky`."""
    header = [
        "# Written by meshtune launch skypilot. Start: sky jobs launch THIS_FILE (restarts after preemption),",
        "# or: sky launch THIS_FILE. It holds the secret that the machines know each other by: keep it to yourself.",
        "# The processes find each other through SKYPILOT_NODE_RANK and SKYPILOT_NODE_IPS.",
    ]
    return "\n".join(header) + "\n" + yaml.safe_dump(task(command, options), sort_keys=False, width=120)


def _check_shared_paths(command: TrainCommand, options: TaskOptions) -> None:
    storage = options.volume or options.bucket
    if not storage:
        raise UserError(
            "the output needs storage that outlives the machines"
            + (" and is shared by all of them" if options.nodes > 1 else ""),
            where="--volume, --bucket",
            fix="give a SkyPilot volume, or a bucket (s3://name), and an output in it",
        )
    if not f"{command.recipe.output}/".startswith(options.mount.rstrip("/") + "/"):
        raise UserError(
            f"the output is not in {storage}, which every machine mounts",
            where=command.recipe.output,
            fix=f"give output={options.mount}/{command.name}, or another --mount",
        )
    if command.recipe_file and (command.recipe_file.is_absolute() or ".." in command.recipe_file.parts):
        raise UserError(
            "the recipe is not in the current directory, which SkyPilot copies to the machines",
            where=str(command.recipe_file),
            fix="change to a directory that contains it and give its path from there",
        )
