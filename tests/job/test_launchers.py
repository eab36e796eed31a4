"""What a launcher has told a process, nobody has to set again. Slurm itself is in test_slurm.py, Ray in test_ray.py."""

from __future__ import annotations

import contextlib

import pytest

from jaxhetero._job.launchers import first_host, read_process_count, read_reducer, read_worker
from jaxhetero._job.settings import make_config
from jaxhetero.errors import ConfigError

HETEROGENEOUS = {
    "SLURM_JOB_ID": "71", "SLURM_JOB_ID_HET_GROUP_0": "71", "SLURM_HET_SIZE": "2", "SLURM_NTASKS_HET_GROUP_0": "4",
    "SLURM_NTASKS_HET_GROUP_1": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "gpu[1-2]", "SLURM_JOB_NODELIST": "cpu[1-2]",
}  # fmt: skip
WORKERS = {
    "a worker of a heterogeneous job of Slurm": (
        HETEROGENEOUS | {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_RESTART_COUNT": "1"},
        {"rank": 3, "worker_count": 4, "reducer_count": 2, "coordinator": "gpu1:20071", "restart_count": 1},
    ),
    "a plain job of Slurm": (
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "a,b"},
        {"rank": 1, "worker_count": 2, "coordinator": "a:22345"},
    ),
    "a batch script of Slurm": ({"SLURM_PROCID": "0", "SLURM_JOB_ID": "9", "SLURM_RESTART_COUNT": "2"},
        {"restart_count": 2}),
    "mpirun": ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8"}, {"rank": 1, "worker_count": 8}),
    "torchrun": (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
        {"rank": 1, "worker_count": 2, "coordinator": "10.0.0.1:29501"},
    ),
    "torchrun over IPv6": (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "fd00::1", "MASTER_PORT": "29500"},
        {"rank": 1, "worker_count": 2, "coordinator": "[fd00::1]:29501"},
    ),
    "Kubeflow Trainer": (
        {"JAX_PROCESS_ID": "0", "JAX_NUM_PROCESSES": "3", "JAX_COORDINATOR_ADDRESS": "job-node-0-0.job:6666"},
        {"rank": 0, "worker_count": 3, "coordinator": "job-node-0-0.job:6667"},
    ),
    "an indexed Job": ({"JOB_COMPLETION_INDEX": "5"}, {"rank": 5}),
    "nobody": ({"HOME": "/root"}, {}),
}  # fmt: skip
REDUCERS = {
    "a heterogeneous job of Slurm": (
        HETEROGENEOUS | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
        {"coordinator": "gpu1:20071", "number": 1},
    ),
    # There a task's number counts the workers too.
    "one step of both components": (
        HETEROGENEOUS | {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6"}, {"coordinator": "gpu1:20071"},
    ),
    "a step of one task": (
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a[3-4]-n[08,1]"},
        {"coordinator": "a3-n08:20007"},
    ),
    "an indexed Job": ({"JOB_COMPLETION_INDEX": "5"}, {"number": 5}),
    "nobody": ({}, {}),
}  # fmt: skip


@pytest.mark.parametrize("launcher", WORKERS)
def test_a_worker_is_told_its_place(launcher: str) -> None:
    environ, told = WORKERS[launcher]
    assert read_worker(environ) == told


@pytest.mark.parametrize("launcher", REDUCERS)
def test_a_reducer_is_told_where_the_job_meets(launcher: str) -> None:
    environ, told = REDUCERS[launcher]
    assert read_reducer(environ) == told


def test_the_doctor_is_told_how_many_come() -> None:
    assert read_process_count(HETEROGENEOUS | {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6"}) == 6
    assert read_process_count({"PMI_RANK": "1", "PMI_SIZE": "4"}) == 4
    assert read_process_count({"JOB_COMPLETION_INDEX": "1"}) is None
    assert read_process_count({}) is None


def test_lists_of_hosts() -> None:
    assert first_host("n1") == "n1"
    assert first_host("n[001-004],m[1-2]") == "n001"
    assert first_host("a-[3,5-7]-x[2-4]") == "a-3-x2"


def settle(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], **settings: object) -> tuple[object, ...]:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with contextlib.ExitStack() as held:
        config = make_config(settings, held)
    return config.rank, config.worker_count, config.coordinator, config.restart_count


PLAIN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "a,b"}


def test_settings_win_over_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = PLAIN | {"SLURM_RESTART_COUNT": "1", "JAXHETERO_TOKEN": "t"}
    assert settle(monkeypatch, environ) == (1, 2, "a:20005", 1)
    assert settle(monkeypatch, {"JAXHETERO_COORDINATOR": "c:1"}) == (1, 2, "c:1", 1)
    assert settle(monkeypatch, {}, coordinator="d:1", restart_count=3) == (1, 2, "d:1", 3)
    # A job inside the launcher's job has workers of its own.
    assert settle(monkeypatch, {}, rank=7, worker_count=8) == (7, 8, "c:1", 1)
    assert settle(monkeypatch, {}, worker_count=1)[:2] == (0, 1)


def test_an_indexed_job_tells_the_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"JAXHETERO_WORKER_COUNT": "8", "JAXHETERO_COORDINATOR": "c:1", "JAXHETERO_TOKEN": "t"}
    assert settle(monkeypatch, given | {"JOB_COMPLETION_INDEX": "3"})[:3] == (3, 8, "c:1")


def test_a_job_without_a_token_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"Slurm has set SLURM_PROCID=1 .*; but they have no job token: give"):
        settle(monkeypatch, PLAIN)


def test_a_number_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match="RANK is 'first'; it must be a whole number"):
        read_worker({"RANK": "first", "WORLD_SIZE": "2"})
