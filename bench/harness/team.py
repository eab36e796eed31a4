"""A team: the running processes of one engine, and the requests to its workers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bench.engines.specs import EngineSpec
from bench.harness.errors import BenchError
from bench.harness.job import Job
from bench.harness.processes import START_S, ProcessSpec, Site, list_processes
from lab.netlab import Lab

_ROOT = Path(__file__).parents[2]
_ANSWER_S = 600.0
_END_S = 30.0
_TAIL_BYTES = 2000


@dataclass
class _Process:
    name: str
    popen: subprocess.Popen[str]
    log: Path

    def describe(self) -> str:
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            tail = log.read().decode(errors="replace").strip()
        code = self.popen.poll()
        return f"{self.name} {'still runs' if code is None else f'ended with {code}'}; its last output:\n{tail}"


class Team:
    """The processes of one engine. They sleep unless a request is in progress."""

    def __init__(self, spec: EngineSpec, lab: Lab, job: Job, folder: Path) -> None:
        self.spec = spec
        self.worker_pids: list[int] = []
        self.reducer_pids: list[int] = []
        self._worker_count = job.worker_count
        self._folder = folder
        self._name = f"{spec.label.replace(':', '-')}-{job.worker_count}"
        self._first_bytes: dict[int, int] = {}
        self._processes: list[_Process] = []
        self._channels: list[socket.socket] = []
        self._streams: list[IO[str]] = []
        self._server = socket.socket(socket.AF_UNIX)
        socket_path = folder / f"{self._name}.sock"
        self._server.bind(str(socket_path))
        self._server.listen(job.worker_count)
        for process in list_processes(Site(spec, lab, job, folder, socket_path)):
            self._start(process)

    def join(self) -> None:
        """Wait until all workers have met and have connected to this process."""
        deadline_s = time.monotonic() + START_S
        arrived: dict[int, tuple[int, socket.socket, IO[str]]] = {}
        self._server.settimeout(0.2)
        while len(arrived) < self._worker_count:
            try:
                channel, _ = self._server.accept()
            except TimeoutError:
                self._check_started(deadline_s, len(arrived))
                continue
            channel.settimeout(_ANSWER_S)
            stream: IO[str] = channel.makefile("rw", encoding="utf-8")
            hello = json.loads(stream.readline())
            arrived[hello["rank"]] = (hello["pid"], channel, stream)
        for _, (pid, channel, stream) in sorted(arrived.items()):
            self.worker_pids.append(pid)
            self._channels.append(channel)
            self._streams.append(stream)
        self._first_bytes = {pid: memory_bytes(pid, "VmRSS") for pid in self.worker_pids + self.reducer_pids}

    def forget_peaks(self) -> None:
        """Reset the peaks of memory that ``grown_bytes`` reads."""
        for pid in self._first_bytes:
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def grown_bytes(self) -> tuple[int, int]:
        """The most memory of a worker, and of a dedicated reducer, since ``forget_peaks``, less that at ``join``."""
        grown = {pid: memory_bytes(pid, "VmHWM") - first for pid, first in self._first_bytes.items()}
        worker_bytes, reducer_bytes = (
            max((grown[pid] for pid in pids), default=0) for pids in (self.worker_pids, self.reducer_pids)
        )
        return worker_bytes, reducer_bytes

    def _check_started(self, deadline_s: float, arrived_count: int) -> None:
        for process in self._processes:
            if process.popen.poll() is not None:
                raise BenchError(f"{self.spec.label}: {process.describe()}")
        if time.monotonic() > deadline_s:
            told = "\n".join(process.describe() for process in self._processes)
            raise BenchError(f"{self.spec.label}: {arrived_count} of {self._worker_count} workers came\n{told}")

    def request(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """Send every worker the same request. Returns their answers by rank."""
        for stream in self._streams:
            with contextlib.suppress(BrokenPipeError):  # the missing answer raises
                print(json.dumps({"do": do, **arguments}), file=stream, flush=True)
        return [self._answer(do, rank, stream) for rank, stream in enumerate(self._streams)]

    def _answer(self, do: str, rank: int, stream: IO[str]) -> dict[str, Any]:
        try:
            line = stream.readline()
        except (TimeoutError, ConnectionError):
            line = ""
        if not line:
            told = "\n".join(process.describe() for process in self._processes)
            raise BenchError(f"{self.spec.label}: worker {rank} does not answer to {do!r}\n{told}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        """Stop all processes. Raises ``BenchError`` if one ends with another code than 0."""
        self.request("stop")
        self.close()
        deadline_s = time.monotonic() + _END_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(max(0.0, deadline_s - time.monotonic()))
            if process.popen.returncode != 0:
                raise BenchError(f"{self.spec.label}: {process.describe()}")

    def close(self) -> None:
        for stream in self._streams:
            with contextlib.suppress(OSError):
                stream.close()
        for channel in self._channels:
            channel.close()
        self._server.close()

    def _start(self, process: ProcessSpec) -> None:
        log = self._folder / f"{self._name} {process.name}.log"
        shared = {"PYTHONPATH": str(_ROOT), "JAX_PLATFORMS": "cpu", "BENCH_WIRE_DTYPE": self.spec.wire_dtype or ""}
        with log.open("w") as output:
            popen = process.host.start(
                process.command, env={**shared, **process.env}, stdout=output, stderr=subprocess.STDOUT
            )
        self._processes.append(_Process(process.name, popen, log))
        if process.is_reducer:
            self.reducer_pids.append(popen.pid)


def start_teams(
    specs: Sequence[EngineSpec], lab: Lab, job: Job, folder: Path, stack: contextlib.ExitStack
) -> list[Team]:
    """Start a team for every engine and wait until it has joined. ``stack`` closes the teams.

    One team starts after the other, because an engine may measure the network when it starts.
    """
    teams = []
    for spec in specs:
        team = Team(spec, lab, job, folder)
        stack.callback(team.close)
        team.join()
        teams.append(team)
    return teams


def memory_bytes(pid: int, field: str) -> int:
    """A process's VmRSS, its resident memory, or VmHWM, the most since ``forget_peaks``."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) << 10
    raise BenchError(f"process {pid} has ended")
