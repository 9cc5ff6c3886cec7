"""Files for Slurm, Kubernetes and SkyPilot: what they say, and what is refused before one is written."""

from __future__ import annotations

import pathlib
import subprocess
from typing import Any

import pytest
import yaml

from meshtune.errors import UserError
from meshtune.launch import kubernetes, skypilot, slurm
from meshtune.launch.order import label, order, restartable
from meshtune.mesh.rendezvous import detect_process_info

RECIPE = "model: org/model\ndata: data/train.jsonl\noutput: runs/Sing_Along\n"


@pytest.fixture
def recipe(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return "recipe.yaml"


def sbatch_options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def jobset(text: str) -> dict[str, Any]:
    return next(one for one in yaml.safe_load_all(text) if one["kind"] == "JobSet")


# Slurm


def test_a_batch_script_is_bash(recipe: str, tmp_path: pathlib.Path):
    for request in (
        slurm.Request(2, 8),
        slurm.Request(1, 0, container="rocm/jax:latest", mounts=("/data with space",)),
        slurm.Request(1, 8, container="jax.sif"),
    ):
        file = tmp_path / "job.sbatch"
        file.write_text(slurm.script(restartable([recipe, "method.rank=16"]), request))
        checked = subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr
        assert "@" not in file.read_text().replace("TERM@120", "").replace('"$@"', "")


def test_a_batch_script_asks_for_what_was_asked(recipe: str):
    request = slurm.Request(
        2, 8, time="2-00:00:00", partition="gpu", account="me", qos="long", mail="a@b.c", options=("--constraint=h100",)
    )
    options = sbatch_options(slurm.script(restartable([recipe]), request))
    assert options[:11] == [
        "--job-name=sing-along",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--time=2-00:00:00",
        "--partition=gpu",
        "--account=me",
        "--qos=long",
        "--mail-user=a@b.c",
        "--mail-type=END,FAIL",
        "--constraint=h100",
    ]
    assert {"--requeue", "--open-mode=append", "--signal=TERM@120"} <= set(options)


def test_a_batch_script_resumes_and_never_ties_a_process_to_one_gpu(recipe: str):
    text = slurm.script(restartable([recipe]), slurm.Request(2, 8))
    assert "train recipe.yaml resume=true" in text
    assert "--gpus-per-task" not in " ".join(sbatch_options(text))


def test_containers_see_the_run(recipe: str, tmp_path: pathlib.Path):
    pyxis = slurm.script(restartable([recipe]), slurm.Request(1, 8, container="rocm/jax", mounts=("/models",)))
    assert "--container-image=rocm/jax" in pyxis
    assert "/models:/models" in pyxis
    assert f"--container-workdir={tmp_path}" in pyxis
    nvidia = slurm.script(restartable([recipe]), slurm.Request(1, 8, container="/images/jax.sif"))
    assert "apptainer exec --nv --bind" in nvidia
    amd = slurm.script(restartable([recipe]), slurm.Request(1, 8, container="/images/rocm-jax.sif"))
    assert "apptainer exec --rocm" in amd


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"time": "soon"}, "'soon' is not a time"),
        ({"processes": 3}, "8 GPUs a node do not divide by 3"),
        ({"mail": "a@b", "mail_type": "FIAL"}, "'FIAL' is not a kind of mail"),
        ({"container": "x", "runtime": "podman"}, "'podman' is no container runtime"),
        ({"options": ("exclusive",)}, "'exclusive' is not an option of sbatch"),
    ],
)
def test_what_slurm_would_refuse_is_refused_here(fields: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        slurm.Request(1, 8, **fields)


def test_a_restarted_job_must_not_move_its_own_work_aside(recipe: str):
    with pytest.raises(UserError, match="overwrite=true would move the run's own work aside"):
        restartable([recipe, "overwrite=true"])


def test_an_output_that_holds_something_is_not_taken_for_the_jobs_own(recipe: str, tmp_path: pathlib.Path):
    (tmp_path / "runs/Sing_Along").mkdir(parents=True)
    (tmp_path / "runs/Sing_Along/run.json").write_text("{}")
    with pytest.raises(UserError, match="is not empty"):
        restartable([recipe])
    assert restartable([recipe, "resume=true"]).arguments == ("recipe.yaml", "resume=true")


def test_without_sbatch_the_way_to_submit_is_said(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="sbatch is not on this machine"):
        slurm.submit(tmp_path / "job.sbatch")


# Kubernetes


def pods(**more: Any) -> kubernetes.Pods:
    return kubernetes.Pods(
        **{"image": "i", "nodes": 2, "devices": 8, "vendor": "nvidia", "claim": "c", "mount": "/s"} | more
    )


def test_the_pods_of_a_jobset_find_each_other(recipe: str):
    written = jobset(kubernetes.text(restartable([recipe], here=False), pods()))
    job = written["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["completions"] == job["parallelism"] == 2
    env = {one["name"]: one["value"] for one in job["template"]["spec"]["containers"][0]["env"]}
    infos = [detect_process_info(env | {"JOB_COMPLETION_INDEX": str(number)}) for number in range(2)]
    assert [(info.process_index, info.process_count) for info in infos] == [(0, 2), (1, 2)]
    # jobset's name for pod 0 of job 0: <set>-<replicated job>-<job>-<pod>.<subdomain, the set's name>
    assert {info.address for info in infos} == {("sing-along-workers-0-0.sing-along", 61400)}


@pytest.mark.parametrize(("vendor", "resource"), kubernetes.RESOURCES.items())
def test_the_accelerators_of_each_maker(recipe: str, vendor: str, resource: str):
    written = jobset(kubernetes.text(restartable([recipe], here=False), pods(vendor=vendor, devices=4)))
    container = written["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {resource: 4}


def test_a_jobset_brings_its_recipe_and_restarts_but_not_after_a_mistake(recipe: str):
    text = kubernetes.text(restartable([recipe, "method.rank=16"], here=False), pods())
    config_map = next(one for one in yaml.safe_load_all(text) if one["kind"] == "ConfigMap")
    assert config_map["data"]["recipe.yaml"] == RECIPE
    assert "recipe.yaml: |" in text  # readable, not one quoted line
    spec = jobset(text)["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    command = job["template"]["spec"]["containers"][0]["command"]
    assert command == ["meshtune", "train", "/etc/meshtune/recipe.yaml", "method.rank=16", "resume=true"]
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [1, 2]
    assert spec["failurePolicy"]["rules"][0]["action"] == "FailJobSet"
    assert spec["failurePolicy"]["maxRestarts"] > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vendor": "nvida"}, "did you mean 'nvidia'"),
        ({"mount": "shared"}, "'shared' is not an absolute path"),
        ({"memory": "lots"}, "'lots' is not an amount"),
        ({"selector": ("h100",)}, "'h100' is not a label"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused_here(fields: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        pods(**fields)


def test_an_output_outside_the_volume_is_refused(recipe: str):
    with pytest.raises(UserError, match="does not lie on the volume"):
        kubernetes.text(restartable([recipe, "output=/elsewhere/x"], here=False), pods())


# SkyPilot


def test_a_task_runs_the_same_command(recipe: str):
    machines = skypilot.Machines(2, "H100:8", volume="v", spot=True)
    written = yaml.safe_load(skypilot.text(restartable([recipe, "output=/shared/x"], here=False), machines))
    assert written["run"] == "exec meshtune train recipe.yaml output=/shared/x resume=true"
    assert (written["num_nodes"], written["volumes"]) == (2, {"/shared": "v"})
    assert written["resources"]["accelerators"] == "H100:8"
    assert written["resources"]["use_spot"] is True
    assert 2 not in written["resources"]["job_recovery"]["recover_on_exit_codes"]


@pytest.mark.parametrize(
    ("fields", "overrides", "message"),
    [
        ({}, ["output=/shared/x"], "needs a place that outlives the machines, and that all of them see"),
        ({"bucket": "s3://b"}, [], "does not lie in s3://b"),
        ({"bucket": "ftp://b"}, ["output=/shared/x"], "is not a bucket"),
    ],
)
def test_what_the_machines_would_not_see_is_refused(
    recipe: str, fields: dict[str, Any], overrides: list[str], message: str
):
    with pytest.raises(UserError, match=message):
        skypilot.text(restartable([recipe, *overrides], here=False), skypilot.Machines(2, "H100:8", **fields))


def test_a_recipe_elsewhere_is_refused(recipe: str, tmp_path: pathlib.Path):
    found = order([str(tmp_path / recipe), "output=/shared/x"])
    with pytest.raises(UserError, match="does not lie in the current directory"):
        skypilot.text(found, skypilot.Machines(1, "H100:8", volume="v"))


@pytest.mark.parametrize(
    ("name", "made"), [("Sing_Along", "sing-along"), ("7b-run", "run-7b-run"), ("a" * 80, "a" * 40)]
)
def test_names_that_schedulers_take(name: str, made: str):
    assert label(name) == made
