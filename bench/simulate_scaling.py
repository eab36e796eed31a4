"""Simulates what the lab has no hosts for: more workers, three models, unbalanced servers, leaves and spines.

    python -m bench.simulate_scaling                              the tables for 8 to 64 workers
    python -m bench.simulate_scaling --workers 8,64,256 --plot FOLDER

Nothing here is measured. docs/how_to/simulate.md says how the simulator is checked. Processors are either free, or
cost what jaxhetero.simulator.Costs has as its defaults.

algorithms      the time of one all-reduce in units of S/B, between hosts of one rate, where processors are free
models          the efficiency of a train step with V100s (bench/accelerator/profiles.py), as many reducers as workers
servers         parameter servers to which whole tensors belong, in units of S/B, with as many servers and with twice as
                many as workers
leaves          the time in units of S/B, where the links of leaves of eight hosts carry a part of what their hosts do
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from bench.accelerator.profiles import PROFILES, Profile
from bench.accelerator.schedule import make_schedule
from bench.errors import BenchError
from bench.harness.command import run_command
from bench.harness.report import format_columns
from jaxhetero.simulator import (
    Bucket,
    Costs,
    Host,
    Job,
    Network,
    simulate,
    simulate_hierarchy,
    simulate_parameter_server,
    simulate_ring,
    simulate_tree,
)
from jaxhetero.simulator.estimate import simulate_one_strand, strands_for

_FREE = Costs(0, 0, 0, 0)
_SIZE_BYTES = 256 * 2**20
_LEAF = 8
Line = list[str]


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
    """Draw algorithms.png and models.png in this folder."""

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
    yield ["workers", "n reducers", "n/2 reducers", "in workers", "a ring", "two trees"]
    for count in options.counts():
        jobs = [(count, 0), (count // 2, count), (0, count)]
        ours = [simulate(_free_job(host, count, *job), _SIZE_BYTES, network, rounds=1, warmup=1).time_s for job in jobs]
        ring = simulate_ring([host] * count, _SIZE_BYTES, network, _FREE).time_s
        tree = simulate_tree([host] * count, _SIZE_BYTES, network, _FREE).time_s
        yield [str(count), *(f"{time_s / unit_s:.3f}" for time_s in (*ours, ring, tree))]


def models(options: Options) -> Iterator[Line]:
    yield ["workers", *(f"{name}{how}" for name in PROFILES for how in ("", ", free"))]
    for count in options.counts():
        cells = [
            f"{100 * _efficiency(profile, count, options.gbits, costs):.1f} %"
            for profile in PROFILES.values()
            for costs in (Costs(), _FREE)
        ]
        yield [str(count), *cells]


def _efficiency(profile: Profile, count: int, gbits: float, costs: Costs) -> float:
    schedule = make_schedule(profile, 1, 1)
    buckets = [Bucket(bucket.bytes, bucket.ready_s) for bucket in schedule]
    hosts = (Host.of_gbits(gbits),) * count
    job = Job(hosts, hosts, strands=strands_for(gbits), worker_costs=costs, reducer_costs=costs)
    return schedule[-1].ready_s / simulate_one_strand(job, buckets, schedule[-1].ready_s, Network())


def servers(options: Options) -> Iterator[Line]:
    host, network = Host.of_gbits(options.gbits), Network()
    yield ["workers", "model", "n servers", "2n servers", "n reducers"]
    count = options.counts()[0]
    for profile in PROFILES.values():
        tensors = [4 * size for layer in reversed(profile.layers) for size in layer.parameter_counts]
        unit_s = sum(tensors) / (host.bytes_per_s * network.payload_share)
        times_s = [
            simulate_parameter_server([host] * count, [host] * number, tensors, network, _FREE).time_s
            for number in (count, 2 * count)
        ]
        ours = simulate(_free_job(host, count, count, 0), sum(tensors), network, rounds=1, warmup=1).time_s
        yield [str(count), profile.name, *(f"{time_s / unit_s:.2f}" for time_s in (*times_s, ours))]


def leaves(options: Options) -> Iterator[Line]:
    host = Host.of_gbits(options.gbits)
    yield ["workers", "share of the rate", "in workers", "a ring", "a hierarchy"]
    count = max(number - number % _LEAF for number in options.counts())
    if count < 2 * _LEAF:
        raise BenchError(f"--workers: the table of leaves wants {2 * _LEAF} workers or more")
    for oversubscription in (1, 2, 4, 8):
        uplink_gbits = options.gbits * _LEAF / oversubscription
        network = Network(hosts_per_leaf=_LEAF, uplink_gbits=uplink_gbits)
        unit_s = _SIZE_BYTES / (host.bytes_per_s * network.payload_share)
        ours = simulate(_free_job(host, count, 0, count), _SIZE_BYTES, network, rounds=1, warmup=1).time_s
        ring = simulate_ring([host] * count, _SIZE_BYTES, network, _FREE).time_s
        grouped = simulate_hierarchy([host] * count, _SIZE_BYTES, _LEAF, network, _FREE).time_s
        yield [
            str(count),
            f"1/{oversubscription}",
            *(f"{time_s / unit_s:.3f}" for time_s in (ours, ring, grouped)),
        ]


TABLES: dict[str, Callable[[Options], Iterator[Line]]] = {
    "algorithms": algorithms,
    "models": models,
    "servers": servers,
    "leaves": leaves,
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
        for name in tables.keys() & {"algorithms", "models"}:
            _draw(options.plot / f"{name}.png", tables[name], "time, S/B" if name == "algorithms" else "efficiency, %")
    return tables


def _draw(path: Path, lines: list[Line], what: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    heads, *rows = lines
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for column, name in enumerate(heads[1:], start=1):
        axes.plot([int(row[0]) for row in rows], [float(row[column].rstrip(" %")) for row in rows], "o-", label=name)
    axes.axhline(100 if "%" in what else 1, color="black", linestyle=":", label="limit")
    axes.set(xlabel="workers", ylabel=what, xscale="log", title="simulated")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    def command() -> int:
        run(tyro.cli(Options, prog="python -m bench.simulate_scaling", args=arguments, description=__doc__))
        return 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
