"""Runs on Kubernetes: what `meshtune launch k8s` writes is created, listed, followed and deleted by the client of the
package kubernetes, with the cluster and the rights of a kubeconfig, or of the pod that the board is in."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import yaml

from meshtune.board.slurm import State, option_flags
from meshtune.errors import UserError, pip_install
from meshtune.launch.kubernetes import JOBSET
from meshtune.launch.options import JobSetOptions
from meshtune.launch.train_command import dns_label

RECORD = "kubernetes.json"
MANIFEST = "job.yaml"
OPTIONS = {
    **{"image": str, "claim": str, "mount": str, "nodes": int, "devices": int, "vendor": str, "kind": str},
    **{"namespace": str, "queue": str, "priority": str, "cpus": str, "memory": str},
}
FRESH_SECONDS = 3.0
REQUEST_SECONDS = 10.0
COMMAND_SECONDS = 120.0
LOG_BYTES = 1 << 20  # of one reading
NAMESPACE_FILE = pathlib.Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
MANAGED = {"app.kubernetes.io/managed-by": "meshtune-board"}
QUEUE_NAME = "kueue.x-k8s.io/queue-name"
# Group, version and plural of the kinds that the client has no classes of.
CUSTOM = {
    "JobSet": ("jobset.x-k8s.io", "v1alpha2", "jobsets"),
    "TrainJob": ("trainer.kubeflow.org", "v1alpha1", "trainjobs"),
    "TrainingRuntime": ("trainer.kubeflow.org", "v1alpha1", "trainingruntimes"),
}
KUEUE_VERSIONS = ("v1beta1", "v1beta2")
JOB_KINDS = ("JobSet", "TrainJob")


def available() -> bool:
    """Whether this machine has the client and the access to a cluster; asks nobody."""
    try:
        _cluster()
    except UserError:
        return False
    return True


def command(value: object, recipe: str, options: list[str]) -> tuple[str, ...]:
    """The arguments of the command that writes the objects: {"image": ..., "claim": ..., ...}. Raises: UserError."""
    _cluster()
    flags = option_flags(value, OPTIONS, JobSetOptions, "kubernetes")
    return ("launch", "k8s", recipe, *options, *flags, "--out", f"{{job}}/{MANIFEST}")


def submit(folder: pathlib.Path, root: str, arguments: list[str]) -> dict[str, str]:
    """Writes and creates the objects of a job; returns {"id": name, "namespace", "kind"}. Raises: UserError."""
    cluster = _cluster()
    name = f"{dns_label(folder.name, 30)}-{secrets.token_hex(2)}"
    written = [sys.executable, "-m", "meshtune", *arguments, "--name", name]
    with (folder / "log.txt").open("ab") as log:
        done = subprocess.run(
            written, cwd=root, capture_output=True, text=True, timeout=COMMAND_SECONDS, stdin=subprocess.DEVNULL
        )
        log.write(done.stderr.encode())
    if done.returncode:
        raise UserError(f"the job was not submitted: {done.stderr.strip()}", where="kubernetes")
    manifest = folder / MANIFEST
    objects = list(yaml.safe_load_all(manifest.read_text(encoding="utf-8")))
    manifest.unlink()  # it holds the secret of the pods
    job = next(entry for entry in objects if entry["kind"] in JOB_KINDS)
    namespace = job["metadata"].get("namespace") or cluster.namespace
    cluster.check_queue(namespace, job["metadata"].get("labels", {}).get(QUEUE_NAME))
    parts = [entry for entry in objects if entry is not job]
    created_objects: list[dict[str, Any]] = []
    try:
        for entry in (*parts, job):  # Kubeflow refuses a TrainJob whose runtime is not there
            entry["metadata"].setdefault("labels", {}).update(MANAGED)
            created = cluster.create(namespace, entry)
            created_objects.append(entry)
        owner = {
            "apiVersion": job["apiVersion"],
            "kind": job["kind"],
            "name": name,
            "uid": created["metadata"]["uid"],
        }
        for entry in parts:  # which the cluster removes with the job
            cluster.adopt(namespace, entry, owner)
    except UserError:
        for entry in created_objects:
            with contextlib.suppress(UserError):
                cluster.delete(namespace, entry["kind"], name)
        raise
    LISTING.refresh()
    return {"id": name, "namespace": namespace, "kind": job["kind"]}


class Status(NamedTuple):
    """queued, running, finished or failed, "" for a job that is gone and None where the cluster does not answer; and
    why it waits, failed, or is not known."""

    state: str | None
    reason: str = ""


class _Cluster:
    """The API of a cluster. Its methods raise UserError for what the cluster refuses."""

    def __init__(self):
        try:
            import kubernetes
        except ImportError as problem:
            fix = pip_install("kubernetes")
            raise UserError("the client of Kubernetes is not installed", where="kubernetes", fix=fix) from problem
        configuration = kubernetes.client.Configuration()
        configuration.retries = 0  # pyright: ignore[reportAttributeAccessIssue]
        self.namespace = "default"
        try:
            kubernetes.config.load_kube_config(client_configuration=configuration)
            context = kubernetes.config.list_kube_config_contexts()[1]["context"]
            self.namespace = context.get("namespace") or "default"
        except kubernetes.config.ConfigException:
            try:
                kubernetes.config.load_incluster_config(client_configuration=configuration)
                self.namespace = NAMESPACE_FILE.read_text(encoding="utf-8").strip()
            except (kubernetes.config.ConfigException, OSError) as problem:
                fix = "set KUBECONFIG to a file that kubectl works with, or run the board in a pod"
                raise UserError("there is no access to a cluster", where="kubernetes", fix=fix) from problem
        self._host = configuration.host
        self._failed = kubernetes.client.ApiException
        api = kubernetes.client.ApiClient(configuration)
        self._core, self._custom = kubernetes.client.CoreV1Api(api), kubernetes.client.CustomObjectsApi(api)

    def create(self, namespace: str, entry: dict[str, Any]) -> Mapping[str, Any]:
        """Creates an object; returns it."""
        kind = entry["kind"]
        with self._asking(f"create a {kind}", namespace, kind):
            if kind in CUSTOM:
                return self._call(self._custom.create_namespaced_custom_object, *_place(kind, namespace), entry)
            functions = {
                "ConfigMap": self._core.create_namespaced_config_map,
                "Secret": self._core.create_namespaced_secret,
            }
            return self._call(functions[kind], namespace, entry).to_dict()

    def adopt(self, namespace: str, entry: Mapping[str, Any], owner: Mapping[str, Any]) -> None:
        """Makes an object a part of its owner, with which it is removed."""
        kind, name = entry["kind"], entry["metadata"]["name"]
        change = {"metadata": {"ownerReferences": [owner]}}
        with self._asking(f"change a {kind}", namespace, kind):
            if kind in CUSTOM:
                patch = self._custom.patch_namespaced_custom_object
                self._call(patch, *_place(kind, namespace), name, change)
                return
            functions = {
                "ConfigMap": self._core.patch_namespaced_config_map,
                "Secret": self._core.patch_namespaced_secret,
            }
            self._call(functions[kind], name, namespace, change)

    def delete(self, namespace: str, kind: str, name: str) -> None:
        """Deletes an object after what it owns; one that is gone stays so."""
        with self._asking(f"delete a {kind}", namespace, kind, missing=True):
            if kind in CUSTOM:
                remove = self._custom.delete_namespaced_custom_object
                self._call(remove, *_place(kind, namespace), name, propagation_policy="Foreground")
                return
            functions = {
                "ConfigMap": self._core.delete_namespaced_config_map,
                "Secret": self._core.delete_namespaced_secret,
            }
            self._call(functions[kind], name, namespace)

    def delete_pods(self, namespace: str, name: str) -> None:
        """Kills the pods of a job."""
        with self._asking("delete pods", namespace, "Pod"):
            selector = f"{JOBSET}/jobset-name={name}"
            remove = self._core.delete_collection_namespaced_pod
            self._call(remove, namespace, label_selector=selector, grace_period_seconds=0)

    def jobs(self, namespace: str, kind: str) -> dict[str, Mapping[str, Any]]:
        """The jobs of boards by name."""
        selector = ",".join(f"{key}={value}" for key, value in MANAGED.items())
        with self._asking(f"list {kind}s", namespace, kind):
            listing = self._custom.list_namespaced_custom_object
            answer = self._call(listing, *_place(kind, namespace), label_selector=selector)
            return {entry["metadata"]["name"]: entry for entry in answer["items"]}
        raise AssertionError

    def pods(self, namespace: str, selector: str = f"{JOBSET}/jobset-name") -> list[Any]:
        """The pods of jobs."""
        with self._asking("list pods", namespace, "Pod"):
            return self._call(self._core.list_namespaced_pod, namespace, label_selector=selector).items
        raise AssertionError

    def log(self, namespace: str, pod: str, seconds: int | None) -> str:
        """What a pod has printed, of the last `seconds` or of all time, with the time before each line."""
        with self._asking("read logs", namespace, "Pod", missing=True):
            options: dict[str, Any] = {} if seconds is None else {"since_seconds": seconds}
            read = self._core.read_namespaced_pod_log
            answer = self._call(
                read, pod, namespace, timestamps=True, limit_bytes=LOG_BYTES, _preload_content=False, **options
            )
            return answer.data.decode("utf-8", "replace")
        return ""

    def check_queue(self, namespace: str, queue: str | None) -> None:
        """Raises UserError for a queue of Kueue's that is not there: its jobs would wait for ever."""
        if queue is None:
            return
        for version in KUEUE_VERSIONS:
            with self._asking("read queues", namespace, ""):
                place = ("kueue.x-k8s.io", version, namespace, "localqueues", queue)
                try:
                    self._call(self._custom.get_namespaced_custom_object, *place)
                except self._failed as error:
                    if error.status == 404:
                        continue
                    if error.status != 403:  # whoever may not read queues may still use them
                        raise
                return
        problem = f"there is no queue '{queue}' in the namespace {namespace}, or Kueue is not installed"
        fix = f"choose one of: kubectl get localqueues -n {namespace}; or leave the queue out"
        raise UserError(problem, where="kubernetes.queue", fix=fix)

    def _call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return function(*arguments, _request_timeout=REQUEST_SECONDS, **options)

    @contextlib.contextmanager
    def _asking(self, purpose: str, namespace: str, kind: str, *, missing: bool = False) -> Iterator[None]:
        """Turns a refusal into a UserError. `missing`: an object that is not there is no error."""
        import urllib3

        try:
            yield
        except self._failed as error:
            if missing and error.status in (400, 404):
                return
            message = _message(error)
            problem, fix = f"the cluster refuses to {purpose}: {message}", "look at the cluster: kubectl get events"
            if error.status == 401:
                problem, fix = "the cluster does not accept these credentials", "log in again, as kubectl does"
            elif error.status == 403:
                problem = f"these credentials may not {purpose} in the namespace {namespace}: {message}"
                fix = "ask for a role with this right, or give another namespace"
            elif error.status == 404 and kind in CUSTOM:
                problem = f"the cluster has no {kind}, or no namespace {namespace}"
                fix = "install its controller (docs/launch.md), or give another namespace"
            raise UserError(problem, where="kubernetes", fix=fix) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            reason = getattr(error, "reason", None) or error
            problem = f"the cluster at {self._host} does not answer: {reason}"
            raise UserError(problem, where="kubernetes", fix="look whether kubectl reaches it") from error


def _place(kind: str, namespace: str) -> tuple[str, str, str, str]:
    group, version, plural = CUSTOM[kind]
    return group, version, namespace, plural


def _message(error: Any) -> str:
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        return str(json.loads(error.body)["message"])[:500]
    return str(error.reason)


_lock = threading.Lock()
_clusters: dict[str, _Cluster] = {}


def _cluster() -> _Cluster:
    """The cluster, read once. Raises: UserError."""
    with _lock:
        key = os.environ.get("KUBECONFIG", "")
        if key not in _clusters:
            _clusters[key] = _Cluster()
        return _clusters[key]


class Listing:
    """The statuses of all jobs, by one listing of each kind and namespace, and one of pods where a job waits for them,
    at most every FRESH_SECONDS."""

    def __init__(self):
        self._lock = threading.Lock()
        self._cached: dict[tuple[str, str], tuple[float, Any]] = {}

    def status(self, record: Mapping[str, Any]) -> Status:
        """The status of a job, perhaps of some seconds ago."""
        namespace, kind, name = (str(record.get(key, "")) for key in ("namespace", "kind", "id"))
        with self._lock:
            try:
                jobs = self._read(namespace, kind, lambda: _cluster().jobs(namespace, kind))
                if name not in jobs:
                    return Status("")
                status = read_status(jobs[name])
                if status == Status("queued"):
                    pods = self._read(namespace, "Pod", lambda: _cluster().pods(namespace))
                    status = Status("queued", _waiting(pods, name))
                return status
            except UserError as problem:
                return Status(None, problem.what)

    def _read(self, namespace: str, kind: str, read: Callable[[], Any]) -> Any:
        known = self._cached.get((namespace, kind))
        if known is None or time.monotonic() - known[0] >= FRESH_SECONDS:
            try:
                known = (time.monotonic(), read())
            except UserError as problem:
                known = (time.monotonic(), problem)
            self._cached[namespace, kind] = known
        if isinstance(known[1], UserError):
            raise known[1]
        return known[1]

    def refresh(self) -> None:
        """Asks again at the next reading."""
        with self._lock:
            self._cached.clear()


LISTING = Listing()


def read_status(job: Mapping[str, Any]) -> Status:
    """The status that a JobSet or a TrainJob has written."""
    status = job.get("status") or {}
    conditions = {entry["type"]: entry for entry in status.get("conditions") or () if entry["status"] == "True"}
    for kind, state in (("Completed", "finished"), ("Complete", "finished"), ("Failed", "failed")):
        if kind in conditions:
            return Status(state, conditions[kind].get("message", "") if state == "failed" else "")
    if "Suspended" in conditions or (job.get("spec") or {}).get("suspend"):
        queue = (job["metadata"].get("labels") or {}).get(QUEUE_NAME)
        return Status("queued", f"waits in the queue {queue}" if queue else "suspended")
    parts = status.get("replicatedJobsStatus") or status.get("jobsStatus") or ()
    return Status("running" if any(part.get("ready") or part.get("succeeded") for part in parts) else "queued")


def _waiting(pods: list[Any], name: str) -> str:
    """Why a pod of a job does not run: an image that is missing, no node with room; "" where none waits."""
    for pod in pods:
        if (pod.metadata.labels or {}).get(f"{JOBSET}/jobset-name") != name:
            continue
        for container in pod.status.container_statuses or ():
            waiting = container.state and container.state.waiting
            if waiting and waiting.reason not in ("ContainerCreating", "PodInitializing"):
                return f"{waiting.reason}: {waiting.message or ''}".strip(": ")
        for condition in pod.status.conditions or ():
            if condition.type == "PodScheduled" and condition.status == "False":
                return f"{condition.reason}: {condition.message or ''}".strip(": ")
    return ""


def facts(record: Mapping[str, Any]) -> dict[str, str] | None:
    """The name of a job in the cluster, and why it waits or failed; None before it is submitted."""
    if "id" not in record:
        return None
    return {"name": "kubernetes", "id": record["id"], "reason": LISTING.status(record).reason}


def state_of(record: Mapping[str, Any], asked_to_stop: bool, run_status: str | None) -> State:
    """The state of a job from the cluster's word and the status in run.json."""
    word = LISTING.status(record).state
    if word is None:
        return "elsewhere"
    if word == "finished" or (word == "" and run_status == "finished"):
        return "finished"
    if word in ("queued", "running"):
        return "stopping" if asked_to_stop else word
    return "stopped" if asked_to_stop else "failed" if word else "lost"


def cancel(record: Mapping[str, Any], *, now: bool) -> None:
    """Deletes a job: its pods save and stop, with `now` at once. Raises: UserError."""
    namespace, name = str(record.get("namespace", "")), str(record.get("id", ""))
    _cluster().delete(namespace, str(record.get("kind")), name)
    if now:
        _cluster().delete_pods(namespace, name)
    LISTING.refresh()


class Logs:
    """Copies what the first pod of a job prints into a file, a piece at most every FRESH_SECONDS."""

    def __init__(self):
        self._lock = threading.Lock()
        self._read_at: dict[str, float] = {}

    def update(self, file: pathlib.Path, record: Mapping[str, Any]) -> None:
        """Appends the lines that are new; the time of the last one is in a second file."""
        mark = file.with_name(f"{file.name}.{record.get('id')}")
        with self._lock, contextlib.suppress(UserError, OSError):
            if "id" not in record or time.monotonic() - self._read_at.get(str(file), float("-inf")) < FRESH_SECONDS:
                return
            self._read_at[str(file)] = time.monotonic()
            last = mark.read_text(encoding="utf-8") if mark.exists() else ""
            seconds = math.ceil(time.time() - mark.stat().st_mtime) + 2 * math.ceil(FRESH_SECONDS) if last else None
            namespace = str(record["namespace"])
            index = f"{JOBSET}/job-index=0,batch.kubernetes.io/job-completion-index=0"
            pods = _cluster().pods(namespace, f"{JOBSET}/jobset-name={record['id']},{index}")
            lines: list[str] = []
            for pod in sorted(pods, key=lambda pod: str(pod.metadata.creation_timestamp)):
                for line in _cluster().log(namespace, pod.metadata.name, seconds).splitlines():
                    moment, _, text = line.partition(" ")
                    if moment > last:
                        lines.append(text)
                        last = moment
            if lines:
                with file.open("a", encoding="utf-8") as log:
                    log.write("\n".join(lines) + "\n")
                mark.write_text(last, encoding="utf-8")


LOGS = Logs()
