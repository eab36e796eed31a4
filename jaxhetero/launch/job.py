"""`jaxhetero launch`: one job's workers and reducers on this machine, started, and after a failure started anew."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxhetero.config import Config, read_environment, write_environment
from jaxhetero.errors import AddressInUse, ConfigError
from jaxhetero.launch.attempt import Attempt, End
from jaxhetero.launch.process import signal_name
from jaxhetero.launch.terminal import Display, show_count

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Job:
    """What to start. Settings that are None stay as the environment or their default has them."""

    command: Sequence[str]
    worker_count: int
    reducer_count: int = 0
    colocated_count: int | None = None
    coordinator_port: int = 0
    log_dir: Path | None = None
    start_timeout_ms: int | None = None
    timeout_ms: int | None = None
    stop_timeout_ms: int = 10_000
    """How long processes may take to end after they were told to, before they are killed."""
    max_restarts: int = 0
    """How often all processes are started anew after a failure that might not happen again."""

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError(
                "no command: give what each worker runs, as in `jaxhetero launch --workers 2 -- python x.py`"
            )
        if shutil.which(self.command[0]) is None:
            raise ConfigError(f"command not found, or not executable: {self.command[0]}")
        if not 0 <= self.coordinator_port <= 65535:
            raise ConfigError(f"coordinator_port is {self.coordinator_port}; it must be in 0..65535")
        if self.stop_timeout_ms < 0:
            raise ConfigError(f"stop_timeout_ms is {self.stop_timeout_ms}; it must be 0 or more")
        if self.max_restarts < 0:
            raise ConfigError(f"max_restarts is {self.max_restarts}; it must be 0 or more")

    def commands(self) -> dict[str, Sequence[str]]:
        """What each process runs, by its name."""
        reducer = (sys.executable, "-m", "jaxhetero", "reducer")
        return {
            **{f"reducer {number}": reducer for number in range(self.reducer_count)},
            **{f"worker {rank}": self.command for rank in range(self.worker_count)},
        }

    def settings(self, coordinator: str, token: str, restart_count: int) -> dict[str, str | int]:
        """What every process of the job has in common, by the names of ``Config``."""
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
        # Finds a bad setting, also one from the environment, once and before any process meets it.
        config: dict[str, Any] = dict(read_environment(write_environment(settings | {"rank": 0})))
        Config(**config)
        return settings


def launch(job: Job) -> int:
    """Run the job to its end, with the restarts that it may have; the exit code for this process."""
    display = Display(list(job.commands()))
    log_dir, why = job.log_dir, ""
    for restart_count in itertools.count():
        with reserve_port(job.coordinator_port) as holder:
            coordinator = f"{_LOOPBACK}:{holder.getsockname()[1]}"
            settings = job.settings(coordinator, secrets.token_hex(32), restart_count)
            log_dir = make_log_dir(log_dir)
            own_log_dir = make_log_dir(log_dir / f"restart-{restart_count}") if restart_count else log_dir
            display.message(
                f"{why}{show_count(job.worker_count, 'worker')}, {show_count(job.reducer_count, 'reducer')}, "
                f"coordinator {coordinator}, logs in {own_log_dir}"
            )
            with Attempt(job.commands(), settings, own_log_dir, job.stop_timeout_ms / 1000, display) as attempt:
                end = attempt.run()
        if not end.failure or not job.max_restarts:
            break
        if refusal := _refuse_restart(job, end, attempt.signals, restart_count):
            display.message(f"not restarted: {refusal}")
            break
        why = f"restart {restart_count + 1} of {job.max_restarts}, because {end.failure}: "
    return end.code


def _refuse_restart(job: Job, end: End, signals: Sequence[int], restart_count: int) -> str:
    """Why a job that failed is not started anew; empty if it is."""
    if signals:
        return f"got {signal_name(signals[0])}"
    if restart_count == job.max_restarts:
        return f"that was restart {restart_count} of {job.max_restarts}"
    return end.lasting


def reserve_port(port: int) -> socket.socket:
    """Hold a loopback port, or any free one for 0, until rank 0 listens on it.

    The socket is bound but never listens, and has SO_REUSEADDR, so a listener that has it as well can bind beside it;
    meanwhile the kernel gives the port to no outgoing connection and to no other launcher.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # For a given port SO_REUSEADDR must come first, to ignore what an earlier job left in TIME_WAIT. For any port
        # it must come second: the kernel may choose one that another launcher holds when both have it.
        if port:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((_LOOPBACK, port))
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError as error:
        holder.close()
        raise AddressInUse(f"cannot use {_LOOPBACK}:{port} for the coordinator: {error.strerror}") from None
    return holder


def make_log_dir(chosen: Path | None) -> Path:
    """The folder for the logs; by default a fresh one, named after the time, in ``jaxhetero-logs``."""
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
