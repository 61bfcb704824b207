"""Nodes and processes: flags win over the user's variables, these over Kubeflow's, these over Slurm's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primus.errors import UsageError
from primus.machine.cluster import DEFAULT_PORT, ClusterLayout, LayoutFlags, find_layout

SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_GPUS_ON_NODE": "4",
}
PET = {
    "PET_NNODES": "3",
    "PET_NODE_RANK": "2",
    "PET_NPROC_PER_NODE": "5",
    "PET_MASTER_ADDR": "pod-0",
    "PET_MASTER_PORT": "23456",
}
USER = {"NNODES": "4", "NODE_RANK": "3", "GPUS_PER_NODE": "6", "MASTER_ADDR": "head", "MASTER_PORT": "999"}


def values(shape: ClusterLayout) -> tuple[int, int, int, str, int | None]:
    return shape.nproc, shape.nnodes, shape.node_rank, shape.master_addr, shape.master_port


@pytest.mark.parametrize(
    ("environ", "flags", "expected"),
    [
        ({}, {}, (8, 1, 0, "localhost", None)),
        (SLURM, {}, (4, 2, 1, "gpu07", DEFAULT_PORT)),
        (PET, {}, (5, 3, 2, "pod-0", 23456)),
        (USER, {}, (6, 4, 3, "head", 999)),
        (SLURM | PET, {}, (5, 3, 2, "pod-0", 23456)),
        (SLURM | PET | USER, {}, (6, 4, 3, "head", 999)),
        (
            SLURM | PET | USER,
            {"nproc": 1, "nnodes": 2, "node_rank": 0, "master_addr": "a", "master_port": 1},
            (1, 2, 0, "a", 1),
        ),
        (SLURM, {"nproc": 2}, (2, 2, 1, "gpu07", DEFAULT_PORT)),
        (SLURM | {"SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}, {}, (4, 1, 0, "localhost", None)),
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}, {}, (8, 1, 0, "localhost", None)),
        ({"PET_NPROC_PER_NODE": "auto"}, {}, (8, 1, 0, "localhost", None)),
        ({"PET_NPROC_PER_NODE": "gpu"}, {}, (8, 1, 0, "localhost", None)),
        ({"NNODES": "", "MASTER_PORT": ""}, {}, (8, 1, 0, "localhost", None)),
        ({"MASTER_ADDR": "localhost", "NNODES": "2"}, {}, (8, 2, 0, "localhost", DEFAULT_PORT)),
        ({"MASTER_PORT": "29500"}, {}, (8, 1, 0, "localhost", 29500)),
    ],
)
def test_each_source_gives_its_values(
    environ: dict[str, str], flags: dict[str, object], expected: tuple[object, ...]
) -> None:
    assert values(find_layout(environ, lambda: 8, LayoutFlags(**flags))) == expected  # type: ignore[arg-type]


def test_a_machine_without_devices_runs_one_process() -> None:
    assert find_layout({}, lambda: 0).nproc == 1


def test_devices_are_counted_only_where_nobody_says_how_many() -> None:
    def count() -> int:
        raise AssertionError("counted")

    assert find_layout({"GPUS_PER_NODE": "2"}, count).nproc == 2


def test_every_value_tells_its_source() -> None:
    shape = find_layout(SLURM | {"NNODES": "2"}, lambda: 8, LayoutFlags(nproc=1))
    assert shape.sources == {
        "nproc": "--nproc",
        "nnodes": "$NNODES",
        "node_rank": "$SLURM_NODEID",
        "master_addr": "$SLURM_STEP_NODELIST",
        "master_port": "default",
    }


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"NNODES": "two"}, "$NNODES: 'two' is not a number"),
        ({"PET_NNODES": "1:4"}, "$PET_NNODES: '1:4' is not a number"),
        ({"NNODES": "0"}, "$NNODES: 0 is not a number of processes or nodes"),
        ({"GPUS_PER_NODE": "0"}, "$GPUS_PER_NODE: 0 is not a number of processes or nodes"),
        ({"GPUS_PER_NODE": "-1"}, "$GPUS_PER_NODE: -1 is not a number of processes or nodes"),
        ({"NODE_RANK": "1"}, "$NODE_RANK: node rank 1 of 1 nodes"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "$NODE_RANK: node rank 2 of 2 nodes"),
        ({"NODE_RANK": "-1"}, "$NODE_RANK: node rank -1 of 1 nodes"),
        ({"NNODES": "2"}, "2 nodes need the address of node 0"),
        ({"MASTER_PORT": "0"}, "$MASTER_PORT: 0 is not a port"),
        ({"MASTER_PORT": "65536"}, "$MASTER_PORT: 65536 is not a port"),
        ({"MASTER_PORT": "1.5"}, "$MASTER_PORT: '1.5' is not a number"),
    ],
)
def test_an_impossible_value_is_named_with_its_source(environ: dict[str, str], problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_layout(environ, lambda: 8)
    assert caught.value.problem == problem


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[07-08]", "gpu07"),
        ("gpu[3,5-6],cpu[1-2]", "gpu3"),
        ("gpu[001-128].cluster.local", "gpu001.cluster.local"),
        ("rack[1-2]node[03-04]", "rack1node03"),
        ("a-b.c,d", "a-b.c"),
    ],
)
def test_the_first_host_of_a_node_list_leads(nodes: str, first: str) -> None:
    assert find_layout(SLURM | {"SLURM_STEP_NODELIST": nodes}, lambda: 1).master_addr == first


@pytest.mark.parametrize(
    ("environ", "port"),
    [
        ({"SLURM_JOB_ID": "7"}, 20007),
        ({"SLURM_JOB_ID": "1234567"}, 24567),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"}, 21016),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, 23008),
        ({"SLURM_JOB_ID": "7", "MASTER_PORT": "999"}, 999),
        ({"SLURM_JOB_ID": "seven"}, DEFAULT_PORT),
        ({"SLURM_JOB_ID": "7", "NNODES": "2"}, DEFAULT_PORT),
    ],
)
def test_a_job_step_has_the_port_of_its_job(environ: dict[str, str], port: int) -> None:
    assert find_layout(SLURM | environ, lambda: 1).master_port == port


@given(st.integers(1, 10**8), st.integers(0, 8), st.integers(0, 2))
def test_jobs_steps_and_restarts_that_follow_each_other_have_ports_of_their_own(
    job: int, step: int, again: int
) -> None:
    def port(job: int, step: int, again: int) -> int | None:
        values = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step), "SLURM_RESTART_COUNT": str(again)}
        return find_layout(SLURM | values, lambda: 1).master_port

    ports = {port(job, step, again), port(job + 1, step, again), port(job, step + 1, again), port(job, step, again + 1)}
    assert len(ports) == 4
    assert all(20000 <= (each or 0) < 30000 for each in ports)


def test_the_source_of_a_port_is_the_job() -> None:
    assert find_layout(SLURM | {"SLURM_JOB_ID": "7"}, lambda: 1).sources["master_port"] == "$SLURM_JOB_ID"


def test_an_address_left_by_another_job_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        find_layout(SLURM | {"MASTER_ADDR": "gpu99"}, lambda: 1)
    assert caught.value.problem == "$MASTER_ADDR: gpu99 is not gpu07, the first node of this job"


@pytest.mark.parametrize("address", ["gpu07", "GPU07.cluster.local", "10.0.0.7", "fd00::7"])
def test_an_address_that_may_be_the_first_nodes_is_taken(address: str) -> None:
    assert find_layout(SLURM | {"MASTER_ADDR": address}, lambda: 1).master_addr == address


def test_an_address_that_is_typed_is_taken() -> None:
    assert find_layout(SLURM, lambda: 1, LayoutFlags(master_addr="other")).master_addr == "other"


words = st.sampled_from(["", "0", "1", "2", "-1", "99999", "x", "a[1", "a[1-2]", "auto", "65535", " ", "1e3"])


@given(st.dictionaries(st.sampled_from([*USER, *PET, *SLURM]), words), st.none() | st.integers(-1, 3))
def test_any_environment_gives_a_layout_or_one_message(environ: dict[str, str], nproc: int | None) -> None:
    try:
        shape = find_layout(environ, lambda: 2, LayoutFlags(nproc=nproc))
    except UsageError:
        return
    assert shape.world_size >= 1
    assert 0 <= shape.node_rank < shape.nnodes
    assert shape.nnodes == 1 or shape.master_port
