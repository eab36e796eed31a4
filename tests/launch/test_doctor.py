"""`jaxhetero doctor` finds what is wrong with hosts and network, and names it, on every host and with its exit code."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from jaxhetero.doctor.channel import connected
from jaxhetero.doctor.examine import fabric_pair, slowest_pairs, tournament
from jaxhetero.doctor.report import FabricTrial, Findings, Patient, problems
from jaxhetero.errors import AuthenticationError, JaxheteroError, ProtocolError
from lab.netlab import Lab, missing

ROOT = Path(__file__).parents[2]
HOSTS = ["w0", "w1", "w2"]
needs_namespaces = pytest.mark.skipif(
    missing() is not None and os.environ.get("CI") != "true", reason=f"no network namespaces: {missing()}"
)

WELL = Patient("a", "10.0.0.1", {"jaxhetero": "1.0"}, "eth0", {"eth0": 1000}, 1500)
PATIENTS = [replace(WELL, host=host, address=f"10.0.0.{number}") for number, host in enumerate("abc", 1)]
PAIRS = [(source, target) for source in range(3) for target in range(3) if source != target]
HEALTHY = Findings(3, PATIENTS, dict.fromkeys(PAIRS, 1e8))


def with_patient(**changes: Any) -> Findings:
    return replace(HEALTHY, patients=[*PATIENTS[:2], replace(PATIENTS[2], **changes)])


def with_goodput(rate: float, *pairs: tuple[int, int]) -> Findings:
    return replace(HEALTHY, goodput=HEALTHY.goodput | dict.fromkeys(pairs, rate))


@pytest.mark.parametrize(
    ("findings", "words"),
    [
        (HEALTHY, []),
        (with_goodput(7e7, (0, 1)), []),
        (replace(HEALTHY, wanted_count=4), ["only 3 of 4 processes came: a (10.0.0.1), b (10.0.0.2)"]),
        (replace(HEALTHY, refusals=["the job token differs"]), ["the job token differs"]),
        (with_patient(versions={"jaxhetero": "2.0"}), ["c (10.0.0.3) has jaxhetero 2.0, a (10.0.0.1) 1.0"]),
        (with_patient(clock_s=-3.0), ["the clock of c (10.0.0.3) differs from the coordinator's by -3.0 s"]),
        (with_patient(address="127.0.0.1"), ["c (127.0.0.1) can be reached from its own host only"]),
        (with_patient(speeds_mbit={"eth0": 1000, "eth1": 25000}), ["uses eth0 (1000 Mbit/s) although eth1 has 25000"]),
        (with_patient(mtu=9000), ["the MTUs differ", "c (10.0.0.3) 9000"]),
        (
            with_patient(fabric="efa on a-rdm"),
            ["c (10.0.0.3) has a device of a fabric, and a (10.0.0.1), b (10.0.0.2) none"],
        ),
        (with_patient(fabric_problem="no libfabric"), ["c (10.0.0.3) cannot use a fabric: no libfabric"]),
        (replace(HEALTHY, trial=FabricTrial(0, 1, "efa", 1e9, 1e8)), []),
        (
            replace(HEALTHY, trial=FabricTrial(0, 1, failure="no answer in time")),
            ["a (10.0.0.1) cannot send to b (10.0.0.2) over a fabric: no answer in time"],
        ),
        (replace(HEALTHY, failures={(0, 2): "no answer"}), ["a (10.0.0.1) cannot reach c (10.0.0.3): no answer"]),
        (with_goodput(2e7, (1, 0), (1, 2)), ["b (10.0.0.2) sends at most 160 Mbit/s where most hosts reach 800"]),
        (with_goodput(2e7, (0, 1), (2, 1)), ["b (10.0.0.2) receives at most 160 Mbit/s"]),
        (
            with_goodput(2e7, (0, 1)),
            ["a (10.0.0.1) sends 160 Mbit/s to b (10.0.0.2), though with others both reach 800"],
        ),
    ],
)
def test_each_problem_is_told_once(findings: Findings, words: list[str]) -> None:
    told = problems(findings)
    assert len(told) == bool(words), told
    assert all(word in "".join(told) for word in words), told


def test_pairs_that_seem_slow_are_measured_again() -> None:
    """Those of a machine that was busy for a moment are fast then."""
    goodput = with_goodput(2e7, (1, 0), (0, 1)).goodput | {(2, 1): 1e7}
    assert slowest_pairs(goodput, 3) == [(1, 2), (0, 1)]
    assert slowest_pairs(goodput, 1) == [(1, 2)]
    assert slowest_pairs(HEALTHY.goodput, 3) == slowest_pairs({}, 3) == []


def test_two_hosts_try_a_fabric_where_there_are_two() -> None:
    assert fabric_pair({0: "a", 1: "a", 3: "b"}) == (0, 3)
    assert fabric_pair({2: "a", 3: "a"}) == (2, 3)
    assert fabric_pair({2: "a"}) is fabric_pair({}) is None


@pytest.mark.parametrize("count", range(1, 10))
def test_every_pair_meets_once_and_nobody_is_in_two_places(count: int) -> None:
    rounds = list(tournament(count))
    met = sorted(tuple(sorted(pair)) for pairs in rounds for pair in pairs)
    assert met == list(combinations(range(count), 2))
    for pairs in rounds:
        players = [player for pair in pairs for player in pair]
        assert len(players) == len(set(players))


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(dict.fromkeys(HOSTS, "100mbit")) as lab:
        yield lab


def examine(lab: Lab, timeout_ms: int = 60_000, **tokens: str) -> dict[str, tuple[int, str]]:
    """Run the doctor on every host; its exit code and all that it printed, by host."""
    coordinator = f"{lab['w0'].address}:{lab['w0'].free_port()}"
    command = [sys.executable, "-m", "jaxhetero", "doctor", "--coordinator", coordinator, "--processes", "3"]
    command += ["--interface", "eth0", "--start-timeout-ms", str(timeout_ms)]
    processes = {
        host: lab[host].start(
            command,
            env={"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", "JAXHETERO_TOKEN": tokens.get(host, "secret")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for host in HOSTS
    }
    outputs = {host: process.communicate(timeout=90)[0] for host, process in processes.items()}
    return {host: (process.returncode, outputs[host]) for host, process in processes.items()}


@needs_namespaces
def test_a_healthy_network_has_nothing_to_mend(lab: Lab) -> None:
    for code, output in examine(lab).values():
        assert (code, output.splitlines()[-1]) == (0, "nothing to mend"), output


@needs_namespaces
def test_a_slow_interface_is_found(lab: Lab) -> None:
    lab["w1"].slow("20mbit")
    try:
        reports = examine(lab)
    finally:
        lab["w1"].restore()
    for code, output in reports.values():
        assert code == 1
        assert f"w1 ({lab['w1'].address}) sends at most " in output
        assert f"w1 ({lab['w1'].address}) receives at most " in output
        assert "w0" not in "".join(line for line in output.splitlines() if "at most" in line)


@needs_namespaces
def test_a_wrong_token_is_named_on_both_sides(lab: Lab) -> None:
    reports = examine(lab, w2="another")
    for code, output in reports.values():
        assert code == 1
        assert "the job token of 10.77.0." in output
    assert "differs from the one of w2" in reports["w2"][1]
    for host in ("w0", "w1"):
        assert f"the job token of {lab['w2'].address} differs from the one of w0" in reports[host][1]
        assert "only 2 of 3 processes came" in reports[host][1]


@needs_namespaces
def test_a_cut_link_between_two_is_named(lab: Lab) -> None:
    """Frames from w1 to w2 go nowhere, so neither can open a connection to the other."""
    link = ["ip", "neigh", "replace", lab["w2"].address, "dev", "eth0"]
    lab["w1"].run([*link, "lladdr", "02:00:00:00:00:99", "nud", "permanent"])
    try:
        reports = examine(lab)
    finally:
        lab["w1"].run(["ip", "neigh", "del", lab["w2"].address, "dev", "eth0"])
    names = {host: f"{host} ({lab[host].address})" for host in HOSTS}
    for code, output in reports.values():
        assert code == 1
        assert f"{names['w1']} cannot reach {names['w2']}: {lab['w2'].address}:" in output
        assert f"{names['w2']} cannot reach {names['w1']}: {lab['w1'].address}:" in output
        assert f"{names['w0']} cannot reach" not in output


@needs_namespaces
def test_a_host_without_network_is_missed_and_says_so(lab: Lab) -> None:
    lab["w2"].cut()
    try:
        reports = examine(lab, timeout_ms=4000)
    finally:
        lab["w2"].restore()
    assert reports["w2"][0] == 1
    assert f"w2 cannot reach the coordinator at {lab['w0'].address}:" in reports["w2"][1]
    for host in ("w0", "w1"):
        assert reports[host][0] == 1
        assert "only 2 of 3 processes came" in reports[host][1]


HELLO = json.dumps({"hello": "jaxhetero doctor 1", "nonce": "anything"})


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (["[" * 200_000], ProtocolError),
        (["{}"], ProtocolError),
        ([json.dumps({"hello": "jaxhetero doctor 1", "nonce": "\ud800"})], ProtocolError),
        ([HELLO, "[" * 200_000], ProtocolError),
        ([HELLO, "no JSON"], ProtocolError),
        ([HELLO, "{}"], ProtocolError),
        ([HELLO, json.dumps({"proof": "\u00e9"})], AuthenticationError),
        ([HELLO, json.dumps({"proof": "0" * 64})], AuthenticationError),
    ],
)
def test_whatever_a_peer_without_the_token_says_has_its_error(lines: list[str], error: type[JaxheteroError]) -> None:
    async def meet() -> None:
        has_ended = asyncio.Event()

        async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write("".join(line + "\n" for line in lines).encode())
            await reader.read()
            writer.close()
            await writer.wait_closed()
            has_ended.set()

        async with await asyncio.start_server(say, "127.0.0.1", 0) as server:
            with pytest.raises(error):
                async with connected("127.0.0.1", server.sockets[0].getsockname()[1], "secret"):
                    pass
            await has_ended.wait()

    asyncio.run(meet())


def test_something_else_at_the_coordinators_address_is_named() -> None:
    """Here: a listener that closes what comes, as a server with another protocol may."""
    import socket
    import threading

    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.recv(4096)

        thread = threading.Thread(target=answer)
        thread.start()
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
        run = subprocess.run(
            [sys.executable, "-m", "jaxhetero", "doctor", "--coordinator", coordinator, "--processes", "2"],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", "JAXHETERO_TOKEN": "secret"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        thread.join()
    assert run.returncode == 1
    assert "ProtocolError: what is at 127.0.0.1 is no jaxhetero doctor" in run.stderr
