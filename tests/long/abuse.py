"""Strangers at every port of a job that runs, and what they cost its steps.

    python -m tests.long.abuse

Phases in turn: none come; they come to every port of the job; the same ones come to as many ports of a process that has
nothing to do with it. The last tells what their program and the kernel take of the processors from what they do to the
job. Prints the median step of each, how it differs from turn to turn, and the ratios.
"""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import tyro

from tests.support.cluster import Cluster, free_port, program_path

Address = tuple[str, int]


def port_scan(address: Address) -> None:
    with socket.create_connection(address, 5) as connection:
        # A reset instead of an orderly end, as scanners do it.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def tls_hello(address: Address) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(incoming, outgoing, server_hostname="reducer")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    say(address, outgoing.read())


def http_request(address: Address) -> None:
    say(address, b"GET / HTTP/1.1\r\nHost: reducer\r\nUser-Agent: curl/8.0\r\nAccept: */*\r\n\r\n")


def random_bytes(address: Address) -> None:
    say(address, random.Random(1).randbytes(100_000))


def right_beginning(address: Address) -> None:
    say(address, b"jxhetero" + struct.pack("<I", 2) + bytes(32 + 32))


def say(address: Address, data: bytes) -> None:
    with socket.create_connection(address, 5) as connection, contextlib.suppress(OSError):
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass


KINDS = ["nobody", "job", "bystander"]
STRANGERS: list[Callable[[Address], None]] = [port_scan, tls_hello, http_request, random_bytes, right_beginning]


def attack(addresses: list[Address], attempts: int, half_open: int) -> int:
    """So many strangers of each kind to each address, while others stay there and say nothing; how many in all."""
    with contextlib.ExitStack() as stack:
        for address in addresses:
            for _ in range(half_open):
                stack.enter_context(socket.create_connection(address, 5))
            for stranger in STRANGERS:
                for _ in range(attempts):
                    stranger(address)
    return len(addresses) * (half_open + attempts * len(STRANGERS))


def listening(cluster: Cluster, names: list[str]) -> list[Address]:
    """Where processes listen: a worker for messages, the metrics, and maybe as coordinator and reducer."""
    return [
        ("127.0.0.1", connection.laddr.port)
        for name in names
        for connection in psutil.Process(cluster.process(name).pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]


@contextlib.contextmanager
def bystander(ports: int) -> Iterator[list[Address]]:
    """A process of its own that shows everybody out as the job does; where it listens."""
    command = [sys.executable, str(program_path("bystander.py")), str(ports)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield [("127.0.0.1", int(port)) for port in process.stdout.readline().split()]
        process.communicate()  # it ends with its input


@dataclass
class Abuse:
    """What a job under attack has seen."""

    results: list[dict[str, Any]]
    """What each worker printed."""
    reducer_log: str
    reducer_code: int


@contextlib.contextmanager
def abused_job() -> Iterator[tuple[list[Address], Callable[[str], None], Callable[[], Abuse]]]:
    """A job of two workers, one dedicated and one co-located reducer: its ports, what names a phase, what ends it."""
    with TemporaryDirectory() as directory, Cluster(2, 1, {"JAXHETERO_COLOCATED_COUNT": "1"}) as cluster:
        phase = Path(directory) / "phase"

        def begin(name: str) -> None:
            replacement = phase.with_suffix(".new")
            replacement.write_text(name)
            replacement.replace(phase)

        def end() -> Abuse:
            begin("end")
            results = [outcome.result for outcome in cluster.wait_workers()]
            reducer = cluster.wait("reducer 0")
            return Abuse(results, reducer.errors, reducer.code)

        begin("start")
        cluster.start_reducers(JAXHETERO_METRICS_PORT=str(free_port()))
        for rank in range(2):
            cluster.start_worker(rank, "abuse.py", str(phase), JAXHETERO_METRICS_PORT=str(free_port()))
        for rank in range(2):
            cluster.wait_for_output(f"worker {rank}", "running")
        ports = listening(cluster, ["worker 0", "worker 1", "reducer 0"])
        assert len(ports) == 8, "three of them for metrics, two for messages between workers"
        yield ports, begin, end


def spread(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def against(medians: list[float], control: list[float]) -> str:
    """How many times as long, turn by turn: those of a turn had the same to share the machine with."""
    ratios = [own / other for own, other in zip(medians, control, strict=True)]
    return f"{statistics.median(ratios):.2f} ({spread(ratios)})"


def main(turns: int = 10, attempts: int = 100, half_open: int = 100) -> None:
    """
    Args:
        turns: How often each phase comes.
        attempts: Strangers of each of the kinds that speak, at each port and in each phase.
        half_open: Those that say nothing and stay.
    """
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with abused_job() as (ports, begin, end), bystander(len(ports)) as others:
        addresses: dict[str, list[Address]] = {"nobody": [], "job": ports, "bystander": others}
        took = 1.0
        for turn in range(turns):
            for kind in KINDS if turn % 2 == 0 else reversed(KINDS):
                begin(f"{kind} {turn}")
                start = time.monotonic()
                count = attack(addresses[kind], attempts, half_open)
                if kind == "nobody":
                    time.sleep(took)
                took = time.monotonic() - start
                rates[kind].append(count / took)
        abuse = end()
    assert not any(result["wrong"] for result in abuse.results)
    times = {kind: [abuse.results[0]["times_ms"][f"{kind} {turn}"] for turn in range(turns)] for kind in KINDS}
    medians = {kind: [statistics.median(of_turn) for of_turn in of_turns] for kind, of_turns in times.items()}
    print(
        "| strangers at | a second | steps | median ms | of a turn | against nobody, of a turn | bystander, of a turn |"
    )
    print("|---|---|---|---|---|---|---|")
    for kind in KINDS:
        steps = list(chain.from_iterable(times[kind]))
        print(
            f"| {kind} | {statistics.median(rates[kind]):.0f} | {len(steps)} | {statistics.median(steps):.2f} | "
            f"{spread(medians[kind])} | {against(medians[kind], medians['nobody'])} | "
            f"{against(medians[kind], medians['bystander'])} |"
        )
    print(f"{turns * (attempts * len(STRANGERS) + half_open) * 3} strangers at the job, every total right")


if __name__ == "__main__":
    tyro.cli(main)
