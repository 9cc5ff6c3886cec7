"""What launchers say of a process, as their own documentation and real jobs show it."""

from __future__ import annotations

import pytest

from meshtune.errors import UserError
from meshtune.mesh.accelerators import own_gpus, visible_gpus
from meshtune.mesh.peers import Place, find_place, first_host, tasks_per_node

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


def test_a_process_that_nothing_launched_is_alone():
    assert find_place({"HOME": "/root"}) == Place()


def test_meshtunes_own_variables_come_first():
    place = find_place({**SLURM, "MESHTUNE_COORDINATOR": "a:1", "MESHTUNE_PROCESSES": "2", "MESHTUNE_PROCESS": "1"})
    assert (place.process, place.processes, place.address) == (1, 2, ("a", 1))


def test_slurm_names_the_first_node_and_a_port_of_the_job():
    place = find_place(SLURM)
    assert (place.process, place.processes, place.launcher) == (3, 4, "Slurm")
    assert (place.local_process, place.local_processes) == (1, 2)
    assert place.address == ("gpu007", 61440 + 3)


def test_slurms_batch_script_is_no_process_of_its_job():
    script = {name: SLURM[name] for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")}
    assert find_place(script).processes == 1


def test_the_coordinator_of_a_known_launcher_can_be_replaced():
    assert find_place({**SLURM, "MESHTUNE_COORDINATOR": "ib0-node:5000"}).address == ("ib0-node", 5000)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node001", "node001"), ("node001,host2", "node001"), ("n[007,009-015],b", "n007"), ("r[1-2]x,b", "r1x")],
)
def test_the_first_host_of_a_node_list(nodes: str, first: str):
    assert first_host(nodes) == first


def test_tasks_of_every_node():
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]


def test_open_mpi_tells_where_mpirun_runs():
    place = find_place(OPEN_MPI)
    assert (place.process, place.processes, place.address[0]) == (1, 2, "10.96.0.1")
    six = {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp6://[fe80::b9b,2620:10d::2]:43370"}
    assert find_place(six).address[0] == "fe80::b9b"


def test_an_open_mpi_that_does_not_tell_needs_the_coordinator():
    silent = {name: value for name, value in OPEN_MPI.items() if "orte" not in name}
    with pytest.raises(UserError, match="MESHTUNE_COORDINATOR is not set"):
        find_place(silent)
    assert find_place({**silent, "MESHTUNE_COORDINATOR": "a:5000"}).address == ("a", 5000)


def test_skypilot_and_kubeflow_and_tpu_workers():
    sky = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5\n"}
    assert find_place(sky).address == ("10.0.0.4", 61400)
    assert find_place({"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.4\n"}).processes == 1
    kubeflow = {"COORDINATOR_ADDRESS": "job-0", "COORDINATOR_PORT": "6666", "NUM_PROCESSES": "3", "PROCESS_ID": "2"}
    assert find_place(kubeflow).address == ("job-0", 6666)
    tpu = {"TPU_WORKER_HOSTNAMES": "t-0,t-1", "TPU_WORKER_ID": "1"}
    assert (find_place(tpu).process, find_place(tpu).processes) == (1, 2)


def test_an_indexed_job_that_does_not_say_how_many_is_refused():
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
    with pytest.raises(UserError, match="MESHTUNE_PROCESSES is not set"):
        find_place(pod)
    place = find_place({**pod, "MESHTUNE_PROCESSES": "2", "MESHTUNE_COORDINATOR": "run-0.run:61400"})
    assert (place.process, place.processes) == (1, 2)


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
def test_what_does_not_fit_is_said(env: dict[str, str], message: str):
    with pytest.raises(UserError, match=message):
        find_place(env)


def test_processes_of_a_host_that_see_the_same_gpus_divide_them():
    place = Place(1, 2, "a:1", "Slurm", local_process=1, local_processes=2)
    assert own_gpus(place, 8) == [4, 5, 6, 7]
    assert own_gpus(place, 1) is None  # each is shown its own
    with pytest.raises(UserError, match="3 GPUs, which do not divide by 2"):
        own_gpus(place, 3)


def test_a_process_alone_on_its_host_has_all_gpus():
    assert own_gpus(Place(1, 2, "a:1", "Slurm"), 8) is None


def test_gpus_are_counted_by_the_drivers_variables():
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1,5"}) == 3
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert visible_gpus({"ROCR_VISIBLE_DEVICES": "GPU-1,GPU-2"}) == 2
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1", "JAX_PLATFORMS": "cpu"}) == 0
