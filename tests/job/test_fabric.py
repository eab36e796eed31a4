"""Bytes may go over a fabric, which libfabric drives: the same bits, the same errors, and sockets where that cannot be.

The stand-in of `lab/fake_fabric` behaves as badly as a fabric may. A real library runs its provider `tcp`, where
`TESTS_FABRIC_LIBRARY` names it: the one in the wheel of `mpich`, for example.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lab.fake_cuda import build as build_driver
from lab.fake_fabric import build
from tests.long.chaos import run_job
from tests.support.cluster import ON_GPU, ROOT, Cluster, free_port

PROGRAM = "shared_memory.py"
_REAL = os.environ.get("TESTS_FABRIC_LIBRARY")
needs_library = pytest.mark.skipif(
    _REAL is None and os.environ.get("CI") != "true", reason="TESTS_FABRIC_LIBRARY names no libfabric"
)


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The folder of the library that has a provider."""
    folders = {provider: tmp_path_factory.mktemp(provider) for provider in ("fake", "tcp")}
    build(folders["fake"])
    if _REAL is not None:
        (folders["tcp"] / "libfabric.so.1").symlink_to(Path(_REAL).resolve())
    return {provider: str(folder) for provider, folder in folders.items()}


@pytest.fixture(params=["fake", pytest.param("tcp", marks=needs_library)])
def fabric(request: pytest.FixtureRequest, libraries: dict[str, str]) -> dict[str, str]:
    """The settings of a job all of whose bytes go over a fabric."""
    return settings_of(request.param, libraries[request.param])


def settings_of(provider: str, folder: str) -> dict[str, str]:
    return {"JAXHETERO_FABRIC": provider, "LD_LIBRARY_PATH": folder, "JAXHETERO_SHARED_MEMORY": "0"}


def run(settings: dict[str, str], reducers: dict[str, str] | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    """The results of two workers, and their logs. `reducers`: other settings of theirs."""
    with Cluster(2, 2, {"JAXHETERO_STRANDS": "2"} | settings) as cluster:
        cluster.start_reducers(**(reducers or {}))
        cluster.start_workers(PROGRAM)
        outcomes = cluster.wait_workers()
        assert all(outcome.code == 0 for outcome in cluster.wait_reducers())
    return [outcome.result for outcome in outcomes], [outcome.errors for outcome in outcomes]


@pytest.fixture(scope="module")
def plain() -> list[dict[str, Any]]:
    results, _ = run({"JAXHETERO_SHARED_MEMORY": "0", "JAXHETERO_FABRIC": "off"})
    return results


@pytest.mark.parametrize("checksum", ["0", "1"])
def test_sums_have_the_bits_of_sockets(fabric: dict[str, str], checksum: str, plain: list[dict[str, Any]]) -> None:
    results, logs = run(fabric | {"JAXHETERO_CHECKSUM": checksum})
    for result, log, expected in zip(results, logs, plain, strict=True):
        assert result["digests"] == expected["digests"]
        assert result["fabric_connection_count"] == 2 * 2
        assert "not over a fabric" not in log


def examine(*settings: dict[str, str]) -> list[str]:
    """What the doctor shows in each of two processes. Its exit code says more: of a busy machine also its pace."""
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "jaxhetero", "doctor", "--coordinator", address, "--processes", "2"]

    def examine_one(settings: dict[str, str]) -> str:
        env = {**os.environ, **settings, "PYTHONPATH": str(ROOT), "JAXHETERO_TOKEN": "secret"}
        return subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=60).stdout

    with ThreadPoolExecutor(2) as both:
        return list(both.map(examine_one, settings))


def test_the_doctor_shows_the_devices_and_what_they_carry(fabric: dict[str, str]) -> None:
    provider = fabric["JAXHETERO_FABRIC"]
    for shown in examine(fabric, fabric):
        assert shown.count(f": fabric {provider} on ") == 2, shown
        trial = re.search(rf"over the fabric {provider}, .* sends (\d+) Mbit/s to .*; over the socket, (\d+)", shown)
        assert trial is not None, shown
        assert all(int(figure) > 0 for figure in trial.groups())
        assert "over a fabric:" not in shown
        assert "go over sockets" not in shown


@needs_library
def test_the_doctor_says_why_a_pair_has_no_fabric_in_common(libraries: dict[str, str]) -> None:
    for shown in examine(*(settings_of(provider, libraries[provider]) for provider in ("fake", "tcp"))):
        assert re.search(r"cannot send to .* over a fabric: .*the other side: there is no provider ", shown), shown


def test_the_doctor_misses_the_device_that_is_asked_for(libraries: dict[str, str]) -> None:
    nowhere = settings_of("nowhere", libraries["fake"])
    for shown in examine(nowhere, nowhere):
        assert shown.count(" cannot use a fabric: there is no device of the provider nowhere; ") == 2, shown
        assert "over the fabric" not in shown


def test_without_a_library_all_is_as_ever(plain: list[dict[str, Any]]) -> None:
    """By default nothing is opened on a host without a device, no thread is new, and nothing is said."""
    results, logs = run({"JAXHETERO_SHARED_MEMORY": "0"})
    assert results == plain
    assert not any(result["has_libfabric"] or result["fabric_connection_count"] for result in results)
    assert not any("fabric" in log for log in logs)


def test_what_a_gpu_has_copied_is_sent_from_there(libraries: dict[str, str], tmp_path: Path) -> None:
    """Of chunks no smaller than this, and not coded: pinned memory is registered, which the stand-in checks.

    Not the first ones of 18 MB, which may be on the socket still, nor those on a border of what is registered at once.
    """
    plain = {"JAXHETERO_CUDA_STAND_IN": str(build_driver(tmp_path)), "JAXHETERO_COMPRESS": "never"}
    plain |= {"JAXHETERO_CHUNK_BYTES": "65536", "JAXHETERO_FABRIC": "off", "JAXHETERO_SHARED_MEMORY": "0"}
    expected, _ = run(plain)
    results, _ = run(plain | settings_of("fake", libraries["fake"]))
    assert [result["digests"] for result in results] == [result["digests"] for result in expected]
    assert all(result["lent_bytes"] > 4_000_000 for result in results)
    assert all(result["lent_bytes"] == 0 for result in expected)


def test_a_fabric_takes_no_thread(fabric: dict[str, str], plain: list[dict[str, Any]]) -> None:
    results, _ = run(fabric)
    assert all(result["has_libfabric"] for result in results)
    assert [result["threads"] for result in results] == [result["threads"] for result in plain]


def test_sockets_where_there_is_no_such_provider(libraries: dict[str, str], plain: list[dict[str, Any]]) -> None:
    results, logs = run(settings_of("nowhere", libraries["fake"]))
    assert [result["digests"] for result in results] == [result["digests"] for result in plain]
    for log in logs:
        assert log.count("bytes go over sockets, not over a fabric: there is no provider nowhere here") == 1
        assert log.count("fabric") == 1


def test_sockets_where_the_other_side_cannot(libraries: dict[str, str], plain: list[dict[str, Any]]) -> None:
    """The line is in the logs of those who asked."""
    results, logs = run(settings_of("fake", libraries["fake"]), reducers={"LD_LIBRARY_PATH": ""})
    assert [result["digests"] for result in results] == [result["digests"] for result in plain]
    assert [result["fabric_connection_count"] for result in results] == [0, 0]
    for log in logs:
        assert log.count("not over a fabric: the other side: ") == 1


@pytest.fixture
def everywhere(fabric: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in fabric.items():
        monkeypatch.setenv(name, value)


@pytest.mark.skipif(ON_GPU, reason="XLA chooses other matrix products for the same training in one process")
@pytest.mark.usefixtures("everywhere")
def test_deaths_change_no_bit() -> None:
    toll = run_job(seed=1, strikes=4)
    assert toll.kills >= 4
    assert toll.same_bits


@pytest.mark.parametrize("who", ["worker 1", "reducer 1"])
def test_a_process_that_is_gone_without_a_word(fabric: dict[str, str], who: str) -> None:
    """Stopped, it closes no connection, and its endpoint takes no message."""
    with Cluster(2, 2, fabric | {"JAXHETERO_TIMEOUT_MS": "4000"}) as cluster:
        cluster.start_reducers()
        cluster.start_workers("errors.py", "until killed", "0")
        for rank in range(2):
            cluster.wait_for_output(f"worker {rank}", "running")
        cluster.process(who).send_signal(signal.SIGSTOP)
        if who == "worker 1":
            assert "jaxhetero.WorkerLost: rank 1 (host" in cluster.wait("worker 0", timeout_s=20).errors
        else:
            cluster.wait_for_error("worker 0", "going on with 1 reducers")
            assert cluster.process("worker 0").poll() is None


def test_channels_go_over_it(fabric: dict[str, str]) -> None:
    def digests(settings: dict[str, str]) -> list[Any]:
        with Cluster(3, 1, settings) as cluster:
            cluster.start_reducers()
            cluster.start_workers("channels.py", "exchange")
            return [outcome.result["digest"] for outcome in cluster.wait_workers()]

    assert digests(fabric) == digests({"JAXHETERO_SHARED_MEMORY": "0"})
