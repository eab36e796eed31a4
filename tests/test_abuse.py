"""Strangers at every port of a job that runs: nobody fails, and the rounds go on."""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import ssl
import struct
from collections.abc import Callable
from pathlib import Path

import psutil
from cluster import Cluster

# Of each kind, at each port.
ATTEMPTS = 200


def port_scan(address: tuple[str, int]) -> None:
    with socket.create_connection(address, 5) as connection:
        # A reset instead of an orderly end, as scanners do it.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def tls_hello(address: tuple[str, int]) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(incoming, outgoing, server_hostname="reducer")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    say(address, outgoing.read())


def http_request(address: tuple[str, int]) -> None:
    say(address, b"GET / HTTP/1.1\r\nHost: reducer\r\nUser-Agent: curl/8.0\r\nAccept: */*\r\n\r\n")


def random_bytes(address: tuple[str, int]) -> None:
    say(address, random.Random(1).randbytes(100_000))


def right_beginning(address: tuple[str, int]) -> None:
    say(address, b"jxhetero" + struct.pack("<I", 2) + bytes(32 + 32))


def say(address: tuple[str, int], data: bytes) -> None:
    with socket.create_connection(address, 5) as connection, contextlib.suppress(OSError):
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass


STRANGERS: list[Callable[[tuple[str, int]], None]] = [port_scan, tls_hello, http_request, random_bytes, right_beginning]


def listening(cluster: Cluster, names: list[str]) -> dict[str, tuple[str, int]]:
    """Where each process listens; those of a worker are the coordinator and the reducer inside."""
    found = {}
    for name in names:
        for connection in psutil.Process(cluster.process(name).pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                found[f"{name} port {connection.laddr.port}"] = ("127.0.0.1", connection.laddr.port)
    return found


def test_strangers_do_not_disturb_a_job_that_runs(tmp_path: Path) -> None:
    """1,000 of them at each port of the coordinator and of dedicated and co-located reducers, some of whom stay."""
    flag = tmp_path / "attack"
    flag.touch()
    with Cluster(2, 1, {"JAXHETERO_COLOCATED_COUNT": "1"}) as cluster:
        cluster.start_reducers()
        cluster.start_workers("abuse.py", str(flag))
        for rank in range(2):
            cluster.wait_for_output(f"worker {rank}", "undisturbed")
        ports = listening(cluster, ["worker 0", "worker 1", "reducer 0"])
        assert len(ports) == 3, ports
        with contextlib.ExitStack() as stack:
            for address in ports.values():
                # Half-open: these say nothing and stay.
                for _ in range(50):
                    stack.enter_context(socket.create_connection(address, 5))
                for stranger in STRANGERS:
                    for _ in range(ATTEMPTS):
                        stranger(address)
            flag.unlink()
            results = [outcome.result for outcome in cluster.wait_workers()]
            reducer = cluster.wait("reducer 0")
    for result in results:
        print(json.dumps(result))
        assert result["wrong"] == 0
        assert result["disturbed"]["rounds"] > 0
    counted = re.search(r"refused_count=(\d+) bad_frame_count=0", reducer.errors)
    assert counted, reducer.errors
    assert int(counted[1]) >= 5 * ATTEMPTS
    assert results[0]["refused_count"] >= 2 * 5 * ATTEMPTS, "the coordinator's and those of the reducer inside"
    assert reducer.code == 0
    # Rare lines say it, not one for each.
    assert 1 <= reducer.errors.count("refused a connection") <= 20, reducer.errors
