"""The files for Slurm, Kubernetes and SkyPilot, and the options that are refused before one is written."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import subprocess
from typing import Any

import pytest
import yaml

from meshtune.errors import UserError
from meshtune.launch import kubernetes, skypilot, slurm
from meshtune.launch.train_command import (
    TrainCommand,
    dns_label,
    parse_train_command,
)
from meshtune.launch.train_command import parse_restartable_command as restartable
from meshtune.mesh.rendezvous import detect_process_info

RECIPE = "model: org/model\ndata: data/train.jsonl\noutput: runs/Sing_Along\n"


@pytest.fixture
def recipe(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return "recipe.yaml"


def remote(arguments: list[str]) -> TrainCommand:
    """A restartable command whose output is not visible from this machine."""
    return restartable(arguments, output_is_visible=False)


def sbatch_options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def jobset(text: str) -> dict[str, Any]:
    return next(document for document in yaml.safe_load_all(text) if document["kind"] == "JobSet")


# Slurm


def test_a_batch_script_is_valid_bash(recipe: str, tmp_path: pathlib.Path):
    for options in (
        slurm.SlurmOptions(2, 8),
        slurm.SlurmOptions(1, 0, container="rocm/jax:latest", mounts=("/data with space",)),
        slurm.SlurmOptions(1, 8, container="jax.sif"),
    ):
        file = tmp_path / "job.sbatch"
        file.write_text(slurm.batch_script(restartable([recipe, "method.rank=16"]), options))
        checked = subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr
        assert "@" not in file.read_text().replace("TERM@120", "").replace('"$@"', "")


def test_a_batch_script_has_a_directive_for_each_option(recipe: str):
    options = slurm.SlurmOptions(
        2, 8, time="2-00:00:00", partition="gpu", account="me", qos="long", mail="a@b.c", extra=("--constraint=h100",)
    )
    directives = sbatch_options(slurm.batch_script(restartable([recipe]), options))
    assert directives[:11] == [
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
    assert {"--requeue", "--open-mode=append", "--signal=TERM@120"} <= set(directives)


def test_spare_nodes_belong_to_the_job_and_run_nothing(recipe: str):
    options = slurm.SlurmOptions(30, 8, spare_nodes=2, switches="1@2:00:00", segment=16)
    text = slurm.batch_script(restartable([recipe]), options)
    assert {"--nodes=32", "--no-kill", "--switches=1@2:00:00", "--segment=16"} <= set(sbatch_options(text))
    assert 'srun --nodes=30 --ntasks=30 --nodelist="$(healthy | list 30)" --ntasks-per-node=1' in text


def test_nodes_that_do_not_answer_are_left_out(recipe: str, tmp_path: pathlib.Path):
    """The script's own functions, over what sinfo prints of a job's nodes; a node of two partitions is listed twice."""
    text = slurm.batch_script(restartable([recipe]), slurm.SlurmOptions(2, 8, spare_nodes=2))
    functions = text[text.index("healthy() {") : text.index("newest() {")]
    sinfo = tmp_path / "sinfo"
    sinfo.write_text("#!/bin/bash\nprintf '%s\\n' 'a allocated' 'b allocated*' 'c down' 'd mixed' 'd mixed' 'e idle'\n")
    sinfo.chmod(0o755)
    program = f'SLURM_JOB_NODELIST=x; PATH="{tmp_path}:$PATH"\n{functions}\nhealthy | list 2; healthy | wc -l'
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["a,d", "3"], done.stderr


def test_a_batch_script_resumes_and_never_binds_a_process_to_one_gpu(recipe: str):
    text = slurm.batch_script(restartable([recipe]), slurm.SlurmOptions(2, 8))
    assert "train recipe.yaml resume=true" in text
    assert "--gpus-per-task" not in " ".join(sbatch_options(text))


def test_containers_mount_the_directories_of_the_run(recipe: str, tmp_path: pathlib.Path):
    pyxis = slurm.batch_script(
        restartable([recipe]), slurm.SlurmOptions(1, 8, container="rocm/jax", mounts=("/models",))
    )
    assert "--container-image=rocm/jax" in pyxis
    assert "/models:/models" in pyxis
    assert f"--container-workdir={tmp_path}" in pyxis
    nvidia = slurm.batch_script(restartable([recipe]), slurm.SlurmOptions(1, 8, container="/images/jax.sif"))
    assert "apptainer exec --nv --bind" in nvidia
    amd = slurm.batch_script(restartable([recipe]), slurm.SlurmOptions(1, 8, container="/images/rocm-jax.sif"))
    assert "apptainer exec --rocm" in amd


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"time": "soon"}, "'soon' is not a time"),
        ({"processes": 3}, "8 GPUs per node do not divide by 3"),
        ({"mail": "a@b", "mail_type": "FIAL"}, "'FIAL' is not a mail type"),
        ({"container": "x", "runtime": "podman"}, "'podman' is not a supported container runtime"),
        ({"extra": ("exclusive",)}, "'exclusive' is not an option of sbatch"),
        ({"switches": "one"}, "'one' is not a number of switches"),
        ({"spare_nodes": 1, "segment": 4}, "2 nodes do not divide into segments of 4"),
    ],
)
def test_options_that_slurm_would_refuse_are_an_error(fields: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        slurm.SlurmOptions(1, 8, **fields)


def test_overwrite_is_refused_for_a_job_that_may_be_restarted(recipe: str):
    with pytest.raises(UserError, match="overwrite=true would move the run's own work aside"):
        restartable([recipe, "overwrite=true"])


def test_an_output_that_is_not_empty_needs_resume(recipe: str, tmp_path: pathlib.Path):
    (tmp_path / "runs/Sing_Along").mkdir(parents=True)
    (tmp_path / "runs/Sing_Along/run.json").write_text("{}")
    with pytest.raises(UserError, match="is not empty"):
        restartable([recipe])
    assert restartable([recipe, "resume=true"]).arguments == ("recipe.yaml", "resume=true")


def test_submitting_without_sbatch_is_an_error(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="sbatch is not on this machine"):
        slurm.submit(tmp_path / "job.sbatch")


# Kubernetes


def jobset_options(**changes: Any) -> kubernetes.JobSetOptions:
    return kubernetes.JobSetOptions(
        **{"image": "i", "nodes": 2, "devices": 8, "vendor": "nvidia", "claim": "c", "mount": "/s"} | changes
    )


def test_the_pods_of_a_jobset_agree_on_count_and_coordinator(recipe: str):
    written = jobset(kubernetes.manifest(remote([recipe]), jobset_options()))
    job = written["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["completions"] == job["parallelism"] == 2
    env = {entry["name"]: entry.get("value", "a secret") for entry in job["template"]["spec"]["containers"][0]["env"]}
    infos = [detect_process_info(env | {"JOB_COMPLETION_INDEX": str(number)}) for number in range(2)]
    assert [(info.process_index, info.process_count) for info in infos] == [(0, 2), (1, 2)]
    # jobset's name for pod 0 of job 0: <set>-<replicated job>-<job>-<pod>.<subdomain, the set's name>
    assert {info.address for info in infos} == {("sing-along-workers-0-0.sing-along", 61400)}


@pytest.mark.parametrize(("vendor", "resource"), kubernetes.RESOURCES.items())
def test_each_vendors_accelerators_are_requested(recipe: str, vendor: str, resource: str):
    written = jobset(kubernetes.manifest(remote([recipe]), jobset_options(vendor=vendor, devices=4)))
    container = written["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {resource: 4}


def test_a_jobset_contains_its_recipe_and_restarts_but_not_after_an_error(recipe: str):
    text = kubernetes.manifest(remote([recipe, "method.rank=16"]), jobset_options())
    config_map = next(document for document in yaml.safe_load_all(text) if document["kind"] == "ConfigMap")
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
        ({"memory": "lots"}, "'lots' is not a quantity"),
        ({"node_labels": ("h100",)}, "'h100' is not a label"),
    ],
)
def test_options_that_kubernetes_would_refuse_are_an_error(fields: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        jobset_options(**fields)


def test_an_output_outside_the_volume_is_refused(recipe: str):
    with pytest.raises(UserError, match="is not on the volume"):
        kubernetes.manifest(remote([recipe, "output=/elsewhere/x"]), jobset_options())


# SkyPilot


def test_a_skypilot_task_runs_meshtune_train(recipe: str):
    options = skypilot.TaskOptions(2, "H100:8", volume="v", spot=True)
    written = yaml.safe_load(skypilot.task_yaml(remote([recipe, "output=/shared/x"]), options))
    assert written["run"] == "exec meshtune train recipe.yaml output=/shared/x resume=true"
    assert (written["num_nodes"], written["volumes"]) == (2, {"/shared": "v"})
    assert written["resources"]["accelerators"] == "H100:8"
    assert written["resources"]["use_spot"] is True
    assert 2 not in written["resources"]["job_recovery"]["recover_on_exit_codes"]


@pytest.mark.parametrize(
    ("fields", "overrides", "message"),
    [
        ({}, ["output=/shared/x"], "needs storage that outlives the machines and is shared by all of them"),
        ({"bucket": "s3://b"}, [], "is not in s3://b"),
        ({"bucket": "ftp://b"}, ["output=/shared/x"], "is not a bucket"),
    ],
)
def test_an_output_that_the_machines_do_not_share_is_refused(
    recipe: str, fields: dict[str, Any], overrides: list[str], message: str
):
    with pytest.raises(UserError, match=message):
        skypilot.task_yaml(
            remote([recipe, *overrides]),
            skypilot.TaskOptions(2, "H100:8", **fields),
        )


def test_a_recipe_outside_the_current_directory_is_refused(recipe: str, tmp_path: pathlib.Path):
    command = parse_train_command([str(tmp_path / recipe), "output=/shared/x"])
    with pytest.raises(UserError, match="is not in the current directory"):
        skypilot.task_yaml(command, skypilot.TaskOptions(1, "H100:8", volume="v"))


@pytest.mark.parametrize(
    ("name", "label"), [("Sing_Along", "sing-along"), ("7b-run", "run-7b-run"), ("a" * 80, "a" * 40)]
)
def test_job_names_are_dns_labels(name: str, label: str):
    assert dns_label(name) == label


LAUNCHERS = {
    slurm.SlurmOptions: {},
    kubernetes.JobSetOptions: {"image": "i", "claim": "c"},
    skypilot.TaskOptions: {},
}


@pytest.mark.parametrize("character", ["\n", "\r", "\x00", "\x1b", "\u2028"])
@pytest.mark.parametrize("options", LAUNCHERS, ids=lambda options: options.__name__)
def test_no_option_may_hold_a_control_character(options, character):
    """It would begin another line in a generated file. Only a script for SkyPilot's machines may have lines."""
    for field in dataclasses.fields(options):
        if "str" not in str(field.type) or (field.name == "setup" and character == "\n"):
            continue
        text = f"a{character}#SBATCH --wrap=true"
        with pytest.raises(UserError, match=r"control character|is not a"):
            options(**LAUNCHERS[options] | {field.name: (text,) if "tuple" in str(field.type) else text})


def test_every_launcher_hands_over_a_secret_of_its_own(recipe):
    """Slurm's is made on the node that runs the script."""
    pods, tasks = (
        {text for _ in range(2) for text in re.findall(r"\b[0-9a-f]{64}\b", write())}
        for write in (
            lambda: kubernetes.manifest(remote([recipe, "output=/s/x"]), jobset_options()),
            lambda: skypilot.task_yaml(remote([recipe, "output=/shared/x"]), skypilot.TaskOptions(volume="v")),
        )
    )
    assert len(pods) == len(tasks) == 2
    assert 'export MESHTUNE_SECRET="$(od' in slurm.TEMPLATE.read_text()
