"""What the launchers that start processes tell them: the only module that knows a launcher's variables."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from jaxhetero.config import format_address
from jaxhetero.errors import ConfigError

Environment: TypeAlias = Mapping[str, str]
Settings: TypeAlias = dict[str, str | int]
"""Fields of ``Config`` by their names."""


@dataclass(frozen=True)
class Launcher:
    """A launcher, and the variables in which it tells a process its place."""

    name: str
    rank: str
    """The variable with the number of this process."""
    count: str = ""
    """The variable with the number of processes. Empty where there is none: then each process is one of several."""
    read_job: Callable[[Environment], Settings] = lambda environ: {}
    """What else it tells of the job: where processes meet, how many of each kind there are."""

    def describe(self, environ: Environment) -> str:
        """How the launcher says that this process is one of several; empty if it does not say so."""
        if not environ.get(self.rank) or (self.count and environ.get(self.count, "") in ("", "0", "1")):
            return ""
        told = " and ".join(f"{variable}={environ[variable]}" for variable in (self.rank, self.count) if variable)
        return f"{self.name} has set {told}"

    def read_place(self, environ: Environment) -> Settings:
        """The rank and the number of workers, as far as it tells them."""
        variables = {"rank": self.rank, "worker_count": self.count}
        return {name: _number(environ, variable) for name, variable in variables.items() if variable}


def _number(environ: Environment, variable: str) -> int:
    try:
        return int(environ[variable])
    except ValueError:
        raise ConfigError(f"{variable} is {environ[variable]!r}; it must be a whole number") from None


def _read_slurm(environ: Environment) -> Settings:
    """In a heterogeneous job, the first component are the workers, the second the reducers."""
    workers, reducers = (environ.get(f"SLURM_NTASKS_HET_GROUP_{group}", "") for group in range(2))
    counts: Settings = {"worker_count": int(workers), "reducer_count": int(reducers)} if workers and reducers else {}
    hosts = environ.get("SLURM_JOB_NODELIST_HET_GROUP_0") if counts else environ.get("SLURM_JOB_NODELIST")
    # Each component may have an id of its own.
    job = int(environ.get("SLURM_JOB_ID_HET_GROUP_0") or environ.get("SLURM_JOB_ID") or 0)
    # Below the ports that systems give out by themselves, which begin at 32768.
    return counts | {"coordinator": f"{first_host(hosts)}:{20_000 + job % 10_000}"} if hosts else counts


def first_host(hosts: str) -> str:
    """The first name of a list of hosts as Slurm writes it.

    Example:
      >>> from jaxhetero._job.launchers import first_host
      >>> first_host("gpu-[03-07,12]-ib,login"), first_host("b3")
      ('gpu-03-ib', 'b3')
    """
    found = re.match(r"(?:[^,\[]|\[[^]]*\])*", hosts)
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", found[0]) if found else ""


def _port_after(host: str, port: str) -> Settings:
    """Where other libraries meet, on rank 0: jaxhetero takes the port after theirs."""
    return {"coordinator": format_address(host.strip("[]"), int(port) + 1)} if host and port.isdigit() else {}


def _read_torchrun(environ: Environment) -> Settings:
    return _port_after(environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", ""))


def _read_kubeflow(environ: Environment) -> Settings:
    host, _, port = environ.get("JAX_COORDINATOR_ADDRESS", "").rpartition(":")
    return _port_after(host, port)


LAUNCHERS = (
    # SLURM_NTASKS is the job's in a batch script, which is one process. Only srun sets the number of a step's tasks.
    Launcher("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", _read_slurm),
    Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    Launcher("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE"),
    Launcher("torchrun, or Ray Train for PyTorch,", "RANK", "WORLD_SIZE", _read_torchrun),
    Launcher("Kubeflow Trainer", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES", _read_kubeflow),
    Launcher("an indexed Job of Kubernetes", "JOB_COMPLETION_INDEX"),
)


def _find(environ: Environment) -> Launcher | None:
    return next((launcher for launcher in LAUNCHERS if launcher.describe(environ)), None)


def describe_launcher(environ: Environment = os.environ) -> str:
    """How a launcher says that it has started this process as one of several; empty if none does.

    Example:
      >>> from jaxhetero._job.launchers import describe_launcher
      >>> describe_launcher({"PMI_RANK": "1", "PMI_SIZE": "8"})
      'MPICH or Intel MPI has set PMI_RANK=1 and PMI_SIZE=8'
    """
    launcher = _find(environ)
    return _describe_ray_train() if launcher is None else launcher.describe(environ)


def read_worker(environ: Environment = os.environ) -> Settings:
    """The settings that a launcher tells a worker; none if it was not started as one of several.

    The restart count of Slurm is told in any process of its jobs.

    Example:
      >>> from jaxhetero._job.launchers import read_worker
      >>> read_worker({"JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "4", "JAX_COORDINATOR_ADDRESS": "a:6666"})
      {'rank': 1, 'worker_count': 4, 'coordinator': 'a:6667'}
    """
    found: Settings = {}
    if environ.get("SLURM_RESTART_COUNT"):
        found["restart_count"] = _number(environ, "SLURM_RESTART_COUNT")
    launcher = _find(environ)
    return found if launcher is None else found | launcher.read_place(environ) | launcher.read_job(environ)


def read_batch_script(environ: Environment = os.environ) -> Settings:
    """The settings that Slurm tells a batch script: where the job meets, and how often it was started anew.

    Example:
      >>> from jaxhetero._job.launchers import read_batch_script
      >>> read_batch_script({"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "gpu[3-4]", "SLURM_RESTART_COUNT": "1"})
      {'restart_count': 1, 'coordinator': 'gpu3:20017'}
    """
    return read_worker({"SLURM_RESTART_COUNT": environ.get("SLURM_RESTART_COUNT", "")}) | _read_slurm(environ)


def read_reducer(environ: Environment = os.environ) -> Settings:
    """The settings that a launcher tells a dedicated reducer: where the job meets, and which reducer this is.

    Example:
      >>> from jaxhetero._job.launchers import read_reducer
      >>> read_reducer({"JOB_COMPLETION_INDEX": "2"})
      {'number': 2}
    """
    if not environ.get("SLURM_STEP_NUM_TASKS"):
        index = environ.get("JOB_COMPLETION_INDEX")
        return {"number": _number(environ, "JOB_COMPLETION_INDEX")} if index else {}
    job = _read_slurm(environ)
    found = {name: job[name] for name in ("coordinator",) if name in job}
    # One task may be one of many steps. In a step of both components, tasks are numbered across them.
    tasks = int(environ["SLURM_STEP_NUM_TASKS"])
    if job.get("reducer_count", tasks if tasks > 1 else None) == tasks:
        found["number"] = _number(environ, "SLURM_PROCID")
    return found


def read_process_count(environ: Environment = os.environ) -> int | None:
    """How many workers and reducers a launcher has started together; None if it does not say so.

    Example:
      >>> from jaxhetero._job.launchers import read_process_count
      >>> read_process_count({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"})
      4
    """
    job = _read_slurm(environ)
    if "reducer_count" in job:
        return int(job["worker_count"]) + int(job["reducer_count"])
    launcher = _find(environ)
    return _number(environ, launcher.count) if launcher is not None and launcher.count else None


def _describe_ray_train() -> str:
    """As ``Launcher.describe``. Ray Train sets no variable for JAX, but its workers can be asked."""
    train = sys.modules.get("ray.train")
    if train is None:
        return ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The older Ray Train gives a warning where the newer one raises.
            context = train.get_context()
            rank, count = context.get_world_rank(), context.get_world_size()
    except RuntimeError:  # This process is no worker of Ray Train.
        return ""
    return f"Ray Train says that its world rank is {rank} of {count}" if count > 1 else ""
