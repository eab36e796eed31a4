"""The processes that an engine consists of: host, command and environment of each."""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.engines import build_native as native
from bench.engines import echo
from bench.engines.specs import EngineSpec, mpiexec
from bench.harness.job import Job, reducer_host, worker_host
from jaxhetero.config import write_environment
from lab.netlab import Host, Lab

START_S = 300.0
"""The time that an engine's processes have to start and to meet."""


@dataclass(frozen=True)
class ProcessSpec:
    """A process to start."""

    name: str
    host: Host
    command: Sequence[str]
    env: dict[str, str]
    """Beside the environment that all processes of the benchmark have."""
    is_reducer: bool = False


@dataclass(frozen=True)
class Site:
    """The place of an engine: its job, its hosts, and files for its processes."""

    spec: EngineSpec
    lab: Lab
    job: Job
    folder: Path
    """For files that the processes need."""
    socket_path: Path
    """The Unix socket on which the workers get their requests."""

    @property
    def worker_hosts(self) -> list[Host]:
        return [self.lab[worker_host(rank)] for rank in range(self.job.worker_count)]

    @property
    def reducer_hosts(self) -> list[Host]:
        return [self.lab[reducer_host(index)] for index in range(self.job.reducer_count)]

    @property
    def worker_command(self) -> list[str]:
        return [sys.executable, "-m", "bench.harness.worker", self.spec.label, self.spec.kind, str(self.socket_path)]

    def coordinator(self) -> str:
        """An address on the first worker's host on which nothing listens."""
        first = self.worker_hosts[0]
        return f"{first.address}:{first.free_port()}"

    def workers(self, env: dict[str, str], rank_name: str = "BENCH_RANK") -> list[ProcessSpec]:
        return [
            ProcessSpec(f"worker {rank}", host, self.worker_command, {**env, rank_name: str(rank)})
            for rank, host in enumerate(self.worker_hosts)
        ]


def list_processes(site: Site) -> list[ProcessSpec]:
    """The engine's processes in the order in which to start them. Writes the files that they need to the folder."""
    return _LISTS[site.spec.kind](site)


def _jaxhetero(site: Site) -> list[ProcessSpec]:
    env = {
        "JAXHETERO_WORKER_COUNT": str(site.job.worker_count),
        "JAXHETERO_REDUCER_COUNT": str(site.job.reducer_count),
        "JAXHETERO_COLOCATED_COUNT": str(site.job.colocated_count),
        "JAXHETERO_COORDINATOR": site.coordinator(),
        "JAXHETERO_TOKEN": secrets.token_hex(16),
        "JAXHETERO_START_TIMEOUT_MS": str(int(START_S * 1000)),
    }
    if site.spec.chunk_bytes is not None:
        env |= {
            "JAXHETERO_CHUNK_BYTES": str(site.spec.chunk_bytes),
            "JAXHETERO_WINDOW_CHUNKS": str(site.spec.window_chunks),
        }
    if len(site.lab.nics) > 1:
        env["JAXHETERO_INTERFACE"] = ",".join(site.lab.nics)
    # The whole numbers that most benchmarks reduce have shorter codes than any gradients.
    env = write_environment({"compress": "never"} | dict(site.spec.settings), env)
    command = [sys.executable, "-m", "jaxhetero", "reducer"]
    reducers = [
        ProcessSpec(f"reducer {index}", host, command, env, is_reducer=True)
        for index, host in enumerate(site.reducer_hosts)
    ]
    return site.workers(env, "JAXHETERO_RANK") + reducers


def _gloo(site: Site) -> list[ProcessSpec]:
    return site.workers({"BENCH_WORKER_COUNT": str(site.job.worker_count), "BENCH_COORDINATOR": site.coordinator()})


def _mpi(site: Site) -> list[ProcessSpec]:
    """mpiexec runs on the first worker's host, and starts the workers with a launcher that stands in for ssh."""
    # In namespaces MPICH must use the interface that has the rate, and no shared memory, although all hosts are one
    # machine. On loopback there is no such interface, so MPICH may choose.
    env = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"} if site.lab.isolated else {}
    hosts = site.worker_hosts
    addresses = ",".join(host.address for host in hosts)
    launcher = _write_launcher(hosts, site.folder)
    options = ["-launcher", "ssh", "-launcher-exec", str(launcher), "-hosts", addresses, "-ppn", "1"]
    command = [str(mpiexec()), *options, "-n", str(len(hosts)), *site.worker_command]
    return [ProcessSpec("mpiexec", hosts[0], command, env)]


def _write_launcher(hosts: Sequence[Host], folder: Path) -> Path:
    """A program with the arguments of ssh, ``[-x] ADDRESS COMMAND``, that runs a command on a host of the lab."""
    path = folder / "launch-on-host"
    cases = "\n".join(f'{host.address}) exec {shlex.join(host.command(["sh", "-c"]))} "$*" ;;' for host in hosts)
    path.write_text(f'#!/bin/sh\nwhile [ "$1" = -x ]; do shift; done\nhost=$1; shift\ncase $host in\n{cases}\nesac\n')
    path.chmod(0o755)
    return path


def _echo(site: Site) -> list[ProcessSpec]:
    library = str(native.build(echo.SOURCE, site.folder))
    ports = [host.free_port() for host in site.reducer_hosts]
    window_bytes = (site.spec.chunk_bytes or 0) * (site.spec.window_chunks or 0) or echo.UNLIMITED
    places = list(zip(site.reducer_hosts, ports, strict=True))
    env = {
        "BENCH_WORKER_COUNT": str(site.job.worker_count),
        "BENCH_REDUCERS": ",".join(f"{host.address}:{port}" for host, port in places),
        "BENCH_ECHO": library,
        "BENCH_WINDOW_BYTES": str(window_bytes),
    }
    reducers = []
    for index, (host, port) in enumerate(places):
        arguments = [library, host.address, str(port), str(site.job.worker_count)]
        command = [sys.executable, "-m", "bench.engines.echo", *arguments]
        reducers.append(ProcessSpec(f"reducer {index}", host, command, env, is_reducer=True))
    return reducers + site.workers(env)


_LISTS: dict[str, Callable[[Site], list[ProcessSpec]]] = {
    "jaxhetero": _jaxhetero,
    "gloo": _gloo,
    "mpi": _mpi,
    "echo": _echo,
}
