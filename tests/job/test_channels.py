"""Messages between workers arrive as they were sent, in order, whatever else happens; or everybody is told why not."""

from __future__ import annotations

import json
import signal
import time
from typing import Any

import pytest

from jaxhetero._job.channels import Channels
from jaxhetero.errors import ConfigError
from tests.support.cluster import Cluster, Outcome, run

PROGRAM = "channels.py"
TIMEOUT_MS = 4000


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    return run(PROGRAM, "exchange", workers=3, reducers=1, JAXHETERO_SHARED_MEMORY="0")


def test_messages_arrive_over_the_network(plain: list[Any]) -> None:
    for result in plain:
        assert result["shared"] == 0
        # Headers of 40 bytes, credits with their texts, handshakes.
        for way in ("sent", "received"):
            assert result["expected"] < result[way] < result["expected"] * 1.01


@pytest.mark.parametrize("settings", [{}, {"JAXHETERO_CHECKSUM": "1"}], ids=["shared memory", "checksums"])
def test_on_one_host_they_go_through_shared_memory(plain: list[Any], settings: dict[str, str]) -> None:
    shared = run(PROGRAM, "exchange", workers=3, reducers=1, JAXHETERO_STRANDS="1", **settings)
    assert [result["shared"] for result in shared] == [1 + 4] * 3, "a reducer, and both ways with two workers"
    assert [result["digest"] for result in shared] == [result["digest"] for result in plain]


@pytest.mark.parametrize("shared_memory", ["0", "1"])
@pytest.mark.parametrize("mode", ["late", "memory"])
def test_nothing_waits_or_is_taken_that_need_not(mode: str, shared_memory: str) -> None:
    """A message that one side posts late holds up no other; buffers are held as long as they are used."""
    assert run(PROGRAM, mode, workers=2, reducers=1, JAXHETERO_SHARED_MEMORY=shared_memory) == [True, True]


def test_what_cannot_be_is_refused() -> None:
    with Cluster(2, 1) as cluster:
        cluster.start_reducers()
        cluster.start_workers(PROGRAM, "refused")
        for outcome in cluster.wait_workers():
            assert len(json.loads(outcome.output.splitlines()[0])) == 4, outcome.output
            message = outcome.exception_line
            assert "jaxhetero.errors.MismatchError: message 0 of channel 3: rank 0 (host " in message
            assert 'sends "activations of stage 0", 4 bytes with the tag 0, but rank 1 (host ' in message
            assert 'expects "activations of stage 1", 5 bytes with the tag 0' in message


@pytest.mark.usefixtures("alone")
def test_a_worker_alone_has_none() -> None:
    with pytest.raises(ConfigError, match="this world has one"):
        Channels()


def lose_rank_1(way: str, number: signal.Signals, shared_memory: bool) -> list[Outcome]:
    settings = {"JAXHETERO_TIMEOUT_MS": str(TIMEOUT_MS), "JAXHETERO_SHARED_MEMORY": str(int(shared_memory))}
    with Cluster(3, 1, settings) as cluster:
        cluster.start_reducers()
        cluster.start_workers(PROGRAM, way)
        for rank in range(3):
            cluster.wait_for_output(f"worker {rank}", "running")
        start = time.monotonic()
        cluster.process("worker 1").send_signal(number)
        outcomes = [cluster.wait(f"worker {rank}", timeout_s=30) for rank in (0, 2)]
        assert time.monotonic() - start < 20
        return outcomes


@pytest.mark.parametrize(
    ("way", "shared_memory"),
    [("sends", False), ("sends", True), ("receives", False), ("receives", True), ("idle", True)],
    ids=["sends", "sends in memory", "receives", "receives in memory", "idle"],
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_worker_that_is_lost_is_named_with_the_message(way: str, number: signal.Signals, shared_memory: bool) -> None:
    for outcome in lose_rank_1(way, number, shared_memory):
        message = outcome.exception_line
        assert "jaxhetero.errors.WorkerLost: rank 1 (host " in message
        assert 'this ended the transfer of "activations of microbatch ' in message
        if number == signal.SIGSTOP:
            assert "no sign of life for 3200 ms" in message


def test_a_reducer_that_is_killed_changes_nothing() -> None:
    with Cluster(2, 2) as cluster:
        cluster.start_reducers()
        cluster.start_workers(PROGRAM, "beside")
        for rank in range(2):
            cluster.wait_for_output(f"worker {rank}", "running")
        cluster.process("reducer 1").kill()
        assert [outcome.result for outcome in cluster.wait_workers()] == [True, True]
        assert cluster.wait("reducer 0").code == 0
