"""A JobSet for Kubernetes (https://jobset.sigs.k8s.io), or a TrainJob of Kubeflow Trainer
(https://trainer.kubeflow.org), whose pods are the processes of a run."""

from __future__ import annotations

import secrets
import signal
from typing import Any

import yaml

from meshtune.errors import UserError
from meshtune.launch.options import RESOURCES, JobSetOptions
from meshtune.launch.train_command import TrainCommand, dns_label
from meshtune.mesh.client import EXIT_PROCESS_LOST
from meshtune.mesh.rendezvous import COORDINATOR, JOB, PORT, PROCESSES, SECRET, SLICE, SLICES

MAX_RESTARTS = 20  # after a lost process; those after a preemption or a lost node are unlimited
MISTAKES = [1, 2]  # exit codes that a restart does not change
STOPPED = 128 + signal.SIGTERM
WORKERS = "workers"
NODE = "node"  # Kubeflow Trainer's name of the job and of the container that it configures
RECIPE_MOUNT = "/etc/meshtune"
JOBSET = "jobset.sigs.k8s.io"
IN_PLACE_BACKOFF = 2**31 - 1  # as JobSet requires: no failure of a pod fails the job

Manifest = dict[str, Any]  # a Kubernetes object, or a part of one


def manifest(command: TrainCommand, options: JobSetOptions) -> str:
    """The YAML file for kubectl: a ConfigMap with the recipe, if it is a file, a Secret, and the job with what it
    needs. Raises: UserError if the output is not on the volume that every pod mounts."""
    name = dns_label(options.name or command.name)
    _check_output_on_volume(command, options.mount)
    kind = "JobSet" if options.kind == "jobset" else "TrainJob"
    controller = "JobSet controller (https://jobset.sigs.k8s.io)"
    if kind == "TrainJob":
        controller = "Kubeflow Trainer (https://trainer.kubeflow.org)"
    header = [
        f"# Written by meshtune launch k8s. Needs the {controller}.",
        "# Start: kubectl apply -f THIS_FILE",
        f"# Watch: kubectl logs -f -l {JOBSET}/jobset-name={name},{JOBSET}/job-index=0,"
        "batch.kubernetes.io/job-completion-index=0",
        f"# Stop:  kubectl delete {kind.lower()} {name}",
        "# It holds the secret that the pods know each other by: keep it to yourself.",
    ]
    objects = [_config_map(command, options, name)] if command.recipe_file else []
    objects.append(_secret(options, name))
    if options.restart_agent:
        objects += _agent_account(options, name)
    objects += [jobset(command, options)] if kind == "JobSet" else train_job(command, options)
    documents = yaml.dump_all(objects, Dumper=_LiteralDumper, sort_keys=False, width=120)
    return "\n".join(header) + "\n" + documents


def jobset(command: TrainCommand, options: JobSetOptions) -> Manifest:
    """The JobSet object: a replicated job for each slice."""
    name = dns_label(options.name or command.name)
    metadata = _metadata(options, name) | _labels(options)
    if options.exclusive_topology:
        metadata["annotations"] = {f"alpha.{JOBSET}/exclusive-topology": options.exclusive_topology}
    in_place = {"restartStrategy": "InPlaceRestart"} if options.restart_agent else {}
    spec: Manifest = {
        "failurePolicy": {"maxRestarts": MAX_RESTARTS, **in_place, "rules": _failure_rules()},
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "replicatedJobs": [
            {"name": WORKERS, "replicas": options.slices, "template": {"spec": _job(command, options, name)}}
        ],
    }
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}


def train_job(command: TrainCommand, options: JobSetOptions) -> list[Manifest]:
    """A TrainJob and the TrainingRuntime that it names. Kubeflow's JAX_ variables tell the pods of each other."""
    name = dns_label(options.name or command.name)
    pod = _pod(command, options, name)
    pod["containers"][0]["name"] = NODE
    job = {"backoffLimit": 0, "podFailurePolicy": {"rules": _pod_rules(NODE)}, "template": {"spec": pod}}
    ancestor = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    template = {
        "failurePolicy": {"maxRestarts": MAX_RESTARTS, "rules": _failure_rules()},
        "replicatedJobs": [{"name": NODE, "template": {"metadata": ancestor, "spec": job}}],
    }
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _metadata(options, name) | {"labels": {"trainer.kubeflow.org/framework": "jax"}},
        "spec": {"mlPolicy": {"numNodes": options.nodes, "jax": {}}, "template": {"spec": template}},
    }
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name}
    return [
        runtime,
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": _metadata(options, name) | _labels(options),
            "spec": {"runtimeRef": reference, "trainer": {"numNodes": options.nodes}},
        },
    ]


def _metadata(options: JobSetOptions, name: str) -> Manifest:
    return {"name": name} | ({"namespace": options.namespace} if options.namespace else {})


def _labels(options: JobSetOptions) -> Manifest:
    """Kueue's labels of a job."""
    if not options.queue:
        return {}
    priority = {"kueue.x-k8s.io/priority-class": options.priority} if options.priority else {}
    return {"labels": {"kueue.x-k8s.io/queue-name": options.queue, **priority}}


def _pod_rules(container: str) -> list[Manifest]:
    """Any end of a pod fails its job, with a message that says why, for `_failure_rules`."""
    codes = {"containerName": container, "operator": "In"}
    return [
        {"action": "FailJob", "onExitCodes": {**codes, "values": MISTAKES}},
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {**codes, "values": [STOPPED]}},
        {"action": "FailJob", "onExitCodes": {**codes, "values": [EXIT_PROCESS_LOST]}},
    ]


def _failure_rules() -> list[Manifest]:
    """An error of the user ends the set; after a preemption it restarts however often that happens, and after any other
    loss of a pod MAX_RESTARTS times. Kubernetes says in the message which pod rule a job failed by."""
    reason = {"onJobFailureReasons": ["PodFailurePolicy"]}

    def by_rule(*numbers: int) -> Manifest:
        return {**reason, "onJobFailureMessagePatterns": [f"rule at index {number}$" for number in numbers]}

    return [
        {"name": "mistake", "action": "FailJobSet", **by_rule(0)},
        {"name": "preempted", "action": "RestartJobSetAndIgnoreMaxRestarts", **by_rule(1, 2)},
    ]


class _LiteralDumper(yaml.SafeDumper):
    """Writes multi-line strings as literal blocks, so that the recipe is readable."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_LiteralDumper.add_representer(str, _LiteralDumper.represent_str)


def _config_map(command: TrainCommand, options: JobSetOptions, name: str) -> Manifest:
    assert command.recipe_file is not None
    recipe = command.recipe_file.read_text(encoding="utf-8")
    metadata = _metadata(options, name)
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"recipe.yaml": recipe}}


def _secret(options: JobSetOptions, name: str) -> Manifest:
    """Returns a secret that only the pods of this set know, and that is needed to join them."""
    data = {"job": secrets.token_hex(32)}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": _metadata(options, name), "stringData": data}


def _agent_account(options: JobSetOptions, name: str) -> list[Manifest]:
    """The permissions of JobSet's agent: to watch its set and to annotate its pod."""
    group = "rbac.authorization.k8s.io"
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]},
        {"apiGroups": ["jobset.x-k8s.io"], "resources": ["jobsets"], "verbs": ["get", "list", "watch"]},
    ]
    subject = {"kind": "ServiceAccount", **_metadata(options, name)}
    role = {"kind": "Role", "name": name, "apiGroup": group}
    metadata = _metadata(options, name)
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": dict(metadata), "rules": rules},
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": dict(metadata),
            "subjects": [subject],
            "roleRef": role,
        },
    ]


def _job(command: TrainCommand, options: JobSetOptions, name: str) -> Manifest:
    # A single pod cannot rejoin a running job: the set restarts as a whole, by new pods or in place.
    backoff = {"backoffLimit": IN_PLACE_BACKOFF, "podReplacementPolicy": "Failed"}
    rules = _pod_rules("train")
    return {
        "completionMode": "Indexed",  # gives each pod an index
        "completions": options.nodes,
        "parallelism": options.nodes,
        **(backoff if options.restart_agent else {"backoffLimit": 0}),
        "podFailurePolicy": {"rules": rules[:1] if options.restart_agent else rules},
        "template": {"spec": _pod(command, options, name)},
    }


def _restart_agent(image: str) -> Manifest:
    """JobSet's agent, which holds the pod back until all are ready to start, and restarts it when another failed."""

    def field(name: str) -> Manifest:
        return {"valueFrom": {"fieldRef": {"fieldPath": name}}}

    return {
        "name": "in-place-restart-agent",
        "image": image,
        "restartPolicy": "Always",
        "restartPolicyRules": [_restart_all_unless([0])],
        "startupProbe": {
            "httpGet": {"path": "/barrier-is-down", "port": 8081},
            "failureThreshold": 600,
            "periodSeconds": 1,
        },
        "env": [
            {"name": "JOBSET_NAME", **field(f"metadata.annotations['{JOBSET}/jobset-name']")},
            {"name": "POD_NAME", **field("metadata.name")},
        ],
    }


def _restart_all_unless(codes: list[int]) -> Manifest:
    return {"action": "RestartAllContainers", "exitCodes": {"operator": "NotIn", "values": codes}}


def _pod(command: TrainCommand, options: JobSetOptions, name: str) -> Manifest:
    accelerators: Manifest = {RESOURCES[options.vendor]: options.devices} if options.devices else {}
    limits = accelerators | ({"memory": options.memory} if options.memory else {})
    requests = limits | ({"cpu": options.cpus} if options.cpus else {})
    environment = {} if options.devices else {"JAX_PLATFORMS": "cpu"}
    if options.kind == "jobset":
        environment |= {
            # The host name of pod 0 in the set's headless service, known before any pod runs.
            COORDINATOR: f"{name}-{WORKERS}-0-0.{name}:{PORT}",
            PROCESSES: str(options.slices * options.nodes),
            JOB: name,
        }
    fields: list[Manifest] = []
    if options.slices > 1:
        environment[SLICES] = str(options.slices)
        index = {"fieldRef": {"fieldPath": f"metadata.annotations['{JOBSET}/job-index']"}}
        fields.append({"name": SLICE, "valueFrom": index})
    recipe = [f"{RECIPE_MOUNT}/recipe.yaml"] if command.recipe_file else []
    container: Manifest = {
        "name": "train",
        "image": options.image,
        # Without a shell in between, so that SIGTERM reaches the process itself.
        "command": ["meshtune", "train", *recipe, *command.overrides],
        "workingDir": options.mount,
        "env": [
            *({"name": key, "value": value} for key, value in environment.items()),
            *fields,
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
    if options.restart_agent:
        spec |= {"serviceAccountName": name, "initContainers": [_restart_agent(options.restart_agent)]}
        container |= {"restartPolicy": "Never", "restartPolicyRules": [_restart_all_unless([0, *MISTAKES])]}
    if options.priority and not options.queue:
        spec["priorityClassName"] = options.priority
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
