"""ProcessInfo from launchers' variables, as their own documentation and real jobs show them."""

from __future__ import annotations

import pytest

from meshtune.errors import UserError
from meshtune.mesh.accelerators import local_device_ids, visible_gpus
from meshtune.mesh.rendezvous import ProcessInfo, detect_process_info, first_host, tasks_per_node

SLURM = {
    "SLURM_JOB_ID": "4099",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}


def test_a_process_without_a_launcher_is_process_0_of_1():
    assert detect_process_info({"HOME": "/root"}) == ProcessInfo()


def test_meshtunes_own_variables_take_precedence():
    info = detect_process_info(
        {**SLURM, "MESHTUNE_COORDINATOR": "a:1", "MESHTUNE_PROCESSES": "2", "MESHTUNE_PROCESS": "1"}
    )
    assert (info.process_index, info.process_count, info.address) == (1, 2, ("a", 1))


def test_slurms_coordinator_is_the_first_node_with_a_port_chosen_by_the_job():
    info = detect_process_info(SLURM)
    assert (info.process_index, info.process_count, info.launcher) == (3, 4, "Slurm")
    assert (info.local_index, info.local_count) == (1, 2)
    assert info.address == ("gpu007", 61440 + 3)


def test_slurms_batch_script_is_not_a_process_of_its_job():
    batch_script = {name: SLURM[name] for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")}
    assert detect_process_info(batch_script).process_count == 1


def test_the_coordinator_of_a_known_launcher_can_be_replaced():
    assert detect_process_info({**SLURM, "MESHTUNE_COORDINATOR": "ib0-node:5000"}).address == ("ib0-node", 5000)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node001", "node001"), ("node001,host2", "node001"), ("n[007,009-015],b", "n007"), ("r[1-2]x,b", "r1x")],
)
def test_the_first_host_of_a_node_list(nodes: str, first: str):
    assert first_host(nodes) == first


def test_tasks_of_every_node():
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]


def test_open_mpis_coordinator_is_the_host_of_mpirun():
    info = detect_process_info(OPEN_MPI)
    assert (info.process_index, info.process_count, info.address[0]) == (1, 2, "10.96.0.1")
    ipv6 = {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp6://[fe80::b9b,2620:10d::2]:43370"}
    assert detect_process_info(ipv6).address[0] == "fe80::b9b"


def test_an_open_mpi_without_the_address_of_mpirun_needs_the_coordinator():
    without_address = {name: value for name, value in OPEN_MPI.items() if "orte" not in name}
    with pytest.raises(UserError, match="MESHTUNE_COORDINATOR is not set"):
        detect_process_info(without_address)
    assert detect_process_info({**without_address, "MESHTUNE_COORDINATOR": "a:5000"}).address == ("a", 5000)


def test_skypilot_kubeflow_and_tpu_workers_are_detected():
    sky = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5\n"}
    assert detect_process_info(sky).address == ("10.0.0.4", 61400)
    assert detect_process_info({"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.4\n"}).process_count == 1
    kubeflow = {"COORDINATOR_ADDRESS": "job-0", "COORDINATOR_PORT": "6666", "NUM_PROCESSES": "3", "PROCESS_ID": "2"}
    assert detect_process_info(kubeflow).address == ("job-0", 6666)
    tpu = {"TPU_WORKER_HOSTNAMES": "t-0,t-1", "TPU_WORKER_ID": "1"}
    assert (detect_process_info(tpu).process_index, detect_process_info(tpu).process_count) == (1, 2)


def test_the_variables_of_kubeflow_trainer_v2_and_iris_are_detected():
    # As kubeflow/trainer, pkg/runtime/framework/plugins/jax/jax.go sets them in an indexed pod.
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
    trainer = {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1", "JAX_COORDINATOR_ADDRESS": "run-node-0-0.run:29500"}
    info = detect_process_info(pod | trainer)
    assert (info.process_index, info.process_count, info.address) == (1, 2, ("run-node-0-0.run", 29500))
    tpu_pod = pod | trainer | {"TPU_WORKER_HOSTNAMES": "t-0,t-1", "TPU_WORKER_ID": "0"}
    assert detect_process_info(tpu_pod).process_index == 1, "the indices of a job of several slices"
    assert detect_process_info(pod | trainer | {"MESHTUNE_COORDINATOR": "a:1"}).address == ("a", 1)
    assert detect_process_info(pod | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}).process_count == 1


@pytest.mark.parametrize("missing", ["JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS"])
def test_a_missing_jax_variable_is_named(missing: str):
    env = {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1", "JAX_COORDINATOR_ADDRESS": "a:1"}
    with pytest.raises(UserError, match=f"{missing} is not set; JAX_NUM_PROCESSES"):
        detect_process_info({name: value for name, value in env.items() if name != missing})


def test_a_kubernetes_indexed_job_without_a_process_count_is_refused():
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
    with pytest.raises(UserError, match="MESHTUNE_PROCESSES is not set"):
        detect_process_info(pod)
    info = detect_process_info({**pod, "MESHTUNE_PROCESSES": "2", "MESHTUNE_COORDINATOR": "run-0.run:61400"})
    assert (info.process_index, info.process_count) == (1, 2)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"MESHTUNE_PROCESSES": "2", "MESHTUNE_PROCESS": "2", "MESHTUNE_COORDINATOR": "a:1"}, "process 2 of 2"),
        ({"MESHTUNE_PROCESSES": "two", "MESHTUNE_PROCESS": "0"}, "is 'two', which is not a number"),
        ({"MESHTUNE_PROCESSES": "2", "MESHTUNE_PROCESS": "0"}, "MESHTUNE_COORDINATOR is not set"),
        ({"MESHTUNE_PROCESS": "0"}, "MESHTUNE_PROCESSES is not set"),
        ({"MESHTUNE_PROCESSES": "2", "MESHTUNE_PROCESS": "0", "MESHTUNE_COORDINATOR": "a"}, "is not HOST:PORT"),
        ({"MESHTUNE_PROCESSES": "2", "MESHTUNE_PROCESS": "0", "MESHTUNE_COORDINATOR": "a:99999"}, "is not HOST:PORT"),
    ],
)
def test_contradictory_variables_are_an_error(env: dict[str, str], message: str):
    with pytest.raises(UserError, match=message):
        detect_process_info(env)


def test_processes_that_see_the_same_gpus_divide_them():
    info = ProcessInfo(1, 2, "a:1", "Slurm", local_index=1, local_count=2)
    assert local_device_ids(info, 8) == [4, 5, 6, 7]
    assert local_device_ids(info, 1) is None  # each process sees a single GPU of its own
    with pytest.raises(UserError, match="3 GPUs, which do not divide by 2"):
        local_device_ids(info, 3)


def test_the_only_process_of_a_host_uses_all_gpus():
    assert local_device_ids(ProcessInfo(1, 2, "a:1", "Slurm"), 8) is None


def test_gpus_are_counted_by_the_drivers_environment_variables():
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1,5"}) == 3
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert visible_gpus({"ROCR_VISIBLE_DEVICES": "GPU-1,GPU-2"}) == 2
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1", "JAX_PLATFORMS": "cpu"}) == 0
