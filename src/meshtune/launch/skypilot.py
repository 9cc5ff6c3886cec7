"""A task for SkyPilot (https://docs.skypilot.co): it finds the machines, starts them, and runs the same command."""

from __future__ import annotations

import dataclasses
import re
import shlex
from typing import Any

import yaml

from meshtune.errors import UserError
from meshtune.launch.order import Order, label

ACCELERATORS = r"[A-Za-z0-9.\-]+(:\d+)?"
LOST_CODES = [75, 137, 143]  # a process was lost, was killed, was stopped and saved


@dataclasses.dataclass(frozen=True)
class Machines:
    """What is asked of SkyPilot: `nodes` machines with `accelerators` (H100:8, MI300X:8, tpu-v5p-8; None: CPUs).

    A SkyPilot `volume`, or a `bucket` (s3://..., gs://...), is mounted on all of them at `mount`; the output must lie
    there. The current directory is copied to each: recipe, data and model that lie in it are seen by relative paths.
    """

    nodes: int
    accelerators: str | None
    name: str | None = None
    image: str | None = None
    infra: str | None = None
    spot: bool = False
    volume: str | None = None
    bucket: str | None = None
    mount: str = "/shared"
    setup: str = "pip install 'meshtune[cuda13]'"

    def __post_init__(self):
        if self.accelerators is not None and not re.fullmatch(ACCELERATORS, self.accelerators):
            raise UserError(
                f"'{self.accelerators}' is not an accelerator", where="--accelerators", fix="write it as H100:8"
            )
        if self.bucket is not None and not re.match(r"(s3|gs|r2|azure|https|cos|oci|nebius)://", self.bucket):
            raise UserError(f"'{self.bucket}' is not a bucket", where="--bucket", fix="as in s3://name or gs://name")


def task(order: Order, machines: Machines) -> dict[str, Any]:
    """The task, as YAML has it.

    Raises: UserError if the machines would not see one output, or not the recipe.
    """
    _seen_by_all(order, machines)
    resources: dict[str, Any] = {
        **({"infra": machines.infra} if machines.infra else {}),
        **({"accelerators": machines.accelerators} if machines.accelerators else {"cpus": "8+"}),
        **({"image_id": f"docker:{machines.image}"} if machines.image else {}),
        **({"use_spot": True} if machines.spot else {}),
        # A managed job (sky jobs launch) starts again after these; a mistake (exit code 2) ends it.
        "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": LOST_CODES},
    }
    spec: dict[str, Any] = {
        "name": label(machines.name or order.name),
        "num_nodes": machines.nodes,
        "resources": resources,
        "workdir": ".",
    }
    if not machines.accelerators:
        spec["envs"] = {"JAX_PLATFORMS": "cpu"}
    if machines.bucket:
        spec["file_mounts"] = {machines.mount: {"source": machines.bucket, "mode": "MOUNT"}}
    if machines.volume:
        spec["volumes"] = {machines.mount: machines.volume}
    # exec: SIGTERM reaches the process that saves, not a shell.
    return spec | {"setup": machines.setup, "run": f"exec {shlex.join(['meshtune', 'train', *order.arguments])}"}


def text(order: Order, machines: Machines) -> str:
    """The file for sky."""
    head = [
        "# Written by meshtune launch skypilot. Start: sky jobs launch THIS_FILE (comes back after preemption),",
        "# or: sky launch THIS_FILE. The processes find each other by SKYPILOT_NODE_RANK and SKYPILOT_NODE_IPS.",
    ]
    return "\n".join(head) + "\n" + yaml.safe_dump(task(order, machines), sort_keys=False, width=120)


def _seen_by_all(order: Order, machines: Machines) -> None:
    shared = machines.volume or machines.bucket
    if not shared:
        raise UserError(
            "the output needs a place that outlives the machines"
            + (", and that all of them see" if machines.nodes > 1 else ""),
            where="--volume, --bucket",
            fix="give a SkyPilot volume, or a bucket (s3://name), and an output in it",
        )
    if not f"{order.recipe.output}/".startswith(machines.mount.rstrip("/") + "/"):
        raise UserError(
            f"the output does not lie in {shared}, which every machine mounts",
            where=order.recipe.output,
            fix=f"give output={machines.mount}/{order.name}, or another --mount",
        )
    if order.file and (order.file.is_absolute() or ".." in order.file.parts):
        raise UserError(
            "the recipe does not lie in the current directory, which is what the machines get",
            where=str(order.file),
            fix="go to a directory that holds it and name it from there",
        )
