"""The resources that a run requests from Slurm, Kubernetes and SkyPilot: the options of `meshtune launch`."""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from typing import Any

from meshtune.errors import PROJECT, UserError, nearest
from meshtune.options import option, required

TIME = r"\d+(:[0-5]?\d){0,2}|\d+-\d+(:[0-5]?\d){0,2}"  # sbatch: minutes, h:m[:s], days-hours[:m[:s]]
MAIL_TYPES = ("NONE", "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "TIME_LIMIT", "TIME_LIMIT_90", "TIME_LIMIT_80")
RUNTIMES = ("pyxis", "apptainer")
RESOURCES = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu", "tpu": "google.com/tpu"}
KINDS = ("jobset", "trainjob")
QUANTITY = r"\d+(\.\d+)?(m|[KMGTP]i?)?"
ACCELERATORS = r"[A-Za-z0-9.\-]+(:\d+)?"


def check_text(name: str, text: str, allowed: str = "") -> None:
    """Raises UserError for a control character, such as a line break, which would begin a new line in a file."""
    for character in text:
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") and character not in allowed:
            raise UserError(
                f"{text!r} has the control character {character!r}", where=name, fix="write it without this character"
            )


def _check_texts(options: Any) -> None:
    """Checks every text among the options of a command; a shell script may have several lines."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        flag = (field.metadata.get("flags") or (f"--{field.name.replace('_', '-')}",))[0]
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str):
                check_text(flag, text, allowed="\n\t" if field.name == "setup" else "")


@dataclasses.dataclass(frozen=True)
class SlurmOptions:
    """The resources requested from Slurm. `gpus` and `processes` are per node; `warning` is the seconds between SIGTERM
    and the time limit.

    `container` is an image: a .sif file runs in Apptainer, any other in pyxis, unless `runtime` says otherwise.
    `mounts` are shared directories to mount in addition to those of the run. `extra` options are passed to sbatch.
    Raises: UserError for values that Slurm would refuse.
    """

    nodes: int = option(1, "Nodes.", ge=1, flags=("--nodes", "-N"))
    gpus: int = option(8, "GPUs of each node; 0: CPUs.", ge=0, flags=("--gpus-per-node", "-g"))
    processes: int = option(1, "Processes per node; one uses all its GPUs.", ge=1, flags=("--processes-per-node",))
    time: str | None = option(None, "Time limit of a job: 4:00:00 or 2-00:00:00.", flags=("--time", "-t"))
    partition: str | None = option(None, "Partition.", flags=("--partition", "-p"))
    account: str | None = option(None, "Account.", flags=("--account", "-A"))
    qos: str | None = option(None, "Quality of service.")
    name: str | None = option(None, "Name of the job; default: that of the output.")
    cpus: int | None = option(None, "CPU cores for each process.", ge=1, flags=("--cpus-per-process",))
    memory: str | None = option(None, "Memory of each node, as 200G; 0: all.", flags=("--mem",))
    mail: str | None = option(None, "Address for notifications.")
    mail_type: str = option("END,FAIL", "When to notify: BEGIN, END, FAIL, REQUEUE, ALL.")
    warning: int = option(120, "Seconds before the time limit at which to save and stop.", ge=30)
    container: str | None = option(None, "An image: rocm/jax, nvcr.io#nvidia/jax, or a .sif file.")
    runtime: str | None = option(None, "pyxis or apptainer.", flags=("--container-runtime",))
    mounts: tuple[str, ...] = option((), "A shared directory to mount; may be repeated.", flags=("--mount",))
    spare_nodes: int = option(0, "Further nodes, which take the place of those that fail.", ge=0)
    switches: str | None = option(None, "Switches that may join the nodes, and how long to wait: 1@2:00:00.")
    segment: int | None = option(None, "Nodes of each block that must be neighbours (topology/block).", ge=1)
    extra: tuple[str, ...] = option(
        (), "Another option of sbatch, passed as it is; may be repeated.", flags=("--sbatch",)
    )

    def __post_init__(self):
        _check_texts(self)
        if self.time is not None and not re.fullmatch(TIME, self.time):
            raise UserError(f"'{self.time}' is not a time", where="--time", fix="write it as 4:00:00 or 2-00:00:00")
        if self.switches is not None and not re.fullmatch(rf"\d+(@({TIME}))?", self.switches):
            fix = "write it as 1, or 1@2:00:00 to wait two hours for it"
            raise UserError(f"'{self.switches}' is not a number of switches", where="--switches", fix=fix)
        if self.segment is not None and (self.nodes + self.spare_nodes) % self.segment:
            raise UserError(
                f"{self.nodes + self.spare_nodes} nodes do not divide into segments of {self.segment}",
                where="--segment",
                fix="give a number that divides the nodes, spare ones included",
            )
        if self.gpus and self.gpus % self.processes:
            raise UserError(
                f"{self.gpus} GPUs per node do not divide by {self.processes} processes",
                where="--processes-per-node",
                fix="leave it out: one process uses all GPUs of its node",
            )
        for mail_type in self.mail_type.split(","):
            if mail_type not in MAIL_TYPES:
                raise UserError(
                    f"'{mail_type}' is not a mail type",
                    where="--mail-type",
                    fix=nearest(mail_type, MAIL_TYPES) + f"choose from {', '.join(MAIL_TYPES)}",
                )
        if self.runtime not in (None, *RUNTIMES):
            raise UserError(
                f"'{self.runtime}' is not a supported container runtime",
                where="--container-runtime",
                fix=nearest(self.runtime or "", RUNTIMES) + f"choose {' or '.join(RUNTIMES)}",
            )
        for flag in self.extra:
            if not flag.startswith("-"):
                raise UserError(
                    f"'{flag}' is not an option of sbatch", where="--sbatch", fix="write it as --constraint=h100"
                )


@dataclasses.dataclass(frozen=True)
class JobSetOptions:
    """The resources requested from Kubernetes: `nodes` pods in each of `slices`, each with `devices` accelerators of
    `vendor` (0: CPU pods).

    A slice has a fast network inside: a TPU slice, or a rack. `exclusive_topology` is the label of nodes
    whose values are given to one slice each. `restart_agent` is an image of JobSet's in-place-restart-agent, with which
    pods that are left restart without being scheduled again. `priority` is one of Kueue's if there is a `queue`.

    `claim` is a PersistentVolumeClaim (ReadWriteMany) that every pod mounts at `mount`. It holds model, data and
    output, and relative paths start there. The recipe is passed in a ConfigMap. `node_labels` (key=value) select nodes.
    `warning` is the seconds between SIGTERM and SIGKILL.
    Raises: UserError for values that Kubernetes would refuse.
    """

    image: str = required("An image that holds Meshtune (docker/).")
    claim: str = required("PersistentVolumeClaim (ReadWriteMany) that every pod mounts.")
    nodes: int = option(1, "Pods of each slice, one per node.", ge=1, flags=("--nodes", "-N"))
    slices: int = option(1, "Slices: TPU slices or racks, with a replicated job each.", ge=1)
    kind: str = option("jobset", "jobset, or trainjob for Kubeflow Trainer.")
    devices: int = option(8, "Accelerators of each pod; 0: CPUs.", ge=0, flags=("--gpus-per-node", "-g"))
    vendor: str = option("nvidia", "nvidia, amd or tpu.")
    mount: str = option("/shared", "Where the claim is mounted; relative paths start there.")
    name: str | None = option(None, "Name of the JobSet; default: that of the output.")
    namespace: str | None = option(None, "Namespace.")
    queue: str | None = option(None, "Kueue's local queue.")
    priority: str | None = option(None, "Priority class: of Kueue with --queue, else of the pods.")
    exclusive_topology: str | None = option(
        None, "Label of nodes, such as cloud.google.com/gke-nodepool: one slice each."
    )
    restart_agent: str | None = option(None, "Image of JobSet's in-place-restart-agent: pods restart in place.")
    cpus: str | None = option(None, "CPU cores of each pod.")
    memory: str | None = option(None, "Memory of each pod, as 200Gi.", flags=("--mem",))
    node_labels: tuple[str, ...] = option((), "Only nodes with key=value; may be repeated.", flags=("--node-label",))
    warning: int = option(120, "Seconds to save in when stopped.", ge=30)

    def __post_init__(self):
        _check_texts(self)
        if self.devices and self.vendor not in RESOURCES:
            raise UserError(
                f"'{self.vendor}' is not a supported vendor of accelerators",
                where="--vendor",
                fix=nearest(self.vendor, RESOURCES) + f"choose from {', '.join(RESOURCES)}",
            )
        if self.kind not in KINDS:
            fix = f"{nearest(self.kind, KINDS)}choose {' or '.join(KINDS)}"
            raise UserError(f"'{self.kind}' is not a kind of job", where="--kind", fix=fix)
        only_jobset = {"--slices": self.slices > 1, "--restart-agent": self.restart_agent is not None}
        only_jobset["--exclusive-topology"] = self.exclusive_topology is not None
        for flag, is_given in only_jobset.items():
            if is_given and self.kind != "jobset":
                raise UserError("a TrainJob has no such option", where=flag, fix="leave it out, or give --kind jobset")
        if not self.mount.startswith("/"):
            raise UserError(f"'{self.mount}' is not an absolute path", where="--mount", fix="write it as /shared")
        for flag, value in (("--cpus", self.cpus), ("--mem", self.memory)):
            if value is not None and not re.fullmatch(QUANTITY, value):
                raise UserError(f"'{value}' is not a quantity", where=flag, fix="write it as 8, 500m or 200Gi")
        for label in self.node_labels:
            if "=" not in label:
                raise UserError(f"'{label}' is not a label", where="--node-label", fix="write it as key=value")


@dataclasses.dataclass(frozen=True)
class TaskOptions:
    """The resources requested from SkyPilot: `nodes` machines with `accelerators` each (H100:8, MI300X:8, tpu-v5p-8;
    None: CPUs).

    A SkyPilot `volume`, or a `bucket` (s3://..., gs://...), is mounted on every machine at `mount`, and the output must
    be inside it. The current directory is copied to each machine, so that relative paths in it remain valid.
    Raises: UserError for values that SkyPilot would refuse.
    """

    nodes: int = option(1, "Machines.", ge=1, flags=("--nodes", "-N"))
    accelerators: str | None = option(None, "Of each machine: H100:8; none: CPUs.", flags=("--accelerators", "-a"))
    name: str | None = option(None, "Name of the task; default: that of the output.")
    image: str | None = option(None, "A container image.")
    infra: str | None = option(None, "aws, gcp/us-central1, k8s/context ...")
    spot: bool = option(False, "Spot machines.", flags=("--spot",))
    volume: str | None = option(None, "A SkyPilot volume, mounted on every machine.")
    bucket: str | None = option(None, "s3://name or gs://name, mounted on every machine.")
    mount: str = option("/shared", "Where volume or bucket are mounted; the output must be inside.")
    setup: str = option(f"pip install '{PROJECT}[cuda13]'", "The command that installs Meshtune on a machine.")

    def __post_init__(self):
        _check_texts(self)
        if self.accelerators is not None and not re.fullmatch(ACCELERATORS, self.accelerators):
            raise UserError(
                f"'{self.accelerators}' is not an accelerator", where="--accelerators", fix="write it as H100:8"
            )
        if self.bucket is not None and not re.match(r"(s3|gs|r2|azure|https|cos|oci|nebius)://", self.bucket):
            raise UserError(
                f"'{self.bucket}' is not a bucket", where="--bucket", fix="write it as s3://name or gs://name"
            )


@dataclasses.dataclass(frozen=True)
class RayOptions:
    """The resources requested from Ray: `workers` processes with `gpus` and `cpus` each.

    `gpus` are by default all of a node; 0 are processes on CPUs. `start_timeout` is the seconds to wait for them all.
    """

    workers: int = option(1, "Processes; one for each node uses all its GPUs.", ge=1, flags=("--workers", "-n"))
    gpus: int | None = option(None, "GPUs of each; default: those of a node.", ge=0, flags=("--gpus-per-worker",))
    cpus: int = option(1, "Cores of each.", ge=1, flags=("--cpus-per-worker",))
    start_timeout: int = option(600, "Seconds to wait for nodes.", ge=1)
