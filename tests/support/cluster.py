"""Real worker and reducer processes for tests: start them, wait for them, and be sure that they are gone afterwards."""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import secrets
import socket
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from jaxhetero._job.ports import reserve_port
from tests.support.fork_server import Forked, ForkServer, read_at_start
from tests.support.patience import PATIENCE
from tests.support.programs_on_disk import WARNINGS_ARE_ERRORS

ROOT = Path(__file__).parents[2]
_RUN_TIMEOUT_S = 240 * PATIENCE

# Whether arrays go the way of a GPU's: see docs/gpu.md.
THROUGH_LANES = "JAXHETERO_CUDA_STAND_IN" in os.environ

# TESTS_PLATFORMS=cuda,cpu: the programs of tests have their arrays on a GPU, for which XLA warns of this and that.
_PLATFORMS = os.environ.get("TESTS_PLATFORMS", "cpu")
ON_GPU = "cuda" in _PLATFORMS
_WARNINGS = "default" if ON_GPU else WARNINGS_ARE_ERRORS

# The sockets that hold the last ports of `free_port`. No test uses as many.
_held_ports: deque[socket.socket] = deque()
_HELD_PORTS = 64


@functools.cache
def program_path(name: str) -> Path:
    """A program of a test's processes, by its name: those of each folder are beside its tests, in `programs/`."""
    (path,) = ROOT.glob(f"tests/*/programs/{name}")
    return path


def free_port(host: str = "127.0.0.1") -> int:
    """A port of this address that the kernel gives to nobody else while the test's processes start.

    Only a process that asks for it by its number can listen there, with SO_REUSEADDR.
    """
    _held_ports.append(reserve_port(0, host))
    if len(_held_ports) > _HELD_PORTS:
        _held_ports.popleft().close()
    return int(_held_ports[-1].getsockname()[1])


@functools.cache
def _fork_server(settings: tuple[tuple[str, str], ...]) -> ForkServer:
    """The server for processes with these of the ``settings`` that Python and JAX read when they start."""
    others = {name: text for name, text in os.environ.items() if name not in dict(read_at_start(os.environ))}
    server = ForkServer(others | dict(settings))
    atexit.register(server.close)
    return server


@dataclass
class Outcome:
    """How a process ended and what it said."""

    code: int
    output: str
    errors: str

    @property
    def result(self) -> Any:
        """What the program printed as JSON on its last line."""
        assert self.code == 0, f"exit code {self.code}\n{self.output}\n{self.errors}"
        return json.loads(self.output.splitlines()[-1])

    @property
    def exception_line(self) -> str:
        """The last line with an exception of ours: at its start, or behind the name of XLA's."""
        assert self.code != 0
        lines = [
            line for line in self.errors.splitlines() if re.match(r"(?!\s).*jaxhetero\.(errors\.)?[A-Z]\w+: ", line)
        ]
        assert lines, self.errors
        return lines[-1]


@dataclass
class Cluster:
    """The processes of one job on this machine. Leaving the `with` block kills what still runs."""

    workers: int
    reducers: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)
    coordinator: str = field(default_factory=lambda: f"127.0.0.1:{free_port()}")
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    _processes: dict[str, Forked] = field(default_factory=dict)
    _directory: tempfile.TemporaryDirectory[str] = field(default_factory=tempfile.TemporaryDirectory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        for name, process in self._processes.items():
            if failure is not None:
                print(f"--- {name} (exit code {process.poll()})\n{self._log(name, 'err').read_text()[-2000:]}")
            process.kill()
            process.wait()
        self._directory.cleanup()

    def start_coordinator(self, name: str = "coordinator", *options: str, **settings: str) -> None:
        """That of an elastic job."""
        self._start(name, ["-m", "jaxhetero", "coordinator", *options], settings)

    def start_reducers(self, count: int | None = None, **settings: str) -> None:
        for _ in range(self.reducers if count is None else count):
            self.start_reducer(**settings)

    def start_reducer(self, **settings: str) -> str:
        """One more; its name."""
        name = f"reducer {sum(name.startswith('reducer') for name in self._processes)}"
        self._start(name, ["-m", "jaxhetero", "reducer"], settings)
        return name

    def start_worker(self, rank: int, program: str, *arguments: str, **settings: str) -> None:
        self.start_program(f"worker {rank}", program, *arguments, **{"JAXHETERO_RANK": str(rank), **settings})

    def start_program(self, name: str, program: str, *arguments: str, **settings: str) -> None:
        self._start(name, [str(program_path(program)), *arguments], settings)

    def start_workers(self, program: str, *arguments: str, **settings: str) -> None:
        for rank in range(self.workers):
            self.start_worker(rank, program, *arguments, **settings)

    def _start(self, name: str, command: list[str], settings: Mapping[str, str]) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": _WARNINGS,
            "JAX_PLATFORMS": _PLATFORMS,
            "JAXHETERO_WORKER_COUNT": str(self.workers),
            "JAXHETERO_REDUCER_COUNT": str(self.reducers),
            "JAXHETERO_COORDINATOR": self.coordinator,
            "JAXHETERO_TOKEN": self.token,
            "JAXHETERO_START_TIMEOUT_MS": str(round(60_000 * PATIENCE)),
            **self.settings,
            **settings,
        }
        with self._log(name, "out").open("wb") as output, self._log(name, "err").open("wb") as errors:
            server = _fork_server(read_at_start(environment))
            self._processes[name] = server.start(command, environment, output, errors)

    def _log(self, name: str, kind: str) -> Path:
        return Path(self._directory.name) / f"{name}.{kind}"

    def names(self) -> list[str]:
        """Of all that were started."""
        return list(self._processes)

    def process(self, name: str) -> Forked:
        """The process called "worker 0" or "reducer 1"."""
        return self._processes[name]

    def kill(self, name: str) -> None:
        """Kill the process, and wait until it is gone: one that takes its place may then listen at its address."""
        self.process(name).kill()
        self.process(name).wait()

    def output(self, name: str) -> str:
        """What the process has printed so far."""
        return self._log(name, "out").read_text()

    def errors(self, name: str) -> str:
        """What the process has written to its standard error so far, where the log goes."""
        return self._log(name, "err").read_text()

    def wait_for_output(self, name: str, text: str, timeout_s: float = 60) -> None:
        """Until the process has printed ``text``."""
        self._wait_for(name, "out", text, timeout_s)

    def wait_for_error(self, name: str, text: str, timeout_s: float = 60) -> None:
        """The same on its standard error, where the log goes."""
        self._wait_for(name, "err", text, timeout_s)

    def wait_for_log(self, name: str, is_right: Callable[[str], bool], timeout_s: float = 60) -> None:
        """Until the standard error of the process is right."""
        self._wait(name, lambda: is_right(self._log(name, "err").read_text()), "what was waited for", timeout_s)

    def _wait_for(self, name: str, kind: str, text: str, timeout_s: float) -> None:
        self._wait(name, lambda: text in self._log(name, kind).read_text(), repr(text), timeout_s)

    def _wait(self, name: str, is_over: Callable[[], bool], what: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_over():
            assert time.monotonic() < deadline, f"{name} never printed {what}: {self._log(name, 'err').read_text()}"
            assert self.process(name).poll() is None, f"{name} ended: {self._log(name, 'err').read_text()}"
            time.sleep(0.01)

    def wait(self, name: str, timeout_s: float = _RUN_TIMEOUT_S) -> Outcome:
        try:
            code = self.process(name).wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{name} still runs after {timeout_s} s: {self._log(name, 'err').read_text()[-2000:]}"
            ) from None
        return Outcome(code, self._log(name, "out").read_text(), self._log(name, "err").read_text())

    def wait_workers(self, timeout_s: float = _RUN_TIMEOUT_S) -> list[Outcome]:
        deadline = time.monotonic() + timeout_s
        return [self.wait(f"worker {rank}", max(0.1, deadline - time.monotonic())) for rank in range(self.workers)]

    def wait_reducers(self, timeout_s: float = 30) -> list[Outcome]:
        names = [name for name in self._processes if name.startswith("reducer")]
        return [self.wait(name, timeout_s) for name in names]


def run(program: str, *arguments: str, workers: int, reducers: int, **settings: str) -> list[Any]:
    """Run one program on every worker; the results by rank. Every process must end with code 0."""
    with Cluster(workers, reducers, settings) as cluster:
        cluster.start_reducers()
        cluster.start_workers(program, *arguments)
        results = [outcome.result for outcome in cluster.wait_workers()]
        for outcome in cluster.wait_reducers():
            assert outcome.code == 0, outcome.errors
        return results
