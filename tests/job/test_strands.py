"""Strands: several cores of a process move and sum bytes. What they are for, and what does not depend on them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jaxhetero._job import cores as job_cores
from tests.support.cluster import Cluster

PROGRAM = "shared_memory.py"


def digests(strands: int) -> list[str]:
    with Cluster(2, 2, {"JAXHETERO_STRANDS": str(strands)}) as cluster:
        cluster.start_reducers()
        cluster.start_workers(PROGRAM)
        results = [outcome.result["digests"] for outcome in cluster.wait_workers()]
        assert all(outcome.code == 0 for outcome in cluster.wait_reducers())
    assert results[0] == results[1]
    return results[0]


def test_the_bits_do_not_depend_on_the_strands() -> None:
    assert digests(1) == digests(2) == digests(4)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot stand in for two nodes")
def test_each_strand_stays_on_a_memory_node() -> None:
    with Cluster(2, 0, {"JAXHETERO_STRANDS": "3", "JAXHETERO_COLOCATED_COUNT": "1"}) as cluster:
        cluster.start_workers("memory_nodes.py")
        outcomes = cluster.wait_workers()
    assert [outcome.result["total"] for outcome in outcomes] == [2, 2]
    # Three strands take turns on two cores, beginning on any: those of each worker, and of the reducer in the first.
    assert sorted(outcomes[0].result["threads"]) in ([2, 4], [3, 3])
    assert sorted(outcomes[1].result["threads"]) == [1, 2]


@pytest.mark.parametrize(
    ("files", "nodes"),
    [
        ({"online": "0-1\n", "node0/cpulist": "0-1,4\n", "node1/cpulist": "2-3,5\n"}, [[0, 1, 4], [2, 3]]),
        ({"online": "0,2\n", "node0/cpulist": "0-3\n", "node2/cpulist": "4-7\n"}, [[0, 1, 2, 3], [4]]),
        (
            {"online": "0-2\n", "node0/cpulist": "5-9\n", "node1/cpulist": "0-4\n", "node2/cpulist": "\n"},
            [[0, 1, 2, 3, 4]],
        ),
        ({"online": "0\n"}, []),
        ({}, []),
    ],
    ids=["two", "gap", "elsewhere", "unlisted", "hidden"],
)
def test_memory_nodes_are_those_with_cores_for_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], nodes: list[list[int]]
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(job_cores.os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4})
    assert job_cores.memory_nodes(tmp_path) == nodes


def cgroup(tmp_path: Path, own: str, **quotas: str) -> tuple[Path, Path]:
    """Stand-ins for /proc and /sys/fs/cgroup, where groups have such quotas ("a_b" is the group a/b)."""
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(own)
    for name, quota in quotas.items():
        group = root / name.strip("_").replace("_", "/")
        group.mkdir(parents=True, exist_ok=True)
        (group / "cpu.max").write_text(quota)
    return proc, root


@pytest.mark.parametrize(
    ("own", "quotas", "cores"),
    [
        ("0::/a/b\n", {"a_b": "250000 100000\n", "a": "max 100000\n"}, 2.5),
        ("0::/a/b\n", {"a_b": "max 100000\n", "a": "150000 50000\n"}, 3),
        ("0::/\n", {"_": "400000 100000\n"}, 4),
        ("0::/a\n", {"a": "max 100000\n"}, None),
        ("0::/gone\n", {}, None),
        ("4:cpu:/a\n", {}, None),
    ],
    ids=["own", "outer", "container", "unlimited", "hidden", "version-1"],
)
def test_the_least_quota_counts(tmp_path: Path, own: str, quotas: dict[str, str], cores: float | None) -> None:
    assert job_cores._quota(*cgroup(tmp_path, own, **quotas)) == cores


@pytest.mark.parametrize(("cores", "worker", "reducer"), [(1, 1, 1), (2, 2, 2), (4, 2, 4), (16, 4, 8), (96, 8, 8)])
def test_a_process_offers_what_it_can_spare(
    monkeypatch: pytest.MonkeyPatch, cores: int, worker: int, reducer: int
) -> None:
    monkeypatch.setattr(job_cores, "usable_cores", lambda: cores)
    assert (job_cores.worker_strands(), job_cores.reducer_strands()) == (worker, reducer)
