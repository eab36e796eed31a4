"""Arrays of a GPU, as far as that goes without one: a stand-in for the driver, and arrays of the CPU in their place.

``JAXHETERO_CUDA_STAND_IN=libfake_cuda.so pytest`` runs the other tests this way.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import __main__ as gpu
from bench.gpu import pack
from lab.fake_cuda import build
from tests.support.cluster import Cluster, free_port, run

BUCKETS = 6
STEPS = 5


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="module")
def results(stand_in: Path) -> list[dict[str, Any]]:
    return run("cuda.py", workers=2, reducers=2, JAXHETERO_CUDA_STAND_IN=str(stand_in))


def test_sums_are_right_and_memory_is_used_in_order(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["wrong"] == 0
        assert result["violations"] == []


def test_copy_engines_alone_do_the_work(results: list[dict[str, Any]]) -> None:
    """Pinned memory is taken once, for data and for flags; a fill, the one thing with a kernel, marks failures only."""
    for result in results:
        counts = result["counts"]
        assert counts["cuMemHostAlloc"] == 2
        assert counts["cuMemsetD8Async"] == 0
        assert counts["cuStreamWaitValue32_v2"] == BUCKETS * STEPS + 1
        assert counts["cuMemcpyDtoHAsync_v2"] >= BUCKETS * STEPS


def test_a_program_for_a_gpu_has_each_bucket_on_a_stream_beside_its_own(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["calls"] == BUCKETS
        assert set(result["streams"]) == {"1", "2", "3", "4"}
        assert result["calls_across"] == [BUCKETS // 2, BUCKETS // 2, BUCKETS]  # in bfloat16


def test_sums_that_outlive_their_program(stand_in: Path) -> None:
    """As for arrays of the CPU; `tests/collectives/test_pending.py` has the cases, and these are all of them."""
    settings = {"JAXHETERO_CUDA_STAND_IN": str(stand_in), "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    for result in run("pending.py", workers=2, reducers=2, **settings):
        del result["is_asked_for_as_needed"]  # a matter of the memory of CPU programs
        assert all(found is True for found in result.values() if isinstance(found, bool))


def test_every_dtype_and_size(stand_in: Path) -> None:
    settings = {"JAXHETERO_CUDA_STAND_IN": str(stand_in), "JAXHETERO_PINNED_BYTES": str(1 << 25)}
    assert run("psum_table.py", "0,1,1023,300000", workers=2, reducers=1, **settings) == [[], []]


@pytest.mark.parametrize("kind", ["global", "own"])
def test_each_device_of_a_worker_has_a_lane(stand_in: Path, kind: str) -> None:
    """With memory of its own; XLA sums over the worker's devices, and each byte leaves the worker once."""
    settings = {"JAXHETERO_CUDA_STAND_IN": str(stand_in), "JAXHETERO_PINNED_BYTES": str(1 << 25)}
    for result in run("devices.py", kind, f"127.0.0.1:{free_port()}", workers=2, reducers=2, **settings):
        assert result["wrong"] == []
        assert result["violations"] == []
        assert result["pools"] == 2 * 2  # for data and for flags
        assert 1.0 <= result["sent"] < 1.05


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"JAXHETERO_CUDA_STAND_IN": "/nowhere/libcuda.so.1"}, "cannot open the CUDA driver /nowhere/libcuda.so.1"),
        ({"JAXHETERO_CUDA_STAND_IN": "libc.so.6"}, "has no cuInit"),
        ({"JAXHETERO_PINNED_BYTES": "1"}, "pinned_bytes is 1; it must be at least 65536"),
    ],
)
def test_what_is_missing_is_named(settings: dict[str, str], message: str) -> None:
    with Cluster(workers=2, reducers=1, settings=settings) as cluster:
        cluster.start_reducers()
        cluster.start_workers("errors.py", "none", "0")
        for outcome in cluster.wait_workers():
            assert outcome.code != 0
            assert message in outcome.errors


def test_benchmark_says_that_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert gpu.main([]) == 2
    assert "no GPU that JAX can use" in capsys.readouterr().err


def test_benchmark_runs_with_the_stand_in_and_calls_nothing_a_measurement(tmp_path: Path) -> None:
    options = [
        "--stand-in",
        "--repeats",
        "1",
        "--sizes",
        "4KiB",
        "--parts",
        "sums,kernels,all-reduces,beside",
        "--json",
        str(tmp_path / "gpu.json"),
    ]
    assert gpu.main(options) == 0
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert not content["is_measurement"]
    assert content["errors"] == {}
    assert content["parts"]["sums"] == {"wrong_count": 0}
    assert content["parts"]["beside"]["bytes"] == 4096
    all_reduces = content["parts"]["all-reduces"]
    assert [row["bytes"] for row in all_reduces["rows"]] == [4096]
    assert all_reduces["copy_bytes_per_s"].keys() == {"to host", "to GPU", "both ways"}


def test_benchmark_goes_on_after_a_part_that_fails(tmp_path: Path) -> None:
    options = ["--stand-in", "--parts", "beside,sums", "--part-seconds", "1", "--json", str(tmp_path / "gpu.json")]
    assert gpu.main(options) == 1
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert content["errors"] == dict.fromkeys(("beside", "sums"), "not over after 1 s")


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="this Python makes the wheel")
def test_packing_says_which_python_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pack.main([str(tmp_path)]) == 2
    assert "run this with Python 3.12 or later" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
