"""The benchmark measures what it says, with right sums, and writes what it promises."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro

from bench import allreduce, bars, channels, codes, cores, gradients, pipeline, record, sums, train_step
from bench.accelerator.emulation import WAIT_SOURCE
from bench.accelerator.profiles import PROFILES
from bench.accelerator.schedule import (
    Bucket,
    ideal_across_step_s,
    ideal_step_s,
    make_schedule,
    ring_factor,
    time_scale_that_exposes,
    total_bytes,
)
from bench.engines import build_native as native
from bench.engines import echo, pattern
from bench.engines.specs import KINDS, EngineSpec, missing, parse_size
from bench.harness.errors import BenchError
from bench.harness.job import Conditions, Job
from bench.harness.measure import Payload, Sample, between_last_ends
from bench.harness.report import format_table, make_rows, percentile
from lab.netlab import Lab
from lab.netlab import missing as missing_lab
from tests.support.cluster import run as run_program

AVAILABLE = [kind for kind in KINDS if missing(kind) is None]
SIZES = [4, 262_144]
RATE_BYTES_PER_S = 100e6 / 8


@pytest.fixture(scope="module", params=[[], ["--in-place"]], ids=["apart", "in place"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what one small run wrote."""
    folder = tmp_path_factory.mktemp("bench")
    options = ["--workers", "2", "--reducers", "2", "--rate", "100mbit", "--sizes", "4,256KiB", "--rounds", "1"]
    options += ["--warmup", "1", "--batch", "3", "--concurrent", "2", "--engine", ",".join(AVAILABLE)]
    files = ["--json", str(folder / "run.json"), "--plot", str(folder / "run.png")]
    assert allreduce.main([*options, *request.param, *files]) == 0
    return folder


def test_every_engine_sums_exactly_at_every_size(run: Path) -> None:
    rows = json.loads((run / "run.json").read_text())["rows"]
    cuts = [(4, 1), (262_144, 1), (262_144, 2)]  # one element cannot be cut
    expected = [(size, buckets, kind) for size, buckets in cuts for kind in AVAILABLE]
    assert [(row["bytes"], row["bucket_count"], row["engine"]) for row in rows] == expected
    assert all(row["median_s"] > 0 and len(row["times_s"]) == 3 for row in rows)
    assert all(row["wrong_count"] == (None if row["engine"] == "echo" else 0) for row in rows)


def test_cores_compares_numbers_of_strands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cores.json"
    options = [
        "--strands",
        "1,3",
        "--reducers",
        "1",
        "--size",
        "1MiB",
        "--rounds",
        "1",
        "--batch",
        "2",
        "--json",
        str(path),
    ]
    assert cores.main(options) == 0
    rows = json.loads(path.read_text())["rows"]
    ways = ["+shared_memory=0", ""]
    assert [row["engine"] for row in rows] == [f"jaxhetero:strands={n}{way}" for way in ways for n in (1, 3)]
    assert all(row["wrong_count"] == 0 for row in rows)
    assert "shared memory" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--workers 1", "--reducers 0", "--rounds 0"])
def test_bad_options_of_cores_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A worker alone sends nothing, in no time."""
    assert cores.main(option.split()) == 2
    assert f"{option.replace(' ', ' is ')}; it must be at least" in capsys.readouterr().err


def test_channels_compares_ways_to_send_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    engines = ["jaxhetero:shared_memory=0", "transfer", "gloo"]
    assert channels.main(["--sizes", "1KiB", "--count", "2", "--stream", "4KiB", "--engine", ",".join(engines)]) == 0
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if "KiB" in line]
    assert [row[1].strip() for row in rows] == engines
    assert all(float(row[3]) > 0 for row in rows)
    assert [bool(row[4].strip()) for row in rows] == [True, False, False]


def test_channels_refuses_what_it_cannot_measure() -> None:
    with pytest.raises(BenchError, match="of jaxhetero, transfer, gloo"):
        channels.Options(engine="mpi").specs()


def test_updates_of_every_engine(tmp_path: Path) -> None:
    """In a process of its own, because it takes one core for itself."""
    found = tmp_path / "updates.json"
    options = ["--millions", "0.01", "--turns", "1", "--json", str(found)]
    subprocess.run([sys.executable, "-m", "bench.updates", *options], check=True, stdout=subprocess.DEVNULL)
    rates = json.loads(found.read_text())["params_per_s"]
    assert {"fused", "interpreted", "memory copy", "jit(optax.adamw), donated"} <= rates.keys()
    assert all(rate > 0 for rate in rates.values())


def test_an_engine_takes_settings() -> None:
    assert EngineSpec.parse("jaxhetero:strands=2+failover=0").settings == (("strands", "2"), ("failover", "0"))
    with pytest.raises(BenchError, match="no setting 'strand'; see docs"):
        EngineSpec.parse("jaxhetero:strand=2")


def test_json_tells_the_circumstances(run: Path) -> None:
    content = json.loads((run / "run.json").read_text())
    assert content["schema_version"] == 2
    assert content["machine"].keys() >= {"cpu", "core_count", "kernel", "python", "jax", "tcp_congestion_control"}
    assert content["options"]["engine"] == ",".join(AVAILABLE)
    assert content["conditions"]["best_factor"] == 1.0
    assert content["conditions"]["goodput_bytes_per_s"] > 0
    assert 0 < content["conditions"]["round_trip_s"] < 1
    large = content["rows"][-1]
    assert large["times_faster_than"].keys() == set(AVAILABLE) - {large["engine"]}
    assert large["worker_cpu_s_per_gb"] > 0
    for row in content["rows"]:
        # No engine keeps more than a few copies of 256 KiB.
        assert row["worker_extra_bytes"] < 50e6
        assert (row["reducer_extra_bytes"] is not None) == (row["engine"] in ("jaxhetero", "echo"))


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


@pytest.mark.parametrize("collective", ["psum_scatter", "all_gather"])
@pytest.mark.parametrize("places", ["--reducers 2", "--reducers 0 --colocated 2"])
def test_collectives_of_rows(collective: str, places: str, tmp_path: Path) -> None:
    options = f"--collective {collective} --workers 2 {places} --rate 100mbit --sizes 256KiB --concurrent 2"
    options += f" --rounds 1 --warmup 1 --batch 3 --engine jaxhetero,gloo --json {tmp_path / 'run.json'}"
    assert allreduce.main(options.split()) == 0
    content = json.loads((tmp_path / "run.json").read_text())
    of_scatter = 1.0 if collective == "psum_scatter" and places == "--reducers 2" else 0.5
    assert content["conditions"]["best_factor"] == of_scatter
    for row in content["rows"]:
        assert row["wrong_count"] == 0
        if row["engine"] == "jaxhetero" and row["sent_over_size"] is not None:
            assert of_scatter <= row["sent_over_size"] < 1.3 * of_scatter
            assert 0.5 <= row["received_over_size"] < 0.65


def test_echo_returns_what_all_workers_have_sent(tmp_path: Path) -> None:
    """And nothing before: what a reducer that sums would have to wait for."""
    library = str(native.build(echo.SOURCE, tmp_path))
    with Lab({"r0": None}, loopback=True) as lab, contextlib.ExitStack() as stack:
        address, port = lab["r0"].address, lab["r0"].free_port()
        reducer = lab["r0"].start([sys.executable, "-m", "bench.engines.echo", library, address, str(port), "2"])
        workers = [echo.Reducers(library, [f"{address}:{port}"], 1 << 16) for _ in range(2)]
        for worker in workers:
            stack.callback(worker.close)
        given, results = np.zeros(1 << 20, np.uint8), [np.empty(1 << 20, np.uint8) for _ in workers]
        exchanges = [
            threading.Thread(target=worker.exchange, args=(given, result))
            for worker, result in zip(workers, results, strict=True)
        ]
        exchanges[0].start()
        exchanges[0].join(0.5)
        assert exchanges[0].is_alive()
        exchanges[1].start()
        for exchange in exchanges:
            exchange.join()
        stack.close()
        assert reducer.wait(30) == 0


def test_sums_in_place_take_the_memory_of_their_operands() -> None:
    assert run_program("in_place.py", workers=2, reducers=1) == [[0, 3], [0, 3]]


def test_plot_is_written(run: Path) -> None:
    assert (run / "run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--engine nccl", "engine is 'nccl'; there are: jaxhetero, gloo, mpi"),
        ("--engine gloo:1x2", "only jaxhetero and echo take a setting"),
        ("--engine gloo,gloo", "names an engine twice"),
        ("--engine mpi --dtype bfloat16", "mpi cannot"),
        ("--engine gloo --sizes 6", "size 6 is no whole number of float32"),
        ("--engine gloo --sizes 4mb4", "size is '4mb4'"),
        ("--engine gloo --rate fast", "rate is 'fast'"),
        ("--engine gloo --dtype bfloat16 --workers 30", "cannot hold the sum of 30 workers exactly"),
        ("--workers 1", "--workers is 1; it must be at least 2"),
        ("--engine gloo --reducers 0", "nobody would reduce"),
        ("--engine gloo --colocated 9", "--colocated is 9; there are 8 workers"),
        ("--engine echo --reducers 0 --colocated 1", "engine echo needs --reducers"),
        ("--engine gloo --rate none --reducer-rates 1gbit", "--reducer-rates needs a --rate"),
        ("--engine gloo --wire-dtype bfloat16 --workers 30", "bfloat16 cannot hold the sum of 30 workers"),
        ("--engine gloo --in-place --workers 6", "of 6 workers, and float32 holds 1 exactly"),
        (
            "--engine gloo --in-place --batch 40",
            "makes 43 sums on top of each other, of 8 workers, and float32",
        ),
        ("--json /nowhere/run.json", "there is no folder /nowhere"),
        ("--engine echo --collective all_gather", "engine echo has no all_gather"),
        ("--engine gloo --collective psum_scatter --in-place", "goes with neither --in-place"),
        ("--engine jaxhetero --wire-dtype int8", "--wire-dtype int8 and int4 go with --values"),
        ("--engine jaxhetero --wire-dtype bfloat16 --values .", "--wire-dtype int8 and int4 go with --values"),
        ("--engine gloo --collective psum_scatter --sizes 48", "size 48 cannot be cut into rows of float32"),
        ("--engine gloo --collective all_gather --sizes 4KiB --colocated 3", "wants --colocated 0, or 8"),
    ],
)
def test_bad_options_are_refused(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert allreduce.main(arguments.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("job", "factor"),
    [
        # Reducers with the rates of six carry 8 S.
        (Job(8, 8, 0, "200mbit", ("200mbit", "100mbit")), 8 / 6),
        # Every worker carries t - 1 of what is reduced over n - 2: 8 (t - 1) / 6 + 6 t / 8 = 1.
        (Job(8, 8, 8, "200mbit", ("200mbit", "100mbit")), (1 + 8 / 6) / (8 / 6 + 6 / 8)),
        # Two co-located reducers only: 2 (t - 1) / 2 = 1.
        (Job(4, 0, 2, "1gbit"), 2.0),
        # A fast reducer does not make the workers' own interfaces faster.
        (Job(4, 1, 0, "100mbit", ("1gbit",)), 1.0),
        (Job(4, 1, 0, "100mbit"), 4.0),
        (Job(1, 0), 0.0),
    ],
)
def test_limit_of_unequal_rates(job: Job, factor: float) -> None:
    assert job.best_factor() == pytest.approx(factor)


@pytest.mark.parametrize(
    ("job", "scatter", "gather"),
    [
        (Job(8, 8), 1.0, 7 / 8),
        (Job(8, 4), 2.0, 7 / 4),
        (Job(8, 16), 1.0, 7 / 8),
        (Job(8, 0, 8), 7 / 8, 7 / 8),
        (Job(8, 8, 0, "200mbit", ("200mbit", "100mbit")), 8 / 6, 7 / 6),
    ],
)
def test_limit_of_rows(job: Job, scatter: float, gather: float) -> None:
    assert job.best_factor("psum_scatter") == pytest.approx(scatter)
    assert job.best_factor("all_gather") == pytest.approx(gather)


def test_profiles_are_those_of_the_models() -> None:
    assert PROFILES["resnet50"].parameter_count == 25_557_032
    assert PROFILES["bert-large"].parameter_count == 336_226_108
    # The trained ones, as `python -m models.mask_rcnn --preset detectron-1x --dry-run` counts them.
    assert PROFILES["mask-rcnn"].parameter_count == 44_125_173
    assert sum(len(layer.parameter_counts) for layer in PROFILES["mask-rcnn"].layers) == 84
    multiply_adds = {name: sum(layer.multiply_adds for layer in PROFILES[name].layers) for name in PROFILES}
    assert multiply_adds["resnet50"] == pytest.approx(4.09e9, rel=0.01)  # as torchvision counts for version 1.5
    assert multiply_adds["bert-large"] == pytest.approx(7.9e10 / 2, rel=0.02)  # half of the FLOPs in Clark et al. 2020


@pytest.mark.parametrize("name", PROFILES)
def test_schedule_keeps_its_proportions(name: str) -> None:
    profile = PROFILES[name]
    whole, small = make_schedule(profile, 1.0, 1.0), make_schedule(profile, 1 / 64, 10.0)
    assert total_bytes(whole) == 4 * profile.parameter_count
    assert whole[-1].ready_s == pytest.approx(profile.step_s)
    assert whole[0].ready_s >= profile.step_s / 3
    assert [bucket.ready_s for bucket in whole] == sorted(bucket.ready_s for bucket in whole)
    assert len(small) == len(whole)
    assert small[-1].ready_s == pytest.approx(profile.step_s * 10 / 64)
    assert total_bytes(small) * 64 == pytest.approx(total_bytes(whole), rel=1e-3)


@pytest.mark.parametrize("name", PROFILES)
def test_smaller_buckets_are_ready_earlier(name: str) -> None:
    few, many = (make_schedule(PROFILES[name], 1.0, 1.0, bucket_bytes) for bucket_bytes in (25 << 20, 4 << 20))
    assert len(many) > len(few)
    assert many[0].ready_s < few[0].ready_s
    assert total_bytes(many) == total_bytes(few)
    assert ideal_step_s(many, 1e-9) < ideal_step_s(few, 1e-9)


def test_ring_exposes_what_was_asked_for() -> None:
    profile, s_per_byte = PROFILES["bert-large"], ring_factor(8) / 25e6
    schedule = make_schedule(profile, 1 / 64, time_scale_that_exposes(profile, 1 / 64, s_per_byte, 0.5))
    exposed_s = ideal_step_s(schedule, s_per_byte) - schedule[-1].ready_s
    assert exposed_s == pytest.approx(0.5 * total_bytes(schedule) * s_per_byte)
    with pytest.raises(BenchError, match=r"the last bucket alone exposes more than 0\.01"):
        time_scale_that_exposes(profile, 1 / 64, s_per_byte, 0.01)


def test_the_best_step_across_steps() -> None:
    """Of four equal layers. The first layer's sum is waited for; and on a slow network the last layer's work, too."""
    schedule = [Bucket(250, 1 + (index + 1) / 2) for index in range(4)]  # 1 s forward, 2 s backward
    one_s = 1 / total_bytes(schedule)
    assert ideal_across_step_s(schedule, 1.5 * one_s) == pytest.approx(3 + 1.5 / 4)
    assert ideal_across_step_s(schedule, 6 * one_s) == pytest.approx(6 + 0.25 + 0.5)
    assert ideal_across_step_s(schedule, 3 * one_s) < ideal_step_s(schedule, 3 * one_s)


def test_train_step_of_every_engine(tmp_path: Path) -> None:
    options = ["--workers", "1,2", "--profile", "resnet50", "--size-scale", "0.002", "--rate", "100mbit"]
    options += ["--engine", "jaxhetero,jaxhetero:across,gloo", "--rounds", "1", "--batch", "1"]
    files = ["--json", str(tmp_path / "run.json"), "--plot", str(tmp_path / "run.svg")]
    if missing_lab() is not None:
        options += ["--time-scale", "1"]
    assert train_step.main([*options, *files]) == 0
    content = json.loads((tmp_path / "run.json").read_text())
    assert (tmp_path / "run.svg").stat().st_size > 0
    engines = ["jaxhetero", "jaxhetero:across", "gloo"]
    assert [(row["worker_count"], row["engine"]) for row in content["rows"]] == [
        (n, e) for n in (1, 2) for e in engines
    ]
    for row in content["rows"]:
        assert row["wrong_count"] == 0
        # Waits cannot be too short, but late on a busy machine.
        assert min(row["times_s"]["step"]) > 0.9 * content["schedule"]["compute_s"]
        assert row["efficiency"] == pytest.approx(1 - row["exposed_s"] / row["step_s"])


def test_steps_of_a_pipeline_last_as_long_as_its_tasks(tmp_path: Path) -> None:
    """Two replicas of one stage each, and data parallelism beside them."""
    file = tmp_path / "pipeline.json"
    options = "--loopback --rate none --stages 1 --replicas 2 --microbatches 2 --profile bert-large"
    options += " --schedules breadth_first:2 --task-ms 5 --reduce 0.001 --rounds 1 --batch 1"
    assert pipeline.main([*options.split(), "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["name"] for row in rows] == ["breadth_first:2", "data parallel"]
    assert all(row["step_s"] >= row["compute_s"] == pytest.approx(0.03) for row in rows)


def test_even_stages_and_buckets_are_all_alike() -> None:
    options = pipeline.Options(profile="even", stages=2, microbatches=2, task_ms=5)
    stages = pipeline._model(options, stage_count=4, parameter_count=400)
    assert stages.counts == [100] * 4
    assert stages.seconds == pytest.approx([2 * 0.03 / 4] * 4)
    counts, ready_s = pipeline._buckets(options, parameter_count=4000)
    assert len(set(counts)) == 1
    assert ready_s == sorted(ready_s)
    assert ready_s[-1] == pytest.approx(0.03)


def test_emulated_steps_hold_up_no_round_and_take_no_memory(tmp_path: Path) -> None:
    """A bucket's round is asked for when it is ready, before the next bucket is. Steps are in place."""
    library = native.build(WAIT_SOURCE, tmp_path, jax.ffi.include_dir())
    ready_s = [1.0, 2.0, 3.0, 4.0]
    for step in run_program("emulation.py", str(library), *map(str, ready_s), workers=2, reducers=1):
        assert [math.floor(time_s) for time_s in step["requested_s"]] == ready_s
        assert step["moved_count"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--engine mpi", "engine mpi has no all-reduce that runs beside"),
        ("--workers two", "--workers is 'two'; it must be numbers"),
        ("--workers 2 --reducers 0", "nobody would reduce"),
        ("--size-scale 0", "must be more than 0"),
        ("--bucket-bytes 0", "must be at least 1"),
    ],
)
def test_bad_options_of_train_step_are_refused(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_step.main(arguments.split()) == 2
    assert message in capsys.readouterr().err


def test_record_knows_its_commands() -> None:
    for name, text in record.RUNS.items():
        _, program, *options = text.replace("bench.", "bench ", 1).split()
        module = {"allreduce": allreduce, "train_step": train_step, "cores": cores, "sums": sums}[program]
        assert tyro.cli(module.Options, args=options), name
    assert {bar.run for bar in bars.BARS} <= record.RUNS.keys()


def test_bars_of_many_cores_are_read_from_their_runs() -> None:
    def figure(what: str, *rows: dict[str, Any]) -> bars.Figure:
        return next(bar for bar in bars.BARS if bar.what.startswith(what)).figure({"rows": rows})

    echo = {"engine": "echo:1x1", "bytes": 8, "worker_cpu_s_per_gb": 0.3}
    ours = {"engine": "jaxhetero", "bytes": 8, "worker_cpu_s_per_gb": 0.36}
    assert figure("one strand, n = 2", echo, {**echo, "worker_cpu_s_per_gb": 0.9}, ours) == (
        "1.20 (0.360 against 0.300 s/GB)",
        True,
    )
    costs = [
        {"engine": f"jaxhetero:strands={n}{way}", "worker_cpu_s_per_gb": 0.4, "reducer_cpu_s_per_gb": 0.2 + 0.01 * n}
        for n in (1, 4)
        for way in ("+shared_memory=0", "")
    ]
    assert figure("4 strands, CPU", *costs) == ("worker 1.00, reducer 1.14; in shared memory 1.00, 1.14", False)
    one = {"engine": "jaxhetero", "times_faster_than": {"jaxhetero:interface=eth0": 1.95}}
    assert figure("two interfaces", one) == ("1.95 to 1.95 times", True)
    rates = {"sum_bytes_per_s": 6e9, "copy_bytes_per_s": 10e9}
    assert figure("the sum of 8", {"type": "float32", "workers": 8, **rates}) == ("0.60 (6.0 against 10.0 GB/s)", False)


def test_record_makes_a_table_of_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = {"cpu": "abacus", "core_count": 2, "memory_bytes": 1 << 30, "system": "Linux", "kernel": "6"}
    machine |= {"tcp_congestion_control": "bbr", "python": "3", "jax": "1", "jaxhetero": "2"}
    row = {"engine": "jaxhetero", "over_limit": 1.04, "bucket_count": 1}
    content = {"machine": machine, "conditions": {"best_factor": 1.5}, "rows": [row]}
    (tmp_path / "colocated-2.json").write_text(json.dumps(content))
    assert record.main(["--table", "--folder", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| n = 8, k = 2, co-located fill in | limit + 5 % | 1.040 x 1.500 = 1.560 S/B | yes |" in lines
    assert "| n = 8, k = 4, co-located fill in | limit + 5 % | not measured | |" in lines
    assert lines[-1].startswith("2 cores of abacus, 1 GiB, Linux 6, TCP bbr")
    assert record.main(["--only", "nothing"]) == 2


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


@pytest.mark.parametrize("dtype", pattern.DTYPES)
def test_sums_on_top_of_each_other_stay_exact(dtype: str) -> None:
    total = pattern.expected_sum(1000, dtype, 8, seed=3)
    sum_count = pattern.most_sums(dtype, 8)
    for _ in range(sum_count - 1):
        total = total * np.asarray(8, total.dtype)
    assert np.isfinite(total.astype(np.float64)).all()
    assert pattern.wrong_count(total, pattern.expected_sum(1000, dtype, 8, seed=3, sum_count=sum_count)) == 0
    assert pattern.most_sums(dtype, 6) == 1


def test_most_sums() -> None:
    assert [pattern.most_sums(dtype, 8) for dtype in ("float32", "bfloat16", "float16", "int32")] == [35, 40, 2, 1]


def test_pattern_is_exact_in_a_narrower_wire_dtype() -> None:
    parts = [pattern.contribution(1000, "float32", rank, 8, 3, "bfloat16") for rank in range(8)]
    total = np.sum([part.astype(jnp.bfloat16) for part in parts], axis=0, dtype=np.float32).astype(jnp.bfloat16)
    expected = pattern.expected_sum(1000, "float32", 8, 3, "bfloat16")
    assert pattern.wrong_count(total.astype(np.float32), expected) == 0


def test_times_run_from_last_worker_to_last_worker() -> None:
    assert between_last_ends([[0, 3_000_000_000, 7_000_000_000], [1_000_000_000, 2_000_000_000, 8_000_000_000]]) == [
        2,
        5,
    ]


def test_figures_of_a_row() -> None:
    payload = Payload(1_000_000, 250_000, "float32")
    times_s, carried = [0.05, 0.06, 0.10], ([4_000_000, 4_400_000], [4_000_000] * 2)
    ours = Sample("jaxhetero", payload, 500_000, times_s, 4, *carried, worker_cpu_s=0.08, reducer_cpu_s=0.02)
    other = Sample("gloo", payload, 1_000_000, [0.12], 2)
    conditions = Conditions(2, 2, 0, 25e6, 20e6, 0.001, 1.0)
    row = make_rows([ours, other], conditions)[0]
    assert row.median_s == 0.06
    assert row.p99_s == 0.10
    assert row.of_rate == pytest.approx(2 / 3)
    assert row.sent_over_size == pytest.approx(1.1)
    assert row.worker_cpu_s_per_gb == pytest.approx(10)
    assert row.reducer_cpu_s_per_gb == pytest.approx(2.5)
    assert row.over_limit == pytest.approx(2.4)
    assert row.round_trips == pytest.approx(60)
    assert row.times_faster_than == {"gloo": pytest.approx(2)}
    table = format_table([row]).splitlines()
    assert len(table) == 2
    assert len(table[0].split()) == len(table[1].split())


def test_percentile_is_one_of_the_values() -> None:
    assert percentile([float(value) for value in range(1, 101)], 0.99) == 99
    assert percentile([5.0], 0.99) == 5


def test_names_and_sizes() -> None:
    assert EngineSpec.parse("gloo:combined").combined
    assert EngineSpec.parse("gloo", "bfloat16").wire_itemsize("float32") == 4
    assert EngineSpec.parse("jaxhetero", "bfloat16").wire_itemsize("float32") == 2
    assert EngineSpec.parse("jaxhetero:32768x4") == EngineSpec("jaxhetero:32768x4", "jaxhetero", 32768, 4)
    assert [parse_size(text) for text in ("4", "64KiB", "16MB")] == [4, 65536, 16_000_000]
    with pytest.raises(BenchError, match="size is '0'"):
        parse_size("0")


def test_sums_are_set_against_copies_of_the_same_core(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cores = os.sched_getaffinity(0)
    quick = ["--turns", "1", "--seconds", "0.01", "--region-mib", "1"]
    try:
        assert (
            sums.main(["--workers", "2", "3", "--types", "float16", "float32", *quick, "--json", str(tmp_path / "x")])
            == 0
        )
    finally:
        os.sched_setaffinity(0, cores)
    rows = json.loads((tmp_path / "x").read_text())["rows"]
    assert [(row["type"], row["workers"]) for row in rows] == [
        ("float16", 2), ("float16", 3), ("float32", 2), ("float32", 3),
    ]  # fmt: skip
    assert all(row["sum_bytes_per_s"] > 0 and row["copy_bytes_per_s"] > 0 for row in rows)
    assert "copies GB/s" in capsys.readouterr().out
    assert sums.main(["--types", "int8"]) == 2
    assert "there is no type int8" in capsys.readouterr().err


def test_codes_are_timed_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own_cores = os.sched_getaffinity(0)
    quick = ["--turns", "1", "--seconds", "0.01", "--region-mib", "1", "--json", str(tmp_path / "x")]
    try:
        assert codes.main(quick) == 0
    finally:
        os.sched_setaffinity(0, own_cores)
    rows = json.loads((tmp_path / "x").read_text())["rows"]
    parts = {(row["values"], row["type"]): row["part"] for row in rows}
    assert parts["gradients of bfloat16", "float32"] < 0.4 < parts["totals of these over 8", "float32"] < 0.7
    assert 0.8 < parts["gradients", "float32"] < 0.9
    assert parts["random bits", "float32"] == parts["random bits", "bfloat16"] == 1
    assert all(row["encode_bytes_per_s"] > 0 for row in rows)
    assert "encode" in capsys.readouterr().out


def test_gradients_are_written_for_the_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "values"
    assert gradients.main(["--dtype", "random", "--workers", "2", "--output", str(folder)]) == 0
    assert sorted(file.name for file in folder.iterdir()) == ["0.npy", "1.npy", "bfloat16"]
    assert pattern.read_contribution(str(folder), 10, "float32", 1).dtype == np.float32
    assert pattern.read_contribution(str(folder / "bfloat16"), 10, "bfloat16", 1).dtype.itemsize == 2
    assert capsys.readouterr().out.count("1.000") == 4, "random bits have no code"
    assert gradients.main(["--dtype", "random", "--output", str(folder)]) == 2
    assert gradients.main(["--output", str(tmp_path / "other")]) == 2
    assert "--data is missing" in capsys.readouterr().err


def test_sums_of_values_in_8_bits_are_those_of_the_docs(tmp_path: Path) -> None:
    for rank in range(2):
        np.save(tmp_path / f"{rank}.npy", np.random.default_rng(rank).standard_normal(1000, np.float32))
    job = "--loopback --workers 2 --reducers 1 --engine jaxhetero --sizes 16KiB --rounds 1 --batch 2"
    file = tmp_path / "x"
    assert allreduce.main([*job.split(), "--wire-dtype", "int8", "--values", str(tmp_path), "--json", str(file)]) == 0
    assert [row["wrong_count"] for row in json.loads(file.read_text())["rows"]] == [0]
