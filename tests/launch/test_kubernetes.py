"""Manifests against the definitions of JobSet and Kubeflow Trainer: their schemas, and their rules in CEL."""

from __future__ import annotations

import copy
import json
import pathlib
import re
from typing import Any

import pytest
import yaml

from meshtune.errors import UserError
from meshtune.launch.kubernetes import JobSetOptions, manifest
from meshtune.launch.train_command import parse_restartable_command
from meshtune.mesh.rendezvous import detect_process_info

CRDS = pathlib.Path(__file__).with_name("crds")
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "number": (int, float)}


def schema(kind: str) -> dict[str, Any]:
    (version,) = json.loads((CRDS / f"{kind.lower()}.json").read_text())["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]


def problems(node: dict[str, Any], value: Any, path: str = "") -> list[str]:
    """The errors of an API server: types, unknown and missing fields, bounds, enumerations, and CEL rules.

    Rules about `oldSelf` are of changes to an object, and are left out.
    """
    wrong = [f"{path}: {rule['message']}" for rule in node.get("x-kubernetes-validations", []) if violates(rule, value)]
    if node.get("x-kubernetes-int-or-string"):
        return wrong + ([] if isinstance(value, int | str) else [f"{path}: neither a number nor text"])
    kind = TYPES.get(node.get("type", ""), object)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        return [*wrong, f"{path}: {value!r} is no {node['type']}"]
    if "enum" in node and value not in node["enum"]:
        wrong.append(f"{path}: {value!r} is none of {node['enum']}")
    if isinstance(value, int | float) and not node.get("minimum", value) <= value <= node.get("maximum", value):
        wrong.append(f"{path}: {value} is out of bounds")
    if isinstance(value, str):
        if len(value) > node.get("maxLength", len(value)) or len(value) < node.get("minLength", 0):
            wrong.append(f"{path}: a text of {len(value)} characters")
        if "pattern" in node and not re.search(node["pattern"], value):
            wrong.append(f"{path}: {value!r} does not match {node['pattern']}")
    if isinstance(value, list):
        if len(value) > node.get("maxItems", len(value)) or len(value) < node.get("minItems", 0):
            wrong.append(f"{path}: {len(value)} items")
        for index, item in enumerate(value):
            wrong += problems(node["items"], item, f"{path}[{index}]")
    if isinstance(value, dict):
        fields = node.get("properties", {})
        wrong += [f"{path}: {name} is missing" for name in node.get("required", []) if name not in value]
        for name, field in value.items():
            if name in fields:
                wrong += problems(fields[name], field, f"{path}.{name}")
            elif isinstance(node.get("additionalProperties"), dict):
                wrong += problems(node["additionalProperties"], field, f"{path}.{name}")
            elif fields and not node.get("x-kubernetes-preserve-unknown-fields"):
                wrong.append(f"{path}: {name} is unknown")
    return wrong


def violates(rule: dict[str, str], value: Any) -> bool:
    if "oldSelf" in rule["rule"]:
        return False
    cel = pytest.importorskip("cel_expr_python.cel", reason="cel-expr-python is not installed")
    expression = cel.NewEnv(variables={"self": cel.Type.DYN}).compile(rule["rule"])
    return expression.eval(data={"self": value}).value() is not True


def objects(text: str) -> dict[str, dict[str, Any]]:
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


@pytest.fixture
def write(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text("model: org/model\ndata: data/train.jsonl\noutput: runs/sing\n")
    command = parse_restartable_command(["recipe.yaml"], output_is_visible=False)

    def write(**fields: Any) -> dict[str, dict[str, Any]]:
        return objects(manifest(command, JobSetOptions(**{"image": "i", "claim": "c", "nodes": 2} | fields)))

    return write


CASES: dict[str, dict[str, Any]] = {
    "one slice": {"cpus": "8", "memory": "200Gi", "namespace": "team", "node_labels": ("a=b",)},
    "slices": {"slices": 4, "vendor": "tpu", "devices": 4, "exclusive_topology": "cloud.google.com/gke-nodepool"},
    "in place": {"slices": 2, "restart_agent": "agent:1", "queue": "q", "priority": "high"},
    "CPUs": {"devices": 0, "priority": "high"},
    "trainjob": {"kind": "trainjob", "queue": "q", "priority": "high"},
}


@pytest.mark.parametrize("case", CASES)
def test_manifests_satisfy_the_definitions(write, case: str):
    written = write(**CASES[case])
    kinds = [kind for kind in ("JobSet", "TrainJob", "TrainingRuntime") if kind in written]
    assert kinds == (["TrainJob", "TrainingRuntime"] if case == "trainjob" else ["JobSet"])
    for kind in kinds:
        assert problems(schema(kind), written[kind]) == []


def test_the_check_of_the_definitions_finds_what_an_api_server_would_refuse(write):
    (good,) = [write()["JobSet"]]

    def refused(change) -> str:
        changed = copy.deepcopy(good)
        change(changed["spec"])
        return "; ".join(problems(schema("JobSet"), changed))

    assert "restartStrategie is unknown" in refused(lambda s: s["failurePolicy"].update(restartStrategie="x"))
    assert "is none of" in refused(lambda s: s["failurePolicy"].update(restartStrategy="InPlce"))
    assert "is no integer" in refused(lambda s: s["replicatedJobs"][0].update(replicas="two"))
    assert "template is missing" in refused(lambda s: s["replicatedJobs"][0].pop("template"))


def test_the_check_evaluates_the_definitions_rules(write):
    pytest.importorskip("cel_expr_python.cel", reason="cel-expr-python is not installed")
    spec = write()["JobSet"]["spec"] | {"startupPolicy": {"startupPolicyOrder": "InOrder"}}
    job = spec["replicatedJobs"][0]
    assert problems(schema("JobSet")["properties"]["spec"], spec) == []
    spec["replicatedJobs"] = [job | {"dependsOn": [{"name": "x", "status": "Ready"}]}]
    assert "mutually exclusive" in "; ".join(problems(schema("JobSet")["properties"]["spec"], spec))


def test_the_pods_of_all_slices_are_counted_through(write):
    job = write(slices=3)["JobSet"]["spec"]["replicatedJobs"][0]
    assert (job["replicas"], job["template"]["spec"]["completions"]) == (3, 2)
    entries = job["template"]["spec"]["template"]["spec"]["containers"][0]["env"]
    (slice_index,) = [entry for entry in entries if entry["name"] == "MESHTUNE_SLICE"]
    assert slice_index["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.annotations['jobset.sigs.k8s.io/job-index']"
    env = {entry["name"]: entry.get("value", "a secret") for entry in entries}
    infos = [
        detect_process_info(env | {"MESHTUNE_SLICE": str(slice_), "JOB_COMPLETION_INDEX": str(pod)})
        for slice_ in range(3)
        for pod in range(2)
    ]
    assert [info.process_index for info in infos] == list(range(6))
    assert {info.process_count for info in infos} == {6}


# The message of a failed job: kubernetes, pkg/controller/job/pod_failure_policy.go.
BY_CODE = "Container train for pod a/b failed with exit code {} matching FailJob rule at index {}"
BY_CONDITION = "Pod a/b has condition DisruptionTarget matching FailJob rule at index {}"


@pytest.mark.parametrize("case", ["one slice", "trainjob"])
def test_the_exit_code_decides_whether_a_restart_follows_and_counts(write, case: str):
    written = write(**CASES[case])
    spec = written["TrainingRuntime"]["spec"]["template"]["spec"] if case == "trainjob" else written["JobSet"]["spec"]
    (job,) = spec["replicatedJobs"]
    rules = job["template"]["spec"]["podFailurePolicy"]["rules"]

    def action(code: int) -> str:
        matching = [n for n, rule in enumerate(rules) if code in rule.get("onExitCodes", {}).get("values", [])]
        return action_of(BY_CODE.format(code, matching[0])) if matching else "RestartJobSet"

    def action_of(message: str) -> str:
        """As JobSet decides: the first rule one of whose patterns is found, else a restart that counts."""
        for rule in spec["failurePolicy"]["rules"]:
            if any(re.search(pattern, message) for pattern in rule["onJobFailureMessagePatterns"]):
                return rule["action"]
        return "RestartJobSet"

    assert [action(code) for code in (1, 2)] == ["FailJobSet"] * 2
    assert [action(code) for code in (75, 137, 139)] == ["RestartJobSet"] * 3
    assert action(143) == "RestartJobSetAndIgnoreMaxRestarts"
    (disruption,) = [number for number, rule in enumerate(rules) if "onPodConditions" in rule]
    assert action_of(BY_CONDITION.format(disruption)) == "RestartJobSetAndIgnoreMaxRestarts"
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    names = {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule}
    assert names == {container["name"]}


def test_pods_that_restart_in_place_are_held_back_by_jobsets_agent(write):
    written = write(**CASES["in place"])
    job = written["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["backoffLimit"], job["podReplacementPolicy"]) == (2147483647, "Failed")
    pod = job["template"]["spec"]
    (agent,) = pod["initContainers"]
    assert (agent["image"], agent["restartPolicy"]) == ("agent:1", "Always")
    assert pod["containers"][0]["restartPolicyRules"][0]["exitCodes"]["values"] == [0, 1, 2]
    assert pod["serviceAccountName"] == written["RoleBinding"]["subjects"][0]["name"]
    assert "jobsets" in str(written["Role"]["rules"])


def test_queues_and_priorities_are_kueues_labels_or_the_pods_priority_class(write):
    labels = {"kueue.x-k8s.io/queue-name": "q", "kueue.x-k8s.io/priority-class": "high"}
    for case, kind in (("in place", "JobSet"), ("trainjob", "TrainJob")):
        assert write(**CASES[case])[kind]["metadata"]["labels"] == labels
    pod = write(**CASES["CPUs"])["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["priorityClassName"] == "high"


def test_the_pods_of_a_trainjob_find_each_other_by_kubeflows_variables(write):
    (job,) = write(kind="trainjob")["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    entries = job["template"]["spec"]["template"]["spec"]["containers"][0]["env"]
    env = {entry["name"]: entry.get("value", "a secret") for entry in entries}
    kubeflow = {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1", "JAX_COORDINATOR_ADDRESS": "sing-node-0-0.sing:29500"}
    info = detect_process_info(env | kubeflow | {"KUBERNETES_SERVICE_HOST": "x", "JOB_COMPLETION_INDEX": "1"})
    assert (info.process_index, info.process_count, info.launcher) == (1, 2, "JAX variables")
    assert info.secret == "a secret"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "trainjobs"}, "did you mean 'trainjob'"),
        ({"kind": "trainjob", "slices": 2}, "where: --slices"),
        ({"kind": "trainjob", "restart_agent": "a"}, "where: --restart-agent"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(fields: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        JobSetOptions(image="i", claim="c", **fields)
