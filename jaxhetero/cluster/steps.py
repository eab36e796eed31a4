"""``python -m jaxhetero.cluster.steps COMMAND...``: keeps the workers of an elastic job, inside a job of Slurm.

It runs the coordinator, and the command once for each worker, with the worker's rank in its environment. The command is
an ``srun`` that makes a step of one task. A worker that is lost, as with its node, is started again while the others go
on, and the job of Slurm runs on. Imports neither jax nor numpy.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxhetero._job.launchers import read_batch_script
from jaxhetero.config import Config, read_environment
from jaxhetero.errors import ConfigError, JaxheteroError
from jaxhetero.launch.attempt import Attempt
from jaxhetero.launch.job import MOST_COMEBACKS, make_log_dir
from jaxhetero.launch.process import COORDINATOR
from jaxhetero.launch.terminal import Display, show_count

_NAME = "jaxhetero.cluster.steps"
_USAGE = 2
# Slurm itself kills what is left of a step.
_STOP_S = 10.0
# srun writes it when the node of its step is gone, and its exit code may be 0 nevertheless.
_NODE_IS_LOST = b"srun: error: Node failure on "


def keep_workers(command: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run an elastic job to its end: its coordinator on this host, and the command for each worker.

    The settings are those of the environment: ``JAXHETERO_ELASTIC``, ``JAXHETERO_WORKER_COUNT``, the token. Without
    ``JAXHETERO_COORDINATOR`` the coordinator listens where Slurm's variables lead all tasks. Must run on the main
    thread, because it handles signals, which it passes on.

    Returns:
      The exit code, as that of ``jaxhetero launch``.

    Raises:
      ConfigError: a setting is missing or wrong, or the command cannot be started.
    """
    found: dict[str, Any] = {**read_batch_script(environ), **read_environment(environ), "rank": 0}
    config = Config(**found)
    if not config.elastic:
        raise ConfigError("this job is not elastic: set JAXHETERO_ELASTIC to MIN:MAX, as in 2:8")
    own = {f"worker {rank}": {"rank": rank} for rank in range(config.worker_count)}
    commands = {COORDINATOR: [sys.executable, "-m", "jaxhetero", "coordinator"], **dict.fromkeys(own, command)}
    display = Display(list(commands), _NAME)
    log_dir = make_log_dir(Path("jaxhetero-logs") / f"slurm-{environ.get('SLURM_JOB_ID', os.getpid())}")
    if config.restart_count:
        log_dir = make_log_dir(log_dir / f"restart-{config.restart_count}")
    workers = show_count(config.worker_count, "worker")
    display.message(f"{workers}, elastic {config.elastic}, coordinator {config.coordinator}, logs in {log_dir}")
    shared = {"coordinator": config.coordinator}
    attempt = Attempt(
        commands,
        shared,
        {COORDINATOR: {}, **own},
        log_dir,
        _STOP_S,
        display,
        most_comebacks=MOST_COMEBACKS,
        failure_words=_NODE_IS_LOST,
        place_count=_count_nodes(environ),
    )
    with attempt:
        return attempt.run().code


def _count_nodes(environ: Mapping[str, str]) -> int | None:
    """How many nodes the workers have, if Slurm tells it."""
    text = environ.get("SLURM_JOB_NUM_NODES_HET_GROUP_0") or environ.get("SLURM_JOB_NUM_NODES") or ""
    return int(text) if text.isdigit() else None


if __name__ == "__main__":
    try:
        if len(sys.argv) < 2:
            raise ConfigError("no command: give what starts one worker, as in `srun --nodes=1 --ntasks=1 python x.py`")
        sys.exit(keep_workers(sys.argv[1:]))
    except JaxheteroError as error:
        print(f"{_NAME}: {error}", file=sys.stderr, flush=True)
        sys.exit(_USAGE if isinstance(error, ConfigError) else 1)
