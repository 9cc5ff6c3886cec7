"""A JobSet for Kubernetes: one indexed Job whose pods are the processes of a run (https://jobset.sigs.k8s.io)."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import yaml

from meshtune.errors import UserError, nearest
from meshtune.launch.order import Order, label
from meshtune.mesh.rendezvous import COORDINATOR, JOB, PORT, PROCESSES

RESOURCES = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu", "tpu": "google.com/tpu"}
QUANTITY = r"\d+(\.\d+)?(m|[KMGTP]i?)?"
RESTARTS = 20
WORKERS = "workers"
RECIPES = "/etc/meshtune"


@dataclasses.dataclass(frozen=True)
class Pods:
    """What is asked of Kubernetes: `nodes` pods with `devices` accelerators of `vendor` each (none: CPU pods).

    `claim` is a PersistentVolumeClaim that every pod can mount (ReadWriteMany), at `mount`: model, data and output lie
    there, and relative paths count from there. The recipe comes along in a ConfigMap. `selector` are labels of nodes.
    """

    image: str
    nodes: int
    devices: int
    vendor: str
    claim: str
    mount: str
    name: str | None = None
    namespace: str | None = None
    queue: str | None = None
    cpus: str | None = None
    memory: str | None = None
    selector: tuple[str, ...] = ()
    warning: int = 120

    def __post_init__(self):
        if self.devices and self.vendor not in RESOURCES:
            hint = nearest(self.vendor, RESOURCES) + f"known are {', '.join(RESOURCES)}"
            raise UserError(f"'{self.vendor}' makes no accelerator known here", where="--vendor", fix=hint)
        if not self.mount.startswith("/"):
            raise UserError(f"'{self.mount}' is not an absolute path", where="--mount", fix="as in /shared")
        for option, value in (("--cpus", self.cpus), ("--mem", self.memory)):
            if value is not None and not re.fullmatch(QUANTITY, value):
                raise UserError(f"'{value}' is not an amount", where=option, fix="write it as 8, 500m or 200Gi")
        for one in self.selector:
            if "=" not in one:
                raise UserError(f"'{one}' is not a label", where="--node-label", fix="write it as key=value")


def jobset(order: Order, pods: Pods) -> dict[str, Any]:
    """The JobSet, as YAML has it. Raises: UserError if the output does not lie on the volume every pod mounts."""
    name = label(pods.name or order.name)
    _on_volume(order, pods.mount)
    spec: dict[str, Any] = {
        # The whole set starts again when a pod is lost or stopped; a mistake (exit code 2) ends it.
        "failurePolicy": {
            "maxRestarts": RESTARTS,
            "rules": [{"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
        },
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": WORKERS, "replicas": 1, "template": {"spec": _job(order, pods, name)}}],
    }
    metadata: dict[str, Any] = {"name": name}
    if pods.namespace:
        metadata["namespace"] = pods.namespace
    if pods.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": pods.queue}
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}


def text(order: Order, pods: Pods) -> str:
    """The file for kubectl."""
    name = label(pods.name or order.name)
    head = [
        "# Written by meshtune launch k8s. Needs the JobSet controller (https://jobset.sigs.k8s.io).",
        "# Start: kubectl apply -f THIS_FILE",
        f"# Watch: kubectl logs -f -l jobset.sigs.k8s.io/jobset-name={name},batch.kubernetes.io/job-completion-index=0",
        f"# Stop:  kubectl delete jobset {name}",
    ]
    documents = [*([_config_map(order, pods, name)] if order.file else []), jobset(order, pods)]
    return "\n".join(head) + "\n" + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as it stands, so that the recipe can be read."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def _config_map(order: Order, pods: Pods, name: str) -> dict[str, Any]:
    assert order.file is not None
    metadata = {"name": name} | ({"namespace": pods.namespace} if pods.namespace else {})
    recipe = order.file.read_text(encoding="utf-8")
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"recipe.yaml": recipe}}


def _job(order: Order, pods: Pods, name: str) -> dict[str, Any]:
    return {
        "completionMode": "Indexed",  # each pod has its number
        "completions": pods.nodes,
        "parallelism": pods.nodes,
        "backoffLimit": 0,  # one pod alone cannot join again: the set starts anew as a whole
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": "train", "operator": "In", "values": [1, 2]},
                }
            ]
        },
        "template": {"spec": _pod(order, pods, name)},
    }


def _pod(order: Order, pods: Pods, name: str) -> dict[str, Any]:
    amounts: dict[str, Any] = {RESOURCES[pods.vendor]: pods.devices} if pods.devices else {}
    limits = amounts | ({"memory": pods.memory} if pods.memory else {})
    requests = limits | ({"cpu": pods.cpus} if pods.cpus else {})
    environment = {
        # Pod 0's name in the set's headless service: known before any pod runs.
        COORDINATOR: f"{name}-{WORKERS}-0-0.{name}:{PORT}",
        PROCESSES: str(pods.nodes),
        JOB: name,
        **({} if pods.devices else {"JAX_PLATFORMS": "cpu"}),
    }
    container: dict[str, Any] = {
        "name": "train",
        "image": pods.image,
        # The process itself receives SIGTERM: no shell in between.
        "command": ["meshtune", "train", *([f"{RECIPES}/recipe.yaml"] if order.file else []), *order.overrides],
        "workingDir": pods.mount,
        "env": [{"name": key, "value": value} for key, value in environment.items()],
        "ports": [{"containerPort": PORT}],
        "resources": {"requests": requests, "limits": limits},
        "volumeMounts": [
            {"name": "shared", "mountPath": pods.mount},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": pods.warning,
        "containers": [container],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": pods.claim}},
            # NCCL and RCCL pass data between the GPUs of a pod through it; the default is 64 MiB.
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if order.file:
        spec["volumes"].append({"name": "recipe", "configMap": {"name": name}})
        container["volumeMounts"].append({"name": "recipe", "mountPath": RECIPES, "readOnly": True})
    if pods.selector:
        spec["nodeSelector"] = dict(one.split("=", 1) for one in pods.selector)
    if pods.devices and pods.vendor != "tpu":
        spec["tolerations"] = [{"key": RESOURCES[pods.vendor], "operator": "Exists", "effect": "NoSchedule"}]
    return spec


def _on_volume(order: Order, mount: str) -> None:
    """Relative paths count from the mount; an absolute output must lie in it."""
    output = order.recipe.output
    if output.startswith(("/", "~")) and not f"{output}/".startswith(mount.rstrip("/") + "/"):
        raise UserError(
            "the output does not lie on the volume that every pod sees",
            where=output,
            fix=f"give output={mount.rstrip('/')}/{order.name}, or another --mount",
        )
