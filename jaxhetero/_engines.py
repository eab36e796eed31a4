"""What the engines that start processes tell them: the only module that knows an engine's variables."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Engine:
    """An engine, and the variables in which it tells a process its place."""

    name: str
    rank: str
    """The variable with the number of this process."""
    count: str = ""
    """The variable with the number of processes. Empty where there is none: then each process is one of several."""

    def describe(self, environ: Mapping[str, str]) -> str:
        """How the engine says that this process is one of several; empty if it does not say so."""
        if not environ.get(self.rank) or (self.count and environ.get(self.count, "") in ("", "0", "1")):
            return ""
        told = " and ".join(f"{variable}={environ[variable]}" for variable in (self.rank, self.count) if variable)
        return f"{self.name} has set {told}"


ENGINES = (
    # SLURM_NTASKS is the job's in a batch script, which is one process. Only srun sets the number of a step's tasks.
    Engine("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    Engine("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    Engine("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE"),
    Engine("torchrun, or Ray Train for PyTorch,", "RANK", "WORLD_SIZE"),
    Engine("Kubeflow Trainer", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
    Engine("an indexed Job of Kubernetes", "JOB_COMPLETION_INDEX"),
)


def describe_engine(environ: Mapping[str, str] = os.environ) -> str:
    """How an engine says that it has started this process as one of several; empty if none does.

    Example:
      >>> from jaxhetero._engines import describe_engine
      >>> describe_engine({"PMI_RANK": "1", "PMI_SIZE": "8"})
      'MPICH or Intel MPI has set PMI_RANK=1 and PMI_SIZE=8'
    """
    return next(filter(None, (engine.describe(environ) for engine in ENGINES)), "") or _describe_ray_train()


def _describe_ray_train() -> str:
    """As ``Engine.describe``. Ray Train sets no variable for JAX, but its workers can be asked."""
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
