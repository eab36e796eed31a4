"""The benchmark measures what it says, with right sums, and writes what it promises."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench import allreduce, pattern
from bench.errors import BenchError
from bench.limit import best_factor
from bench.measure import Payload, Sample, between_last_ends
from bench.report import Conditions, format_table, make_rows, percentile
from bench.specs import KINDS, EngineSpec, missing, parse_size
from tests.netlab import missing as missing_lab

AVAILABLE = [kind for kind in KINDS if missing(kind) is None]
SIZES = [4, 262_144]
RATE_BYTES_PER_S = 100e6 / 8


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what one small run wrote."""
    folder = tmp_path_factory.mktemp("bench")
    options = ["--workers", "2", "--reducers", "2", "--rate", "100mbit", "--sizes", "4,256KiB", "--rounds", "1"]
    options += ["--warmup", "1", "--batch", "3", "--engine", ",".join(AVAILABLE)]
    files = ["--json", str(folder / "run.json"), "--plot", str(folder / "run.png")]
    assert allreduce.main([*options, *files]) == 0
    return folder


def test_every_engine_sums_exactly_at_every_size(run: Path) -> None:
    rows = json.loads((run / "run.json").read_text())["rows"]
    assert [(row["bytes"], row["engine"]) for row in rows] == [(size, kind) for size in SIZES for kind in AVAILABLE]
    assert all(row["wrong_count"] == 0 and row["median_s"] > 0 and len(row["times_s"]) == 3 for row in rows)


def test_json_tells_the_circumstances(run: Path) -> None:
    content = json.loads((run / "run.json").read_text())
    assert content["schema_version"] == 1
    assert content["machine"].keys() >= {"cpu", "core_count", "kernel", "python", "jax", "tcp_congestion_control"}
    assert content["options"]["engine"] == ",".join(AVAILABLE)
    assert content["conditions"]["best_factor"] == 1.0
    assert content["conditions"]["goodput_bytes_per_s"] > 0
    large = content["rows"][-1]
    assert large["times_faster_than"].keys() == set(AVAILABLE) - {large["engine"]}
    assert large["worker_cpu_s_per_gb"] > 0


@pytest.mark.skipif(missing_lab() is not None, reason="loopback has neither rates nor counters")
def test_interfaces_carry_the_payload_at_their_rate(run: Path) -> None:
    content = json.loads((run / "run.json").read_text())
    assert content["conditions"]["rate_bytes_per_s"] == RATE_BYTES_PER_S
    for row in content["rows"]:
        if row["bytes"] == SIZES[-1]:
            # With two workers, whoever sums, everybody sends S and receives S.
            assert 1.0 <= row["sent_over_size"] < 1.5
            assert 1.0 <= row["received_over_size"] < 1.5
            assert row["of_rate"] < 1.5


def test_plot_is_written(run: Path) -> None:
    assert (run / "run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--engine nccl", "engine is 'nccl'; there are: jaxhetero, gloo, mpi"),
        ("--engine gloo:1x2", "only jaxhetero takes a setting"),
        ("--engine gloo,gloo", "names an engine twice"),
        ("--engine mpi --dtype bfloat16", "mpi cannot"),
        ("--engine gloo --sizes 6", "size 6 is no whole number of float32"),
        ("--engine gloo --sizes 4mb4", "size is '4mb4'"),
        ("--engine gloo --rate fast", "rate is 'fast'"),
        ("--engine gloo --dtype bfloat16 --workers 30", "cannot hold the sum of 30 workers exactly"),
        ("--workers 1", "--workers is 1; it must be at least 2"),
        ("--reducers 0", "nobody would reduce"),
        ("--reducers 2 --colocated", "cannot mix yet"),
        ("--json /nowhere/run.json", "there is no folder /nowhere"),
    ],
)
def test_bad_options_are_refused(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert allreduce.main(arguments.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("worker_count", "reducer_count", "factor"),
    [(8, 0, 1.75), (8, 2, 1.47), (8, 4, 1.27), (8, 8, 1.0), (8, 12, 1.0), (4, 0, 1.5), (2, 0, 1.0)],
)
def test_limit_is_that_of_the_paper(worker_count: int, reducer_count: int, factor: float) -> None:
    assert best_factor(worker_count, reducer_count) == pytest.approx(factor, abs=0.005)


@pytest.mark.parametrize("dtype", pattern.DTYPES)
def test_pattern_adds_up_and_shows_every_mistake(dtype: str) -> None:
    parts = [pattern.contribution(1000, dtype, rank, 8, seed=3) for rank in range(8)]
    expected = pattern.expected_sum(1000, dtype, 8, seed=3)
    total = np.sum(parts, axis=0, dtype=np.float64).astype(expected.dtype)
    assert pattern.wrong_count(total, expected) == 0
    assert pattern.wrong_count(np.roll(total, 1), expected) > 900
    twice = total + parts[2] - parts[1]
    assert pattern.wrong_count(twice.astype(expected.dtype), expected) > 900
    assert pattern.wrong_count(pattern.expected_sum(1000, dtype, 8, seed=4), expected) > 900
    assert pattern.wrong_count(total[1:], expected) == 1000


def test_times_run_from_last_worker_to_last_worker() -> None:
    assert between_last_ends([[0, 3_000_000_000, 7_000_000_000], [1_000_000_000, 2_000_000_000, 8_000_000_000]]) == [
        2,
        5,
    ]


def test_figures_of_a_row() -> None:
    payload = Payload(1_000_000, 250_000, "float32")
    ours = Sample("jaxhetero", payload, [0.05, 0.06, 0.10], 4, [4_000_000, 4_400_000], [4_000_000] * 2, 0.08, 0.02)
    other = Sample("gloo", payload, [0.12], 2)
    conditions = Conditions(2, 2, 25e6, 20e6, 1.0)
    row = make_rows([ours, other], conditions)[0]
    assert row.median_s == 0.06
    assert row.p99_s == 0.10
    assert row.of_rate == pytest.approx(2 / 3)
    assert row.sent_over_size == pytest.approx(1.1)
    assert row.worker_cpu_s_per_gb == pytest.approx(10)
    assert row.reducer_cpu_s_per_gb == pytest.approx(2.5)
    assert row.over_limit == pytest.approx(1.2)
    assert row.times_faster_than == {"gloo": pytest.approx(2)}
    table = format_table([row]).splitlines()
    assert len(table) == 2
    assert len(table[0].split()) == len(table[1].split())


def test_percentile_is_one_of_the_values() -> None:
    assert percentile([float(value) for value in range(1, 101)], 0.99) == 99
    assert percentile([5.0], 0.99) == 5


def test_names_and_sizes() -> None:
    assert EngineSpec.parse("jaxhetero:32768x4") == EngineSpec("jaxhetero:32768x4", "jaxhetero", 32768, 4)
    assert [parse_size(text) for text in ("4", "64KiB", "16MB")] == [4, 65536, 16_000_000]
    with pytest.raises(BenchError, match="size is '0'"):
        parse_size("0")
