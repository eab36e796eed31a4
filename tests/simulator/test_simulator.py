"""The simulator: what no all-reduce can do, what must come out the same, and what other simulators say."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bench.simulate.pipeline
import bench.simulate.records
import bench.simulate.scaling
from bench.accelerator.profiles import PROFILES
from bench.accelerator.schedule import ideal_across_step_s, ideal_step_s, make_schedule
from bench.simulate.algorithms import (
    simulate_hierarchy,
    simulate_parameter_server,
    simulate_ring,
    simulate_tree,
)
from bench.simulate.records import simulate_all
from jaxhetero.errors import ConfigError
from jaxhetero.simulator import (
    Bucket,
    Costs,
    Host,
    Job,
    Network,
    across_steps,
    simulate,
    simulate_steps,
)
from jaxhetero.simulator.estimate import simulate_one_strand

MEBI = 2**20
SYSTEM_PYTHON = "/usr/bin/python3"  # of Debian, whose packages it sees
FREE = Costs(0, 0, 0, 0)
HOST = Host.of_gbits(10)
# No headers, so that sums of bytes are easily told.
PLAIN = Network(packet_overhead_bytes=0, ack_bytes=0)


def job(worker_count: int, reducer_count: int, colocated: int = 0, host: Host = HOST) -> Job:
    hosts = (host,) * worker_count, (host,) * reducer_count
    return Job(*hosts, colocated=colocated, worker_costs=FREE, reducer_costs=FREE)


NETWORKS = [
    Network(),
    Network(hosts_per_leaf=2, spine_count=2, uplink_gbits=0.3),
    Network(queue_bytes=30_000, piece_bytes=8192, loss_timeout_s=0.02),
    Network(flow_gbits=0.1, burst_bytes=65536),
]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    rates = st.sampled_from([10e6, 25e6, 40e6, 125e6])
    workers = draw(st.lists(rates, min_size=2, max_size=6))
    reducers = draw(st.lists(rates, max_size=6))
    colocated = draw(st.integers(0 if reducers else 1, len(workers)))
    costs = draw(st.sampled_from([FREE, Costs()]))
    interface_count = draw(st.sampled_from([1, 2]))
    return Job(
        tuple(Host((rate,) * interface_count) for rate in workers),
        tuple(Host((rate,) * interface_count) for rate in reducers),
        colocated,
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        strands=draw(st.sampled_from([interface_count, 2])),
        worker_costs=costs,
        reducer_costs=costs,
    )


@settings(max_examples=300, deadline=None)
@given(jobs(), st.integers(4, 4 * MEBI), st.sampled_from(NETWORKS), st.integers(0, 99))
def test_nothing_beats_the_limit_and_no_byte_is_lost(case: Job, size_bytes: int, network: Network, seed: int) -> None:
    size_bytes -= size_bytes % 4
    outcome = simulate(case, size_bytes, network, rounds=2, warmup=0, seed=seed)
    interface_count = len(case.hosts[0].interfaces)
    # A token bucket may pass its burst beside its rate.
    most_burst_s = network.burst_bytes * interface_count / min(host.bytes_per_s for host in case.hosts)
    assert outcome.total_s >= 2 * outcome.best_s - 2 * most_burst_s
    sent, received = sum(map(sum, outcome.sent_bytes)), sum(map(sum, outcome.received_bytes))
    assert sent == pytest.approx(received) if outcome.lost_count == 0 else sent > received
    # Each round, each worker's contribution to the reducers of others, and as many totals.
    assert received >= 2 * 2 * (len(case.workers) - 1) * size_bytes
    for host, own in zip(case.hosts, outcome.sent_bytes, strict=True):
        for rate, count in zip(host.interfaces, own, strict=True):
            assert count <= rate * outcome.total_s * (1 + 1e-9) + network.burst_bytes


@pytest.mark.parametrize("colocated", [0, 4])
def test_each_byte_goes_out_once_and_comes_back_once(colocated: int) -> None:
    outcome = simulate(job(4, 4, colocated), 8 * MEBI, PLAIN, rounds=1, warmup=0)
    for process in (outcome.sent_bytes, outcome.received_bytes):
        assert [sum(host) / (8 * MEBI) for host in process] == pytest.approx([1.0] * 8, rel=0.01)


def test_equal_arguments_give_equal_outcomes() -> None:
    def run(seed: int) -> object:
        buckets = [Bucket(MEBI, 0.001 * number) for number in range(5)]
        return simulate_steps(job(5, 3, 5), buckets, 0.005, seed=seed, straggling=0.1)

    assert run(3) == run(3)
    assert run(3) != run(4)


@pytest.mark.parametrize(("reducer_count", "colocated"), [(0, 8), (2, 8), (4, 8), (8, 0)])
def test_large_buckets_come_close_to_the_limit(reducer_count: int, colocated: int) -> None:
    outcome = simulate(job(8, reducer_count, colocated), 64 * MEBI, rounds=2)
    assert 1 <= outcome.over_limit < 1.05


def test_sixteen_bits_take_half_the_time() -> None:
    full = simulate(job(4, 4), 32 * MEBI)
    half = simulate(replace(job(4, 4), dtype="bfloat16"), 16 * MEBI)
    assert half.time_s / full.time_s == pytest.approx(0.5, rel=0.02)


def test_two_interfaces_carry_twice_as_much() -> None:
    hosts = (replace(HOST, interfaces=HOST.interfaces * 2),) * 4
    one = simulate(job(4, 4), 64 * MEBI, rounds=2)
    both = simulate(replace(job(4, 4), workers=hosts, reducers=hosts, strands=2), 64 * MEBI, rounds=2)
    assert both.time_s / one.time_s == pytest.approx(0.5, rel=0.05)


def test_a_slow_processor_is_the_limit() -> None:
    costs = replace(FREE, s_per_gb=1)
    slow = replace(job(4, 4), worker_costs=costs)
    outcome = simulate(slow, 16 * MEBI, rounds=2)
    assert outcome.time_s >= 2 * 16 * MEBI / 1e9, "each byte is sent and received"


def test_messages_leave_the_cores_time_for_the_bytes_of_many_hosts() -> None:
    """BERT-large on 64 hosts of 100 Gbit/s, where a message costs 5 us."""
    schedule = make_schedule(PROFILES["bert-large"], 1, 1)
    buckets, compute_s = [Bucket(bucket.bytes, bucket.ready_s) for bucket in schedule], schedule[-1].ready_s
    hosts = (Host.of_gbits(100),) * 64
    step_s = simulate_one_strand(Job(hosts, hosts, strands=8), buckets, compute_s, Network())
    assert compute_s / step_s > 0.93


def test_dedicated_reducers_beside_those_in_workers_are_not_slower_than_none() -> None:
    """At 100 Gbit/s, where a message costs 5 us, their cores carry less than their interfaces. Many buckets wait."""
    hosts = (Host.of_gbits(100),) * 32

    def step_s(reducer_count: int) -> float:
        mix = Job(hosts, hosts[:reducer_count], 32, strands=8)
        return simulate_one_strand(mix, [Bucket(8 * MEBI)] * 32, 0.0, Network())

    assert max(step_s(8), step_s(16)) < 0.9 * step_s(0)


def test_links_to_dedicated_reducers_keep_up_with_those_to_workers() -> None:
    """Their shards are twice as large, and all links of a worker leave through one interface."""
    hosts = (Host.of_gbits(12.5),) * 16
    job = Job(hosts, hosts[:2], 16)
    assert simulate_steps(job, [Bucket(MEBI)] * 77, 0.0, Network(), rounds=1, call_bytes=620 * MEBI).over_limit < 1.25


def test_memory_is_a_limit_of_all_strands_together() -> None:
    narrow = replace(HOST, memory_gb_per_s=0.5)
    outcome = simulate(replace(job(2, 2, host=narrow), strands=4), 16 * MEBI, rounds=2)
    assert outcome.time_s >= 2 * 16 * MEBI / 0.5e9


def test_one_slow_worker_delays_all() -> None:
    buckets = [Bucket(MEBI, 0.05)]
    even = simulate_steps(job(8, 8), buckets, 0.05, rounds=8)
    uneven = simulate_steps(job(8, 8), buckets, 0.05, rounds=8, straggling=0.2)
    assert uneven.time_s > 1.1 * even.time_s


@pytest.mark.parametrize("network_share", [0.5, 1.0, 2.0])
def test_steps_take_what_is_computed_for_them(network_share: float) -> None:
    """With its all-reduce under the backward pass alone, and under the next forward pass as well.

    A step is long for the milliseconds that a late and urgent bucket waits for a window: of seeds, 2.5 to 5 % where the
    network is the limit.
    """
    host = Host.of_gbits(1)
    goodput = host.bytes_per_s * Network().payload_share
    profile, scale = PROFILES["bert-large"], 1 / 4
    time_scale = 4 * profile.parameter_count / goodput / network_share / profile.step_s
    schedule = make_schedule(profile, scale, time_scale)
    compute_s = schedule[-1].ready_s
    buckets = [Bucket(bucket.bytes, bucket.ready_s) for bucket in schedule]
    ordinary = simulate_steps(job(4, 4, host=host), buckets, compute_s)
    assert ordinary.time_s == pytest.approx(ideal_step_s(schedule, 1 / goodput), rel=0.02)
    later = across_steps(buckets, compute_s / 3)
    across = simulate_steps(job(4, 4, host=host), later, compute_s, rounds=3, warmup=3)
    assert across.time_s == pytest.approx(ideal_across_step_s(schedule, 1 / goodput), rel=0.05)


def test_what_is_needed_first_is_pushed_first() -> None:
    """A bucket that takes 0.34 s is half there when one that the next step begins with is ready, and takes 0.03 s."""
    host, step_s = Host.of_gbits(1), 0.4
    one_s = 4 * MEBI / host.bytes_per_s
    for priority, waiting_s in ((1, one_s), (3, step_s / 2 + 11 * one_s - step_s)):
        buckets = [Bucket(40 * MEBI, step_s / 2, 2, step_s / 2), Bucket(4 * MEBI, step_s, priority, 0.0)]
        outcome = simulate_steps(job(2, 2, host=host), buckets, step_s, PLAIN, rounds=2, warmup=2)
        assert outcome.time_s == pytest.approx(step_s + waiting_s, rel=0.02)


def test_a_full_queue_costs_time() -> None:
    deep = simulate(job(8, 1), 4 * MEBI, Network(piece_bytes=16384), rounds=2)
    shallow = simulate(job(8, 1), 4 * MEBI, Network(queue_bytes=50_000, piece_bytes=16384), rounds=2)
    assert deep.lost_count == 0
    assert shallow.lost_count > 0
    both = [sum(map(sum, outcome.received_bytes)) for outcome in (deep, shallow)]
    assert both[0] == pytest.approx(both[1], rel=1e-9), "what was dropped has come as well"
    assert shallow.time_s > 1.5 * deep.time_s


def test_many_workers_fill_no_queue() -> None:
    """Whoever begins with the same peer as all others fills its port: two chunks of each are 4 MiB here."""
    shallow = Network(queue_bytes=256 * 1024, piece_bytes=8192)
    outcome = simulate(job(64, 64, host=Host.of_gbits(100)), 8 * MEBI, shallow)
    assert outcome.lost_count == 0
    assert outcome.over_limit < 1.5


def test_where_leaves_are_oversubscribed_a_hierarchy_wins() -> None:
    # Four leaves of four hosts; a quarter of the hosts' rate goes up.
    network = Network(hosts_per_leaf=4, spine_count=1, uplink_gbits=10)
    hosts = (HOST,) * 16
    ours = simulate(job(16, 0, 16), 32 * MEBI, network, rounds=1)
    hierarchy = simulate_hierarchy(hosts, 32 * MEBI, 4, network, FREE)
    assert hierarchy.time_s < 0.7 * ours.time_s


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_ring_takes_what_it_must(count: int) -> None:
    moved = simulate_ring([HOST] * count, 64 * MEBI, PLAIN, FREE)
    least_s = 2 * (count - 1) / count * 64 * MEBI / HOST.bytes_per_s
    assert least_s <= moved.time_s < 1.02 * least_s
    assert sum(moved.sent_bytes) == pytest.approx(2 * (count - 1) * 64 * MEBI, rel=1e-5)


def test_trees_and_servers_take_what_they_must() -> None:
    least_s = 64 * MEBI / HOST.bytes_per_s
    assert 2 * least_s <= simulate_tree([HOST] * 15, 64 * MEBI, PLAIN, FREE).time_s < 3 * least_s
    # The server of the one large tensor receives it from all eight.
    tensors = [32 * MEBI] + [MEBI] * 32
    moved = simulate_parameter_server([HOST] * 8, [HOST] * 8, tensors, PLAIN, FREE)
    assert moved.time_s >= 8 * 32 * MEBI / HOST.bytes_per_s


@pytest.mark.parametrize(
    "make",
    [
        lambda: Host(()),
        lambda: Host((0.0,)),
        lambda: Job((HOST,)),
        lambda: Job((HOST,) * 2),
        lambda: Job((HOST,) * 2, colocated=3),
        lambda: Job((HOST,) * 2, colocated=2, dtype="int3"),
        lambda: Job((HOST,) * 2, colocated=2, chunk_bytes=1),
        lambda: Job((HOST,) * 2, colocated=2, window_chunks=-1),
        lambda: Job((Host.of_gbits(10, interface_count=2),) * 2, colocated=2),
        lambda: Job((HOST,) * 5000, colocated=1),
        lambda: Bucket(-1),
        lambda: Bucket(1, needed_s=-1.0),
        lambda: across_steps([Bucket(1, 1.0)], 1.0),
        lambda: across_steps([Bucket(1, 3.0), Bucket(1, 2.0)], 1.0),
        lambda: Network(hosts_per_leaf=4),
        lambda: Network(queue_bytes=1000),
        lambda: simulate(job(2, 2), 0),
        lambda: simulate_steps(job(2, 2), [], 1.0),
        lambda: simulate_hierarchy([HOST] * 4, 100, 3),
        lambda: simulate_ring([HOST], 100),
        lambda: simulate_ring([HOST] * 2, 2**37),
    ],
)
def test_what_makes_no_job_is_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(ConfigError):
        make()


# In place, from 4 MiB on, and not with the memory that the virtual machine's host has taken back: docs/performance.md.
RECORD = "bfloat16,colocated,concurrent,gigabit,large,many,new,rails,sixteen,step,unequal"


def test_the_lab_has_measured_the_same() -> None:
    cases = list(simulate_all(Path(__file__).parents[2] / "bench" / "results", RECORD))
    assert len(cases) >= 20
    wrong = [case for case in cases if abs(case.error) > (0.02 if case.is_step else 0.03)]
    assert wrong == []


def test_the_commands_print_their_tables(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    json_file = tmp_path / "figures.json"
    assert bench.simulate.records.main(["--only", "gigabit", "--json", str(json_file)]) == 0
    assert "4+4 64 MiB" in capsys.readouterr().out
    assert [case["run"] for case in json.loads(json_file.read_text())["cases"]] == ["gigabit"]
    scaling = ["--plot", str(tmp_path), "--setups", "p3-8+m4"]
    assert bench.simulate.scaling.main([*scaling, "--workers", "2", "--only", "models,servers,updates,costs"]) == 0
    assert bench.simulate.scaling.main([*scaling, "--workers", "16", "--only", "algorithms,leaves"]) == 0
    out = capsys.readouterr().out
    assert "bert-large" in out
    assert "p3-8+m4" in out
    names = set(bench.simulate.scaling.TABLES) - {"updates", "events"}
    assert {path.name for path in tmp_path.glob("*.png")} == {f"simulated_{name}.png" for name in names}
    for command, wrong in ((bench.simulate.records, ["--only", "none"]), (bench.simulate.scaling, ["--only", "none"])):
        assert command.main(wrong) == 2


def test_what_is_measured_again_has_our_engine_alone() -> None:
    assert bench.simulate.records.RECORD.keys() >= {"large", "colocated-4", "gigabit", "rails", "step-resnet50"}
    assert all(text.split("--engine ")[1].split()[0] == "jaxhetero" for text in bench.simulate.records.RECORD.values())


def test_an_update_takes_time_of_the_reducers() -> None:
    """Where they are busy: with two workers, interfaces are slower."""
    (row,) = list(bench.simulate.scaling.updates(bench.simulate.scaling.Options(workers="8", gbits=25.0)))[1:]
    sums, with_updates = float(row[3]), float(row[4])
    assert sums < with_updates < 1.5 * sums


def test_events_grow_as_chunks_and_pairs() -> None:
    """Six for each chunk of a worker and a reducer: two messages, and each is sent, arrives and is handled."""
    rows = list(bench.simulate.scaling.events(bench.simulate.scaling.Options(workers="2,4")))
    assert [row[4] for row in rows[1:-1]] == ["6.00"] * 4


def test_a_pipeline_of_many_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--workers", "8", "--stages", "2,4", "--layers", "2", "--gbits", "10"]
    efficiencies = []
    for message_us in ("0", "100"):
        assert bench.simulate.pipeline.main([*small, "--message-us", message_us]) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines() if "%" in line]
        assert [row[:2] for row in rows] == [["1", "8"], ["2", "4"], ["4", "2"]]
        efficiencies.append([float(row[5]) for row in rows])
    # Cheap messages make faster steps, and so does a pipeline where the gradients take longer than the step.
    assert all(cheap > dear for cheap, dear in zip(*efficiencies, strict=True))
    assert efficiencies[0][0] < efficiencies[0][1]
    assert bench.simulate.pipeline.main(["--workers", "8", "--stages", "3"]) == 2


def test_data_parallelism_beside_pipelines_is_what_a_simulated_job_takes() -> None:
    """The whole step is simulated here, and only some of its buckets there."""
    count, gbits, size_bytes, compute_s = 8, 10.0, 400 * MEBI, 0.3
    host = (Host.of_gbits(gbits),) * count
    number = size_bytes // (8 * MEBI)
    buckets = [Bucket(8 * MEBI, compute_s * (1 + 2 * (index + 1) / number) / 3) for index in range(number)]
    whole = simulate_steps(Job(host, host), buckets, compute_s)
    s_per_byte = bench.simulate.pipeline.seconds_per_byte(count, gbits, size_bytes, 5.0)
    step_s = bench.simulate.pipeline.data_parallel_s(compute_s, size_bytes, s_per_byte)
    assert step_s == pytest.approx(whole.time_s, rel=0.03)
    assert step_s > 1.3 * compute_s


@pytest.mark.parametrize(("reducer_count", "colocated"), [(4, 0), (0, 4), (1, 4)])
def test_a_job_is_as_fast_as_its_strands(reducer_count: int, colocated: int) -> None:
    """The estimate simulates one of them, whose host has its part of the cores: enough for a reducer inside as well."""
    hosts = (Host.of_gbits(20),) * 4
    buckets = [Bucket(16 * MEBI, 0.01 * number) for number in range(1, 4)]
    whole = Job(hosts, hosts[:reducer_count], colocated, strands=2)
    one_s = simulate_one_strand(whole, buckets, 0.03, Network())
    assert simulate_steps(whole, buckets, 0.03, rounds=1).time_s == pytest.approx(one_s, rel=0.03)


@pytest.mark.parametrize("count", [4, 8])
def test_simgrid_says_the_same(count: int) -> None:
    """SimGrid shares links fairly among flows, and knows nothing of our plan; so chunks and windows are fixed."""
    has_simgrid = subprocess.run([SYSTEM_PYTHON, "-c", "import simgrid"], capture_output=True).returncode == 0
    if not has_simgrid:
        pytest.skip(f"{SYSTEM_PYTHON} has no simgrid: needs Debian's python3-simgrid")
    size_bytes, chunk_bytes, window = 16 * MEBI, 16384, 4
    slow = Host.of_gbits(0.2)
    network = replace(PLAIN, latency_s=10e-6)
    case = replace(job(count, count, host=slow), chunk_bytes=chunk_bytes, window_chunks=window)
    ours = simulate(case, size_bytes, network, rounds=1, warmup=0)
    numbers = (count, size_bytes, slow.bytes_per_s, network.latency_s, chunk_bytes, window)
    program = [SYSTEM_PYTHON, str(Path(__file__).parent / "simgrid_two_hop.py"), *map(str, numbers)]
    theirs_s = float(subprocess.run(program, capture_output=True, text=True, check=True, timeout=200).stdout)
    assert ours.total_s == pytest.approx(theirs_s, rel=0.02)
