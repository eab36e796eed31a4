"""The processes of one engine: its workers, on hosts w0, w1, ..., and its reducers, on r0, r1, ..."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bench.engines import build_native as native
from bench.engines import echo
from bench.engines.specs import EngineSpec, mpiexec
from bench.errors import BenchError
from bench.harness.job import Job, reducer_host, worker_host
from bench.netlab import Host, Lab

_ROOT = Path(__file__).parent.parent
_START_S = 300.0
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
        return f"{self.name} {'still runs' if code is None else f'ended with {code}'}; its last words:\n{tail}"


class Team:
    """One engine's processes, all started and joined; they sleep unless a request is under way."""

    def __init__(self, spec: EngineSpec, lab: Lab, job: Job, folder: Path) -> None:
        self.spec = spec
        self.worker_pids: list[int] = []
        self.reducer_pids: list[int] = []
        self._lab = lab
        self._job = job
        self._worker_count = job.worker_count
        self._folder = folder
        self._name = f"{spec.label.replace(':', '-')}-{job.worker_count}"
        self._socket_path = folder / f"{self._name}.sock"
        self._first_bytes: dict[int, int] = {}
        self._processes: list[_Process] = []
        self._channels: list[socket.socket] = []
        self._streams: list[IO[str]] = []
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self._socket_path))
        self._server.listen(job.worker_count)
        _STARTERS[spec.kind](self)

    def join(self) -> None:
        """Wait until every worker has met the others and reported."""
        deadline_s = time.monotonic() + _START_S
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
        """Let ``grown_bytes`` begin anew."""
        for pid in self._first_bytes:
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def grown_bytes(self) -> tuple[int, int]:
        """The most memory that a worker, and a dedicated reducer, had at any moment, beyond that at ``join``."""
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
        """Have every worker do the same; their answers by rank."""
        for stream in self._streams:
            with contextlib.suppress(BrokenPipeError):  # then there is no answer either
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
        """Part in order; raises if a process ends with anything but 0."""
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

    def _start(self, host: Host, name: str, command: Sequence[str | Path], env: Mapping[str, str]) -> _Process:
        log = self._folder / f"{self._name} {name}.log"
        shared = {"PYTHONPATH": str(_ROOT), "JAX_PLATFORMS": "cpu", "BENCH_WIRE_DTYPE": self.spec.wire_dtype or ""}
        with log.open("w") as output:
            popen = host.start(command, env={**shared, **env}, stdout=output, stderr=subprocess.STDOUT)
        process = _Process(name, popen, log)
        self._processes.append(process)
        return process

    @property
    def _worker_command(self) -> list[str]:
        return [sys.executable, "-m", "bench.harness.worker", self.spec.label, self.spec.kind, str(self._socket_path)]

    def _start_workers(self, env_of: Callable[[int], dict[str, str]]) -> None:
        for rank in range(self._worker_count):
            self._start(self._lab[worker_host(rank)], f"worker {rank}", self._worker_command, env_of(rank))

    def _coordinator(self) -> str:
        first = self._lab[worker_host(0)]
        return f"{first.address}:{first.free_port()}"

    def _start_jaxhetero(self) -> None:
        env = {
            "JAXHETERO_WORKER_COUNT": str(self._worker_count),
            "JAXHETERO_REDUCER_COUNT": str(self._job.reducer_count),
            "JAXHETERO_COLOCATED_COUNT": str(self._job.colocated_count),
            "JAXHETERO_COORDINATOR": self._coordinator(),
            "JAXHETERO_TOKEN": secrets.token_hex(16),
            "JAXHETERO_START_TIMEOUT_MS": str(int(_START_S * 1000)),
        }
        if self.spec.chunk_bytes is not None:
            env |= {
                "JAXHETERO_CHUNK_BYTES": str(self.spec.chunk_bytes),
                "JAXHETERO_WINDOW_CHUNKS": str(self.spec.window_chunks),
            }
        self._start_workers(lambda rank: {**env, "JAXHETERO_RANK": str(rank)})
        for index in range(self._job.reducer_count):
            command = [sys.executable, "-m", "jaxhetero", "reducer"]
            process = self._start(self._lab[reducer_host(index)], f"reducer {index}", command, env)
            self.reducer_pids.append(process.popen.pid)

    def _start_gloo(self) -> None:
        env = {"BENCH_WORKER_COUNT": str(self._worker_count), "BENCH_COORDINATOR": self._coordinator()}
        self._start_workers(lambda rank: {**env, "BENCH_RANK": str(rank)})

    def _start_mpi(self) -> None:
        """Through mpiexec, which runs on the first worker's host and reaches the others as it would by ssh."""
        hosts = [self._lab[worker_host(rank)] for rank in range(self._worker_count)]
        # Not by shared memory, although all hosts are one machine, and by the interface that has the rate. On loopback
        # there is no such interface, and MPICH may do what it does best.
        env = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"} if self._lab.isolated else {}
        launcher = self._write_launcher(hosts)
        addresses = ",".join(host.address for host in hosts)
        options = ["-launcher", "ssh", "-launcher-exec", str(launcher), "-hosts", addresses, "-ppn", "1"]
        command = [str(mpiexec()), *options, "-n", str(len(hosts)), *self._worker_command]
        self._start(hosts[0], "mpiexec", command, env)

    def _start_echo(self) -> None:
        library = str(native.build(echo.SOURCE, self._folder))
        hosts = [self._lab[reducer_host(index)] for index in range(self._job.reducer_count)]
        ports = [host.free_port() for host in hosts]
        window_bytes = (self.spec.chunk_bytes or 0) * (self.spec.window_chunks or 0) or echo.UNLIMITED
        env = {
            "BENCH_WORKER_COUNT": str(self._worker_count),
            "BENCH_REDUCERS": ",".join(f"{host.address}:{port}" for host, port in zip(hosts, ports, strict=True)),
            "BENCH_ECHO": library,
            "BENCH_WINDOW_BYTES": str(window_bytes),
        }
        for index, (host, port) in enumerate(zip(hosts, ports, strict=True)):
            arguments = [library, host.address, str(port), str(self._worker_count)]
            command = [sys.executable, "-m", "bench.engines.echo", *arguments]
            process = self._start(host, f"reducer {index}", command, env)
            self.reducer_pids.append(process.popen.pid)
        self._start_workers(lambda rank: {**env, "BENCH_RANK": str(rank)})

    def _write_launcher(self, hosts: Sequence[Host]) -> Path:
        """A program with the arguments of ssh, ``[-x] ADDRESS COMMAND``, that starts a command on a host of the lab."""
        path = self._folder / "launch-on-host"
        cases = "\n".join(f'{host.address}) exec {shlex.join(host.command(["sh", "-c"]))} "$*" ;;' for host in hosts)
        path.write_text(
            f'#!/bin/sh\nwhile [ "$1" = -x ]; do shift; done\nhost=$1; shift\ncase $host in\n{cases}\nesac\n'
        )
        path.chmod(0o755)
        return path


def start_teams(
    specs: Sequence[EngineSpec], lab: Lab, job: Job, folder: Path, stack: contextlib.ExitStack
) -> list[Team]:
    """A team for every engine, all of them joined; ``stack`` closes them.

    One after the other: an engine may measure the network when it starts.
    """
    teams = []
    for spec in specs:
        team = Team(spec, lab, job, folder)
        stack.callback(team.close)
        team.join()
        teams.append(team)
    return teams


def memory_bytes(pid: int, field: str) -> int:
    """VmRSS, what a process has resident, or VmHWM, the most it had since ``forget_peaks``."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) << 10
    raise BenchError(f"process {pid} has ended")


_STARTERS: dict[str, Callable[[Team], None]] = {
    "jaxhetero": Team._start_jaxhetero,
    "gloo": Team._start_gloo,
    "mpi": Team._start_mpi,
    "echo": Team._start_echo,
}
