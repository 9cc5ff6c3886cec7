"""A JobSet for Kubernetes: an indexed Job whose pods are the processes of a run (https://jobset.sigs.k8s.io)."""

from __future__ import annotations

import secrets
from typing import Any

import yaml

from meshtune.errors import UserError
from meshtune.launch.options import RESOURCES, JobSetOptions
from meshtune.launch.train_command import TrainCommand, dns_label
from meshtune.mesh.rendezvous import COORDINATOR, JOB, PORT, PROCESSES, SECRET

MAX_RESTARTS = 20
WORKERS = "workers"
RECIPE_MOUNT = "/etc/meshtune"

Manifest = dict[str, Any]  # a Kubernetes object, or a part of one


def jobset(command: TrainCommand, options: JobSetOptions) -> Manifest:
    """The JobSet object. Raises: UserError if the output is not on the volume that every pod mounts."""
    name = dns_label(options.name or command.name)
    _check_output_on_volume(command, options.mount)
    spec: Manifest = {
        # The whole set restarts when a pod is lost or stopped; an error (exit code 1 or 2) ends it.
        "failurePolicy": {
            "maxRestarts": MAX_RESTARTS,
            "rules": [{"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
        },
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": WORKERS, "replicas": 1, "template": {"spec": _job(command, options, name)}}],
    }
    metadata: Manifest = {"name": name}
    if options.namespace:
        metadata["namespace"] = options.namespace
    if options.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": options.queue}
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}


def manifest(command: TrainCommand, options: JobSetOptions) -> str:
    """The YAML file for kubectl: a ConfigMap with the recipe, if it is a file, a Secret and the JobSet."""
    name = dns_label(options.name or command.name)
    header = [
        "# Written by meshtune launch k8s. Needs the JobSet controller (https://jobset.sigs.k8s.io).",
        "# Start: kubectl apply -f THIS_FILE",
        f"# Watch: kubectl logs -f -l jobset.sigs.k8s.io/jobset-name={name},batch.kubernetes.io/job-completion-index=0",
        f"# Stop:  kubectl delete jobset {name}",
        "# It holds the secret that the pods know each other by: keep it to yourself.",
    ]
    config_map = [_config_map(command, options, name)] if command.recipe_file else []
    objects = [*config_map, _secret(options, name), jobset(command, options)]
    documents = yaml.dump_all(objects, Dumper=_LiteralDumper, sort_keys=False, width=120)
    return "\n".join(header) + "\n" + documents


class _LiteralDumper(yaml.SafeDumper):
    """Writes multi-line strings as literal blocks, so that the recipe is readable."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_LiteralDumper.add_representer(str, _LiteralDumper.represent_str)


def _config_map(command: TrainCommand, options: JobSetOptions, name: str) -> Manifest:
    assert command.recipe_file is not None
    metadata = {"name": name} | ({"namespace": options.namespace} if options.namespace else {})
    recipe = command.recipe_file.read_text(encoding="utf-8")
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"recipe.yaml": recipe}}


def _secret(options: JobSetOptions, name: str) -> Manifest:
    """Returns a secret that only the pods of this set know, and that is needed to join them."""
    metadata = {"name": name} | ({"namespace": options.namespace} if options.namespace else {})
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"job": secrets.token_hex(32)}}


def _job(command: TrainCommand, options: JobSetOptions, name: str) -> Manifest:
    return {
        "completionMode": "Indexed",  # gives each pod an index
        "completions": options.nodes,
        "parallelism": options.nodes,
        "backoffLimit": 0,  # a single pod cannot rejoin a running job: the set restarts as a whole
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": "train", "operator": "In", "values": [1, 2]},
                }
            ]
        },
        "template": {"spec": _pod(command, options, name)},
    }


def _pod(command: TrainCommand, options: JobSetOptions, name: str) -> Manifest:
    accelerators: Manifest = {RESOURCES[options.vendor]: options.devices} if options.devices else {}
    limits = accelerators | ({"memory": options.memory} if options.memory else {})
    requests = limits | ({"cpu": options.cpus} if options.cpus else {})
    environment = {
        # The host name of pod 0 in the set's headless service, known before any pod runs.
        COORDINATOR: f"{name}-{WORKERS}-0-0.{name}:{PORT}",
        PROCESSES: str(options.nodes),
        JOB: name,
        **({} if options.devices else {"JAX_PLATFORMS": "cpu"}),
    }
    recipe = [f"{RECIPE_MOUNT}/recipe.yaml"] if command.recipe_file else []
    container: Manifest = {
        "name": "train",
        "image": options.image,
        # Without a shell in between, so that SIGTERM reaches the process itself.
        "command": ["meshtune", "train", *recipe, *command.overrides],
        "workingDir": options.mount,
        "env": [
            *({"name": key, "value": value} for key, value in environment.items()),
            {"name": SECRET, "valueFrom": {"secretKeyRef": {"name": name, "key": "job"}}},
        ],
        "ports": [{"containerPort": PORT}],
        "resources": {"requests": requests, "limits": limits},
        "volumeMounts": [
            {"name": "shared", "mountPath": options.mount},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    spec: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.warning,
        "containers": [container],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": options.claim}},
            # NCCL and RCCL exchange data between the GPUs of a pod through shared memory; the default is 64 MiB.
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if command.recipe_file:
        spec["volumes"].append({"name": "recipe", "configMap": {"name": name}})
        container["volumeMounts"].append({"name": "recipe", "mountPath": RECIPE_MOUNT, "readOnly": True})
    if options.node_labels:
        spec["nodeSelector"] = dict(label.split("=", 1) for label in options.node_labels)
    if options.devices and options.vendor != "tpu":
        spec["tolerations"] = [{"key": RESOURCES[options.vendor], "operator": "Exists", "effect": "NoSchedule"}]
    return spec


def _check_output_on_volume(command: TrainCommand, mount: str) -> None:
    """Relative paths start at the mount; an absolute output must be inside it."""
    output = command.recipe.output
    if output.startswith(("/", "~")) and not f"{output}/".startswith(mount.rstrip("/") + "/"):
        raise UserError(
            "the output is not on the volume that every pod mounts",
            where=output,
            fix=f"give output={mount.rstrip('/')}/{command.name}, or another --mount",
        )
