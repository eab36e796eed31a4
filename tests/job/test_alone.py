"""A worker is alone only where that is meant: never because a launcher's process was given no settings."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import jaxhetero
from jaxhetero._job.launchers import LAUNCHERS
from jaxhetero.config import ENV_PREFIX
from jaxhetero.errors import ConfigError
from tests.support.cluster import ROOT, free_port, program_path

# As the launchers set them, of what else they set only what might mislead. Those of Slurm are of version 22.05.
SEVERAL = {
    "srun": (
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"},
        "Slurm has set SLURM_PROCID=1 and SLURM_STEP_NUM_TASKS=4",
    ),
    # With --mpi=pmi2, srun says it twice.
    "srun with PMI": (
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "PMI_RANK": "0", "PMI_SIZE": "4"},
        "Slurm has set SLURM_PROCID=0 and SLURM_STEP_NUM_TASKS=4",
    ),
    "Open MPI": (
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "8"},
        "Open MPI has set OMPI_COMM_WORLD_RANK=0 and OMPI_COMM_WORLD_SIZE=8",
    ),
    # mpirun in a batch script, or in a step of one task.
    "Open MPI in Slurm": (
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"},
        "Open MPI has set OMPI_COMM_WORLD_RANK=3 and OMPI_COMM_WORLD_SIZE=8",
    ),
    "MPICH": ({"PMI_RANK": "2", "PMI_SIZE": "3"}, "MPICH or Intel MPI has set PMI_RANK=2 and PMI_SIZE=3"),
    "an indexed Job": (
        {"JOB_COMPLETION_INDEX": "0"},
        "an indexed Job of Kubernetes has set JOB_COMPLETION_INDEX=0",
    ),
    "a TrainJob": (
        {"JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "2", "JOB_COMPLETION_INDEX": "1"},
        "Kubeflow Trainer has set JAX_PROCESS_ID=1 and JAX_NUM_PROCESSES=2",
    ),
    "torchrun": (
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"},
        "torchrun, or Ray Train for PyTorch, has set RANK=1 and WORLD_SIZE=2",
    ),
}
ONE = {
    "no launcher": {},
    "a batch script of Slurm": {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"},
    "a step of one task": {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    "mpirun -n 1": {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    "torchrun of one": {"RANK": "0", "WORLD_SIZE": "1"},
    "a script's own RANK": {"RANK": "3"},
    "a script's own WORLD_SIZE": {"WORLD_SIZE": "3"},
}


def is_told(variable: str) -> bool:
    """Whether the variable tells a process its place."""
    return variable.startswith(ENV_PREFIX) or any(variable in (launcher.rank, launcher.count) for launcher in LAUNCHERS)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Without settings and launchers; what joined in it has left afterwards."""
    for variable in filter(is_told, list(os.environ)):
        monkeypatch.delenv(variable)
    yield monkeypatch
    jaxhetero.shutdown()


def set_all(environment: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for variable, value in variables.items():
        environment.setenv(variable, value)


def refusal() -> str:
    with pytest.raises(ConfigError) as caught:
        jaxhetero.initialize()
    return str(caught.value)


@pytest.mark.parametrize("case", SEVERAL)
def test_one_of_several_is_told_what_to_set(environment: pytest.MonkeyPatch, case: str) -> None:
    variables, told = SEVERAL[case]
    set_all(environment, variables)
    message = refusal()
    assert message.startswith(f"this process is one of several, because {told}; but no setting says how they meet: ")
    for setting in ("rank", "worker_count", "coordinator", "token"):
        assert setting in message
        assert f"JAXHETERO_{setting.upper()}" in message
    assert "alone=True" in message
    assert "JAXHETERO_ALONE=1" in message


@pytest.mark.parametrize("case", ONE)
def test_a_process_of_its_own_is_alone(environment: pytest.MonkeyPatch, case: str) -> None:
    set_all(environment, ONE[case])
    jaxhetero.initialize()
    assert (jaxhetero.rank(), jaxhetero.size()) == (0, 1)


@pytest.mark.parametrize(
    ("settings", "variables"),
    [({"alone": True}, {}), ({"worker_count": 1}, {}), ({"rank": 0, "worker_count": 1}, {}),
     ({}, {"JAXHETERO_ALONE": "1"}), ({}, {"JAXHETERO_RANK": "0", "JAXHETERO_WORKER_COUNT": "1"})],
)  # fmt: skip
def test_alone_where_that_is_said(
    environment: pytest.MonkeyPatch, settings: dict[str, Any], variables: dict[str, str]
) -> None:
    set_all(environment, SEVERAL["srun"][0] | variables)
    jaxhetero.initialize(**settings)
    assert (jaxhetero.rank(), jaxhetero.size()) == (0, 1)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"JAXHETERO_RANK": "3"}, "rank given, but no worker_count"),
        ({"JAXHETERO_COORDINATOR": "a:1", "JAXHETERO_TOKEN": "t"}, "coordinator given, but no worker_count"),
        ({"JAXHETERO_REDUCER_COUNT": "2", "JAXHETERO_RANK": "0"}, "rank, reducer_count given, but no worker_count"),
        ({"JAXHETERO_WORKER_COUNT": "4", "JAXHETERO_COORDINATOR": "a:1"}, "worker_count is 4, but there is no rank"),
        ({"JAXHETERO_WORKER_COUNT": "4", "JAXHETERO_ALONE": "1"}, "alone is set, but worker_count is 4"),
    ],
)
def test_half_of_the_settings_are_too_few(
    environment: pytest.MonkeyPatch, variables: dict[str, str], words: str
) -> None:
    set_all(environment, variables)
    assert words in refusal()


@pytest.mark.parametrize(("count", "is_several"), [(1, False), (2, True)])
def test_a_worker_of_ray_train(environment: pytest.MonkeyPatch, count: int, is_several: bool) -> None:
    """Ray Train 2.60 sets no variables for JAX on CPUs; its context, which its workers have, is asked."""
    context = SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: count)
    train = ModuleType("ray.train")
    train.get_context = lambda: context  # type: ignore[attr-defined]
    environment.setitem(sys.modules, "ray.train", train)
    if is_several:
        assert "because Ray Train says that its world rank is 0 of 2; but no setting" in refusal()
    else:
        jaxhetero.initialize()


def test_a_process_that_has_loaded_ray_train_and_is_no_worker_of_it(environment: pytest.MonkeyPatch) -> None:
    def get_context() -> None:
        raise RuntimeError("Ray Train function utilities not initialized.")

    train = ModuleType("ray.train")
    train.get_context = get_context  # type: ignore[attr-defined]
    environment.setitem(sys.modules, "ray.train", train)
    jaxhetero.initialize()


def outer_environment() -> dict[str, str]:
    told = {variable: value for variable, value in os.environ.items() if not is_told(variable)}
    return told | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "error"}


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun here")
def test_a_real_mpirun() -> None:
    root = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    command = ["mpirun", "-n", "2", sys.executable, str(program_path("alone.py"))]
    done = subprocess.run(command, env=outer_environment() | root, capture_output=True, text=True, timeout=120)
    assert done.stdout.count("this process is one of several, because ") == 2, done.stderr
    assert "SIZE=2; but no setting says how they meet" in done.stdout


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun here")
def test_a_real_mpirun_tells_rank_and_count() -> None:
    """Of Open MPI, or of MPICH. What it cannot tell is where the workers meet, and the token."""
    root = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    meeting = {"JAXHETERO_COORDINATOR": f"127.0.0.1:{free_port()}", "JAXHETERO_TOKEN": "secret"}
    command = ["mpirun", "-n", "2", sys.executable, str(program_path("first_sum.py"))]
    done = subprocess.run(
        command, env=outer_environment() | root | meeting, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" of 2: [1. 3. 5. 7. 9.]") == 2


def test_jax_processes_that_meet_after_initialize() -> None:
    """The world was one when it was made; a collective that would be silently alone is refused."""
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, str(program_path("alone.py")), address, "2"]

    def told(variables: dict[str, str]) -> list[str]:
        environment = outer_environment() | variables
        processes = [
            subprocess.Popen([*command, str(number)], env=environment, stdout=subprocess.PIPE, text=True)
            for number in range(2)
        ]
        return [process.communicate(timeout=120)[0] for process in processes]

    for output in told({}):
        assert output == (
            "loss: there are 2 JAX processes, but worker_count is 1; make every process of jax.distributed a worker of "
            "its own: call jaxhetero.initialize() after jax.distributed.initialize(); if each is meant to be alone, "
            "give jaxhetero.initialize(alone=True)\n"
        )
    assert told({"JAXHETERO_ALONE": "1"}) == ["the sum is 1.0\n"] * 2
