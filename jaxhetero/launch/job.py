"""``jaxhetero launch``: starts one job's workers and reducers on this machine, and restarts them after a failure."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxhetero._job.ports import reserve_port
from jaxhetero.config import ENV_PREFIX, Config, read_environment, write_environment
from jaxhetero.doctor.status import job_file
from jaxhetero.errors import ConfigError
from jaxhetero.launch.attempt import Attempt, End
from jaxhetero.launch.process import COORDINATOR, signal_name
from jaxhetero.launch.terminal import Display, show_count
from jaxhetero.launch.timeline import JobTimeline

_LOOPBACK = "127.0.0.1"
MOST_COMEBACKS = 1000
"""How often lost workers of an elastic job are started again, if nobody says how often."""


@dataclass(frozen=True)
class Job:
    """A command to run in several workers, and the reducers beside them.

    Fields that are None keep the value that the environment sets, or the default of ``jaxhetero.config.Config``.

    Raises:
      ConfigError: there is no such command, or a setting is out of its range.

    Example:
      >>> from jaxhetero.launch import Job
      >>> job = Job(command=["python3", "train.py"], worker_count=2, reducer_count=1)
      >>> list(job.commands())
      ['reducer 0', 'worker 0', 'worker 1']
    """

    command: Sequence[str]
    """The program of every worker and its arguments."""
    worker_count: int
    reducer_count: int = 0
    """How many reducers are processes of their own. 0: each worker runs one itself."""
    colocated_count: int | None = None
    elastic: str = ""
    """``"MIN:MAX"``: the job goes on without workers that are lost, and its coordinator is a process of its own."""
    coordinator_port: int = 0
    """The port of rank 0, or of that process. 0: any free one."""
    log_dir: Path | None = None
    """The folder for the logs. Default: a new one in ``jaxhetero-logs``, named after the time."""
    metrics_port: int = 0
    """The port of the metrics of worker 0; the other workers have those after it, then the reducers. 0: no metrics."""
    timeline: Path | None = None
    """The file for a trace of all rounds of all workers, written at the end."""
    start_timeout_ms: int | None = None
    timeout_ms: int | None = None
    lost_after_ms: int | None = None
    stop_timeout_ms: int = 10_000
    """How long processes may take to end after a signal to end, before they are killed."""
    max_restarts: int = 0
    """How often all processes are started anew after a failure that may be temporary. In an elastic job, also how often
    lost workers are started again, while the others go on; 0 there: 1000 times."""

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError(
                "no command: give what each worker runs, as in `jaxhetero launch --workers 2 -- python x.py`"
            )
        if shutil.which(self.command[0]) is None:
            raise ConfigError(f"command not found, or not executable: {self.command[0]}")
        if not 0 <= self.coordinator_port <= 65535:
            raise ConfigError(f"coordinator_port is {self.coordinator_port}; it must be in 0..65535")
        last_port = self.metrics_port + self.worker_count + self.reducer_count - 1
        if self.metrics_port and not 1 <= self.metrics_port <= last_port <= 65535:
            raise ConfigError(f"metrics_port is {self.metrics_port}; this job's ports from there must be in 1..65535")
        if self.stop_timeout_ms < 0:
            raise ConfigError(f"stop_timeout_ms is {self.stop_timeout_ms}; it must be 0 or more")
        if self.max_restarts < 0:
            raise ConfigError(f"max_restarts is {self.max_restarts}; it must be 0 or more")

    def comebacks(self) -> int:
        """How often lost workers of an elastic job are started again, in one attempt."""
        return (self.max_restarts or MOST_COMEBACKS) if self.elastic else 0

    def commands(self) -> dict[str, Sequence[str]]:
        """The command of each process, by the name of the process: "worker 0", "reducer 1"."""
        own = (sys.executable, "-m", "jaxhetero")
        reducer = (*own, "reducer")
        return {
            **({COORDINATOR: (*own, "coordinator")} if self.elastic else {}),
            **{f"reducer {number}": (*reducer, "--number", str(number)) for number in range(self.reducer_count)},
            **{f"worker {rank}": self.command for rank in range(self.worker_count)},
        }

    def own_settings(self, rounds_files: Mapping[str, str]) -> dict[str, dict[str, str | int]]:
        """The settings of each process alone, by its name, as are the files where workers write their rounds."""
        own: dict[str, dict[str, str | int]] = {
            **{name: {"rank": rank, "timeline_file": file} for rank, (name, file) in enumerate(rounds_files.items())},
            **{f"reducer {number}": {} for number in range(self.reducer_count)},
        }
        for offset, settings in enumerate(own.values()):
            settings["metrics_port"] = self.metrics_port and self.metrics_port + offset
        return own | {COORDINATOR: {}}

    def settings(self, coordinator: str, token: str, restart_count: int) -> dict[str, str | int]:
        """The settings that all processes of the job share, by the names of ``Config``."""
        settings: dict[str, str | int] = {
            "worker_count": self.worker_count,
            "reducer_count": self.reducer_count,
            "coordinator": coordinator,
            "token": token,
            "host": _LOOPBACK,
            "restart_count": restart_count,
        }
        if self.colocated_count is not None:
            settings["colocated_count"] = self.colocated_count
        if self.start_timeout_ms is not None:
            settings["start_timeout_ms"] = self.start_timeout_ms
        if self.timeout_ms is not None:
            settings["timeout_ms"] = self.timeout_ms
        if self.lost_after_ms is not None:
            settings["lost_after_ms"] = self.lost_after_ms
        if self.elastic:
            settings["elastic"] = self.elastic
        # Find a bad setting here, also one of the environment, and not once more in each process.
        config: dict[str, Any] = dict(read_environment(write_environment(settings | {"rank": 0})))
        Config(**config)
        return settings


def launch(job: Job) -> int:
    """Run a job to its end, with its restarts.

    Blocks until every process has ended. The output of all processes is shown with their names in front, and kept in
    ``log_dir``. Signals (SIGINT, SIGTERM, SIGHUP) are passed on to the workers. Must run on the main thread, because it
    handles signals, and before anything starts another thread, because it forks.

    Returns:
      The exit code: 0 after success, the code of the process that failed first, or 128 + N after signal N.

    Raises:
      ConfigError: a process or its log cannot be started, or a setting is wrong.
      AddressInUse: ``coordinator_port`` belongs to another process.

    Example:
      >>> import pathlib
      >>> from jaxhetero.launch import Job, launch
      >>> hello = ["sh", "-c", "echo rank $JAXHETERO_RANK of $JAXHETERO_WORKER_COUNT"]
      >>> launch(Job(hello, worker_count=2, log_dir=pathlib.Path("logs")))
      0
      >>> print(pathlib.Path("logs/worker-1.log").read_text(), end="")
      rank 1 of 2
    """
    display, timeline = Display(list(job.commands())), JobTimeline(job.timeline)
    log_dir, why = job.log_dir, ""
    for restart_count in itertools.count():
        with reserve_port(job.coordinator_port) as holder:
            coordinator = f"{_LOOPBACK}:{holder.getsockname()[1]}"
            settings = job.settings(coordinator, secrets.token_hex(32), restart_count)
            log_dir = make_log_dir(log_dir)
            own_log_dir = make_log_dir(log_dir / f"restart-{restart_count}") if restart_count else log_dir
            display.message(
                f"{why}{show_count(job.worker_count, 'worker')}, {show_count(job.reducer_count, 'reducer')}, "
                f"coordinator {coordinator}, logs in {own_log_dir}{_show_ports(job)}"
            )
            own = job.own_settings(timeline.start(job.worker_count, own_log_dir, restart_count))
            stop_s = job.stop_timeout_ms / 1000
            with (
                job_file(log_dir, coordinator, str(settings["token"]), _encrypts()),
                Attempt(job.commands(), settings, own, own_log_dir, stop_s, display, job.comebacks()) as attempt,
            ):
                end = attempt.run()
        if not end.failure or not job.max_restarts:
            break
        if refusal := _refuse_restart(job, end, attempt.signals, restart_count):
            display.message(f"not restarted: {refusal}")
            break
        why = f"restart {restart_count + 1} of {job.max_restarts}, because {end.failure}: "
    timeline.write(display)
    return end.code


def _encrypts() -> bool:
    """Whether the environment, which all processes of the job get, says so. The rest of it is theirs to read."""
    own = {name: text for name, text in os.environ.items() if name == f"{ENV_PREFIX}ENCRYPT"}
    return bool(read_environment(own).get("encrypt"))


def _refuse_restart(job: Job, end: End, signals: Sequence[int], restart_count: int) -> str:
    """The reason why a job that failed is not started anew; empty if it is."""
    if signals:
        return f"got {signal_name(signals[0])}"
    if restart_count == job.max_restarts:
        return f"that was restart {restart_count} of {job.max_restarts}"
    return end.lasting


def _show_ports(job: Job) -> str:
    if not job.metrics_port:
        return ""
    last_port = job.metrics_port + job.worker_count + job.reducer_count - 1
    return f", metrics at {_LOOPBACK}:{job.metrics_port} to {last_port}"


def make_log_dir(chosen: Path | None) -> Path:
    """Make the folder for the logs; by default a new one in ``jaxhetero-logs``, named after the time."""
    try:
        if chosen is not None:
            chosen.mkdir(parents=True, exist_ok=True)
            return chosen
        base = Path("jaxhetero-logs") / time.strftime("%Y%m%d-%H%M%S")
        base.parent.mkdir(exist_ok=True)
        for name in (base.name, *(f"{base.name}-{number}" for number in range(2, 1000))):
            with contextlib.suppress(FileExistsError):
                base.with_name(name).mkdir()
                return base.with_name(name)
        raise ConfigError(f"{base.parent} has too many folders of this second; give --log-dir")
    except OSError as error:
        raise ConfigError(f"cannot make a folder for the logs: {error.filename}: {error.strerror}") from None
