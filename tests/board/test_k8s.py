"""Runs on Kubernetes: the real client against a small API server that checks what it is sent."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
from boards import READABLE, client, recipe
from cluster_stub import ClusterStub, cluster_stub, write_kubeconfig

from meshtune.board import k8s
from meshtune.board.workspace import Workspace, workspace_at

pytest.importorskip("kubernetes", reason="the extra kubernetes is not installed")
OPTIONS = {"image": "registry/meshtune:cuda", "claim": "shared", "nodes": 2, "devices": 4}
JOBSET_NAME, INDEX = "jobset.sigs.k8s.io/jobset-name", "jobset.sigs.k8s.io/job-index"
COMPLETION = "batch.kubernetes.io/job-completion-index"


@pytest.fixture
def cluster(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterStub]:
    monkeypatch.setattr(k8s, "FRESH_SECONDS", 0.0)
    with cluster_stub() as stub:
        monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "kubeconfig", stub.address)))
        # The client reads the name of the file as it is imported.
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
        yield stub


@pytest.fixture
def workspace(tmp_path: pathlib.Path) -> Workspace:
    return workspace_at(tmp_path / "root", READABLE, runs_code=True)


def submit(board, **options: object):
    return board.post("/api/jobs", json={"recipe": recipe(), "kubernetes": {**OPTIONS, **options}})


def add_pod(cluster: ClusterStub, name: str, **status: object) -> None:
    labels = {JOBSET_NAME: name, INDEX: "0", COMPLETION: "0"}
    cluster.add("team", "pods", f"{name}-workers-0-0-abcde", metadata={"labels": labels}, status=status)


def test_a_run_is_submitted_watched_and_cancelled(cluster: ClusterStub, workspace: Workspace):
    cluster.add("team", "localqueues", "gpus")
    board = client(workspace)
    assert "kubernetes" in board.get("/api/machine").json()["schedulers"]
    created = submit(board, queue="gpus")
    assert created.status_code == 201, created.text
    (jobset,) = cluster.of("jobsets")
    name = jobset["metadata"]["name"]
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completions"], job["template"]["spec"]["containers"][0]["image"]) == (2, OPTIONS["image"])
    for plural in ("configmaps", "secrets"):
        (part,) = cluster.of(plural)
        assert part["metadata"]["ownerReferences"][0]["uid"] == jobset["metadata"]["uid"]
    address = f"/api/jobs/{created.json()['id']}"
    folder = workspace.jobs / created.json()["id"]
    secret = cluster.of("secrets")[0]["stringData"]["job"]
    assert not [path for path in folder.rglob("*") if path.is_file() and secret in path.read_text()]

    def state() -> tuple[str, str]:
        fields = board.get(address).json()
        return fields["state"], fields["scheduler"]["reason"]

    jobset["spec"]["suspend"] = True
    assert state() == ("queued", "waits in the queue gpus")
    del jobset["spec"]["suspend"]
    image = {"waiting": {"reason": "ImagePullBackOff", "message": "manifest unknown"}}
    add_pod(cluster, name, containerStatuses=[
        {"name": "train", "image": "", "imageID": "", "ready": False, "restartCount": 0, "state": image}])  # fmt: skip
    assert state() == ("queued", "ImagePullBackOff: manifest unknown")
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU is free"}
    add_pod(cluster, name, conditions=[unscheduled])
    assert state() == ("queued", "Unschedulable: no GPU is free")
    assert board.get(f"{address}/log").json()["text"] == ""
    counts = {"name": "workers", "active": 1, "failed": 0, "succeeded": 0, "suspended": 0}
    jobset["status"] = {"replicatedJobsStatus": [{**counts, "ready": 1}]}
    assert state() == ("running", "")
    pod = f"{name}-workers-0-0-abcde"
    cluster.logs[pod] = "2026-01-01T00:00:00.1Z update 1\n2026-01-01T00:00:00.2Z update 2 of ä\n"
    assert board.get(f"{address}/log").json()["text"] == "update 1\nupdate 2 of ä\n"
    cluster.logs[pod] += "2026-01-01T00:00:01.0Z update 3\n"
    assert board.get(f"{address}/log").json()["text"] == "update 1\nupdate 2 of ä\nupdate 3\n"

    stopped = board.post(f"{address}/stop", json={})
    assert stopped.json()["state"] == "stopped"
    assert (
        "DELETE",
        f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets/{name}?propagationPolicy=Foreground",
    ) in cluster.requests
    assert not [plural for plural in ("jobsets", "configmaps", "secrets") if cluster.of(plural)]
    assert cluster.of("pods")  # which save meanwhile

    again = board.post(f"{address}/resume", json={})
    assert (again.status_code, again.json()["state"]) == (200, "queued")
    (jobset,) = cluster.of("jobsets")
    condition = {"type": "Failed", "status": "True", "message": "a mistake"}
    jobset["status"] = {"conditions": [condition]}
    assert state() == ("failed", "a mistake")
    condition["type"] = "Completed"
    assert state() == ("finished", "")


def test_a_train_job_is_created_after_its_runtime(cluster: ClusterStub, workspace: Workspace):
    board = client(workspace)
    created = submit(board, kind="trainjob", namespace="other")
    assert created.status_code == 201, created.text
    (job,), (runtime,) = cluster.of("trainjobs"), cluster.of("trainingruntimes")
    assert job["metadata"]["namespace"] == "other"
    assert runtime["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    address = f"/api/jobs/{created.json()['id']}"
    assert board.get(address).json()["state"] == "finished"


def test_all_jobs_are_listed_by_one_request(cluster: ClusterStub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(k8s, "FRESH_SECONDS", 60.0)
    labels = dict(k8s.MANAGED)
    for number in range(200):
        ready = {"replicatedJobsStatus": [{"ready": number % 2}]}
        cluster.add("team", "jobsets", f"job-{number}", metadata={"labels": labels}, status=ready)
    cluster.add("team", "jobsets", "a-strangers")
    listing = k8s.Listing()

    def status(name: str) -> k8s.Status:
        return listing.status({"id": name, "namespace": "team", "kind": "JobSet"})

    states = [status(f"job-{number}").state for number in range(200)]
    assert states == ["queued", "running"] * 100
    assert status("a-strangers") == k8s.Status("")
    assert [(method, path.partition("?")[0].rpartition("/")[2]) for method, path in cluster.requests] == [
        ("GET", "jobsets"), ("GET", "pods"),
    ]  # fmt: skip


def test_refusals_of_the_cluster_are_shown_and_leave_nothing(cluster: ClusterStub, workspace: Workspace, tmp_path):
    board = client(workspace)

    def refusal(**options: object) -> tuple[str, str]:
        answer = submit(board, **options)
        assert answer.status_code == 400, answer.text
        (problem,) = answer.json()["problems"]
        assert not [plural for plural in ("jobsets", "configmaps", "secrets") if cluster.of(plural)]
        return problem["message"], problem["fix"]

    message, fix = refusal(queue="none")
    assert "no queue 'none' in the namespace team" in message
    assert "kubectl get localqueues -n team" in fix
    cluster.forbidden = {"jobsets"}
    assert 'may not create a JobSet in the namespace team: jobsets is forbidden: User "ann"' in refusal()[0]
    cluster.forbidden, cluster.missing = set(), {"jobsets"}
    assert "no JobSet" in refusal()[0]
    cluster.missing = set()
    assert "image is missing" in refusal(image="")[0]
    assert "options are image" in refusal(restart_agent="x")[0]
    assert "not a name" in refusal(claim="a\nb")[0]
    assert "'pod' is not a kind of job" in refusal(kind="pod")[0]
    assert board.get("/api/jobs").json()["jobs"] == []
    k8s._clusters.clear()
    write_kubeconfig(tmp_path / "kubeconfig", cluster.address, token="wrong")
    assert "does not accept these credentials" in refusal()[0]
    k8s._clusters.clear()
    write_kubeconfig(tmp_path / "kubeconfig", "http://127.0.0.1:9")
    assert "the cluster at http://127.0.0.1:9 does not answer" in refusal()[0]
    k8s._clusters.clear()
    (tmp_path / "kubeconfig").unlink()
    assert "no access to a cluster" in refusal()[0]
    closed = client(workspace_at(workspace.root, READABLE))
    assert "without leave" in submit(closed).json()["problems"][0]["message"]


def test_a_missing_right_and_a_deleted_job_are_shown(cluster: ClusterStub, workspace: Workspace):
    board = client(workspace)
    address = f"/api/jobs/{submit(board).json()['id']}"
    cluster.forbidden = {"jobsets"}
    fields = board.get(address).json()
    assert fields["state"] == "elsewhere"
    assert "may not list JobSets" in fields["scheduler"]["reason"]
    assert board.post(f"{address}/stop", json={}).json()["state"] == "elsewhere"
    cluster.forbidden = set()
    assert board.get(address).json()["state"] == "queued"
    cluster.forbidden = {"pods"}
    assert "may not list pods" in board.get(address).json()["scheduler"]["reason"]
    cluster.objects.clear()
    assert board.get(address).json()["state"] == "lost"
