"""Simulates what the lab has no hosts for: more workers, three models, unbalanced servers, leaves and spines.

    python -m bench.simulate.scaling                              the tables for 8 to 64 workers
    python -m bench.simulate.scaling --workers 8,64,256 --plot FOLDER

Nothing here is measured. docs/how_to/simulate.md says how the simulator is checked. Processors are either free, or
cost what jaxhetero.simulator.Costs has as its defaults. --plot draws all but updates and events.

algorithms      the time of one all-reduce in units of S/B, between hosts of one rate, where processors are free. The
                servers have whole tensors of BERT-large, scaled to the same bytes
models          the efficiency of a train step with V100s (bench/accelerator/profiles.py), as many reducers as workers
servers         parameter servers, in units of S/B where processors are free, for the smallest number of workers. "in
                turn": each has whole tensors. "MXNet's rule": arrays of a million elements and more are cut evenly, and
                a smaller one belongs to server 9973 i mod k (KVStore, EncodeDefaultKey in src/kvstore/kvstore_dist.h)
updates         ResNet-50, whose reducers run AdamW on the sums, beside sums alone and MXNet's servers, which are free
                here: the time of gradients and weights in units of S/B, then the efficiency of a train step
leaves          the time in units of S/B, where the links of leaves of eight hosts carry a part of what their hosts do.
                Reducers have leaves of their own
costs           a step of the set-ups of `jaxhetero estimate` and what it costs, by the number of reducer hosts
events          what a simulation itself takes: events, CPU time, and the memory of its process, with Python and JAX.
                The last row is an all-reduce of BERT-large, in the chunks of a job
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from bench.accelerator.profiles import PROFILES, Profile
from bench.accelerator.schedule import make_schedule
from bench.harness.command import run_command
from bench.harness.errors import BenchError
from bench.harness.report import format_columns
from bench.harness.team import memory_bytes
from bench.simulate.algorithms import simulate_hierarchy, simulate_parameter_server, simulate_ring, simulate_tree
from bench.simulate.plots import Line, draw
from jaxhetero.cluster.prices import read_prices
from jaxhetero.simulator import (
    Bucket,
    Costs,
    Host,
    Job,
    Network,
    simulate,
)
from jaxhetero.simulator.estimate import SETUPS, Question, estimate, simulate_one_strand, strands_for

_FREE = Costs(0, 0, 0, 0)
_SIZE_BYTES = 256 * 2**20
_LEAF = 8
_BIG_ARRAY = 1_000_000  # elements: MXNET_KVSTORE_BIGARRAY_BOUND
_CHUNK_BYTES = 16384
_UPDATE_S_PER_GB = 0.32  # of weights; AdamW on one core, fused: notebook/updates.md
_COST_SHARES = (0.125, 0.25, 0.5, 0.75, 1)


@dataclass(frozen=True)
class Options:
    """Simulates what the lab has no hosts for."""

    workers: str = "8,16,32,64"
    """Numbers of workers."""
    gbits: float = 100.0
    """The rate of every host."""
    only: str | None = None
    """Names of tables, as in algorithms,leaves. Default: all."""
    plot: Path | None = None
    """Draw the tables into this folder, as simulated_algorithms.png and so on."""
    setups: str = "p3-8+m4,p3-64+m4"
    """For the table of costs: of p3-8+m4, p3-64+m4 and p3dn-256, which takes minutes."""

    def counts(self) -> list[int]:
        try:
            return [int(word) for word in self.workers.split(",")]
        except ValueError:
            raise BenchError(f"--workers is {self.workers!r}; it must be numbers, as in 8,64,256") from None


def _free_job(host: Host, workers: int, reducers: int, colocated: int) -> Job:
    hosts = (host,) * workers, (host,) * reducers
    return Job(*hosts, colocated=colocated, worker_costs=_FREE, reducer_costs=_FREE)


def algorithms(options: Options) -> Iterator[Line]:
    host, network = Host.of_gbits(options.gbits), Network()
    unit_s = _SIZE_BYTES / (host.bytes_per_s * network.payload_share)
    yield ["workers", "n reducers", "n/2 reducers", "in workers", "a ring", "two trees", "a hierarchy", "n servers"]
    for count in options.counts():
        hosts = [host] * count
        jobs = [(count, 0), (count // 2, count), (0, count)]
        ours = [simulate(_free_job(host, count, *job), _SIZE_BYTES, network, rounds=1, warmup=1).time_s for job in jobs]
        ring = simulate_ring(hosts, _SIZE_BYTES, network, _FREE).time_s
        tree = simulate_tree(hosts, _SIZE_BYTES, network, _FREE).time_s
        times_s = [*ours, ring, tree]
        if count % _LEAF == 0 and count > _LEAF:
            times_s.append(simulate_hierarchy(hosts, _SIZE_BYTES, _LEAF, network, _FREE).time_s)
        else:
            times_s.append(float("nan"))
        tensors = [
            round(size * _SIZE_BYTES / _bytes(PROFILES["bert-large"])) for size in _arrays(PROFILES["bert-large"])
        ]
        times_s.append(simulate_parameter_server(hosts, hosts, [4 * size for size in tensors], network, _FREE).time_s)
        yield [str(count), *("-" if math.isnan(time_s) else f"{time_s / unit_s:.3f}" for time_s in times_s)]


def _arrays(profile: Profile) -> list[int]:
    """The elements of its arrays, in the order in which their gradients are ready."""
    return [size for layer in reversed(profile.layers) for size in layer.parameter_counts]


def _bytes(profile: Profile) -> int:
    return 4 * profile.parameter_count


def models(options: Options) -> Iterator[Line]:
    yield ["workers", *(f"{name}{how}" for name in PROFILES for how in ("", ", free"))]
    for count in options.counts():
        cells = [
            f"{100 * _efficiency(profile, count, options.gbits, costs):.1f} %"
            for profile in PROFILES.values()
            for costs in (Costs(), _FREE)
        ]
        yield [str(count), *cells]


def _efficiency(profile: Profile, count: int, gbits: float, costs: Costs, update_s_per_gb: float = 0.0) -> float:
    schedule = make_schedule(profile, 1, 1)
    buckets = [Bucket(bucket.bytes, bucket.ready_s) for bucket in schedule]
    job = _equal_job(count, gbits, costs, update_s_per_gb)
    return schedule[-1].ready_s / simulate_one_strand(job, buckets, schedule[-1].ready_s, Network())


def _equal_job(count: int, gbits: float, costs: Costs, update_s_per_gb: float) -> Job:
    """As many reducers as workers. For each byte of weights, a reducer receives and sends one byte per worker."""
    hosts = (Host.of_gbits(gbits),) * count
    updating = replace(costs, s_per_gb=costs.s_per_gb + update_s_per_gb / (2 * count))
    return Job(hosts, hosts, strands=strands_for(gbits), worker_costs=costs, reducer_costs=updating)


def servers(options: Options) -> Iterator[Line]:
    host, network = Host.of_gbits(options.gbits), Network()
    count = min(options.counts())
    yield ["model", "servers / worker", "in turn", "MXNet's rule", "reducers"]
    for profile in PROFILES.values():
        unit_s = _bytes(profile) / (host.bytes_per_s * network.payload_share)
        for share in (0.5, 1, 2, 4):
            number = max(1, round(share * count))
            whole = [(None, 4 * size) for size in _arrays(profile)]
            times_s = [
                _served_s(host, count, number, parts, network) for parts in (whole, _mxnet_parts(profile, number))
            ]
            job = _free_job(host, count, number, count if number < count else 0)
            times_s.append(simulate(job, _bytes(profile), network, rounds=1, warmup=1).time_s)
            yield [profile.name, f"{share:g}", *(f"{time_s / unit_s:.2f}" for time_s in times_s)]


Part = tuple[int | None, int]
"""A server's number, or None for turns, and bytes."""


def _mxnet_parts(profile: Profile, server_count: int) -> list[Part]:
    parts: list[Part] = []
    arrays = _arrays(profile)
    for key, size in zip(range(len(arrays) - 1, -1, -1), arrays, strict=True):
        if size < _BIG_ARRAY:
            parts.append((key * 9973 % server_count, 4 * size))
        else:
            parts += [(server, 4 * size // server_count) for server in range(server_count)]
    return parts


def _served_s(host: Host, workers: int, server_count: int, parts: Sequence[Part], network: Network) -> float:
    places = [index % server_count if place is None else place for index, (place, _) in enumerate(parts)]
    sizes = [size for _, size in parts]
    hosts = [host] * workers, [host] * server_count
    return simulate_parameter_server(*hosts, sizes, network, _FREE, servers_of=places).time_s


def updates(options: Options) -> Iterator[Line]:
    host, network, profile = Host.of_gbits(options.gbits), Network(), PROFILES["resnet50"]
    unit_s = _bytes(profile) / (host.bytes_per_s * network.payload_share)
    yield ["workers", "n servers", "2 n servers", "n reducers", "with AdamW", "step", "step, with AdamW"]
    for count in options.counts():
        times_s = [_served_s(host, count, k, _mxnet_parts(profile, k), network) for k in (count, 2 * count)]
        efficiencies = []
        for update_s_per_gb in (0, _UPDATE_S_PER_GB):
            job = _equal_job(count, options.gbits, Costs(), update_s_per_gb)
            buckets = [Bucket(bucket.bytes, 0) for bucket in make_schedule(profile, 1, 1)]
            times_s.append(simulate_one_strand(job, buckets, 0, network))
            efficiencies.append(_efficiency(profile, count, options.gbits, Costs(), update_s_per_gb))
        yield [
            str(count),
            *(f"{time_s / unit_s:.3f}" for time_s in times_s),
            *(f"{100 * efficiency:.1f} %" for efficiency in efficiencies),
        ]


def leaves(options: Options) -> Iterator[Line]:
    host = Host.of_gbits(options.gbits)
    yield ["workers", "share of the rate", "n reducers", "in workers", "a ring", "a hierarchy"]
    count = max(number - number % _LEAF for number in options.counts())
    if count < 2 * _LEAF:
        raise BenchError(f"--workers: the table of leaves wants {2 * _LEAF} workers or more")
    for oversubscription in (1, 2, 4, 8):
        uplink_gbits = options.gbits * _LEAF / oversubscription
        network = Network(hosts_per_leaf=_LEAF, uplink_gbits=uplink_gbits)
        unit_s = _SIZE_BYTES / (host.bytes_per_s * network.payload_share)
        jobs = [(count, 0), (0, count)]
        ours = [simulate(_free_job(host, count, *job), _SIZE_BYTES, network, rounds=1, warmup=1).time_s for job in jobs]
        ring = simulate_ring([host] * count, _SIZE_BYTES, network, _FREE).time_s
        grouped = simulate_hierarchy([host] * count, _SIZE_BYTES, _LEAF, network, _FREE).time_s
        yield [
            str(count),
            f"1/{oversubscription}",
            *(f"{time_s / unit_s:.3f}" for time_s in (*ours, ring, grouped)),
        ]


def costs(options: Options) -> Iterator[Line]:
    yield ["set-up", "reducers", "reducers / worker", "step, ms", "efficiency", "USD/h", "USD/1k steps"]
    for name in options.setups.split(","):
        if name not in SETUPS:
            raise BenchError(f"--setups has {name}; there are {', '.join(SETUPS)}")
        facts = dict(SETUPS[name])
        price = read_prices()[facts.pop("worker_type")].usd_per_hour
        workers = facts["workers"]
        counts = tuple(sorted({0, *(max(1, round(share * workers)) for share in _COST_SHARES)}))
        for answer in estimate(Question(worker_usd_per_hour=price, reducer_counts=counts, **facts)):
            assert answer.usd_per_hour is not None
            assert answer.usd_per_step is not None
            yield [
                name,
                str(answer.reducer_count),
                f"{answer.reducer_count / workers:.3g}",
                f"{1e3 * answer.step_s:.1f}",
                f"{100 * answer.efficiency:.1f} %",
                f"{answer.usd_per_hour:.2f}",
                f"{1e3 * answer.usd_per_step:.2f}",
            ]


def events(options: Options) -> Iterator[Line]:
    yield ["workers + reducers", "MiB", "n k chunks", "events", "events / n k chunk", "CPU s", "ns / event", "GB"]
    fewest, most = min(options.counts()), max(options.counts())
    cases = [(fewest, factor * _SIZE_BYTES) for factor in (1, 2, 4)]
    cases += [(count, _SIZE_BYTES) for count in options.counts() if count > fewest]
    host = Host.of_gbits(options.gbits)
    for count, size_bytes in cases:
        job = replace(_free_job(host, count, count, 0), chunk_bytes=_CHUNK_BYTES)
        yield _event_line(job, size_bytes, count**2 * math.ceil(size_bytes / count / _CHUNK_BYTES))
    yield _event_line(_free_job(host, most, most, 0), _bytes(PROFILES["bert-large"]), None)


def _event_line(job: Job, size_bytes: int, chunk_count: int | None) -> Line:
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    begin_s = time.process_time()
    outcome = simulate(job, size_bytes, rounds=1, warmup=0)
    cpu_s = time.process_time() - begin_s
    return [
        f"{len(job.workers)} + {len(job.reducers)}",
        f"{size_bytes / 2**20:.0f}",
        f"{chunk_count:,}" if chunk_count else "as planned",
        f"{outcome.event_count:,}",
        f"{outcome.event_count / chunk_count:.2f}" if chunk_count else "-",
        f"{cpu_s:.2f}",
        f"{1e9 * cpu_s / outcome.event_count:.0f}",
        f"{memory_bytes(os.getpid(), 'VmHWM') / 1e9:.2f}",
    ]


TABLES: dict[str, Callable[[Options], Iterator[Line]]] = {
    "algorithms": algorithms,
    "models": models,
    "servers": servers,
    "updates": updates,
    "leaves": leaves,
    "costs": costs,
    "events": events,
}


def run(options: Options) -> dict[str, list[Line]]:
    names = options.only.split(",") if options.only else list(TABLES)
    if unknown := set(names) - TABLES.keys():
        raise BenchError(f"--only {','.join(sorted(unknown))}: there are {', '.join(TABLES)}")
    tables = {}
    for name in names:
        tables[name] = list(TABLES[name](options))
        print(f"# {name}, {options.gbits:g} Gbit/s, simulated\n{format_columns(tables[name])}\n", flush=True)
    if options.plot:
        options.plot.mkdir(parents=True, exist_ok=True)
        for name, lines in tables.items():
            draw(options.plot / f"simulated_{name}.png", name, lines)
    return tables


def main(arguments: Sequence[str] | None = None) -> int:
    def command() -> int:
        run(tyro.cli(Options, prog="python -m bench.simulate.scaling", args=arguments, description=__doc__))
        return 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
