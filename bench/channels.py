"""How long a message takes from one worker to another, and how much of a network's rate a stream of them uses.

    python -m bench.channels
    python -m bench.channels --rate 200mbit --sizes 16MiB --engine jaxhetero --count 1 --stream 128MiB

Without a rate both workers are on one host. The engines:

    jaxhetero   the native channels of a pipeline; jaxhetero:shared_memory=0 for a setting other than the default
    transfer    jax.experimental.transfer
    gloo        jax.lax.ppermute over gloo, both ways at once

The columns:

    one_way_ms   half of the median time there and back; of gloo, half that of two calls
    MB/s         of messages of this size from one worker to the other, two of them posted at a time
    of the wire  that, over the goodput of a plain TCP connection between the same hosts, measured before; with --rate
"""

from __future__ import annotations

import json
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from bench.engines.specs import format_size, parse_size
from bench.harness.command import run_command
from bench.harness.errors import BenchError
from jaxhetero.config import write_environment
from lab.netlab import Host, Lab, measure_goodput

_ROOT = Path(__file__).parents[1]
_RUN_S = 300.0
_ENGINES = ("jaxhetero", "transfer", "gloo")


@dataclass(frozen=True)
class Options:
    """How long a message takes from one worker to another."""

    engine: str = "jaxhetero,jaxhetero:shared_memory=0,transfer,gloo"
    sizes: str = "1KiB,1MiB,16MiB"
    count: int = 100
    """Ways there and back of each size."""
    stream: str = "256MiB"
    """How much to send one way, in messages of each size; nothing of a size if that is not three messages."""
    rate: str | None = None
    """Of each worker's interface in the lab, as in 200mbit."""

    def specs(self) -> list[tuple[str, dict[str, str]]]:
        """The engines, each with its settings."""
        specs = []
        for word in self.engine.split(","):
            kind, _, settings = word.partition(":")
            if kind not in _ENGINES or (settings and kind != "jaxhetero"):
                raise BenchError(f"--engine has {word!r}; it must be of {', '.join(_ENGINES)}")
            pairs: list[list[str]] = [pair.split("=", 1) for pair in settings.split("+") if pair]
            specs.append((kind, dict(pairs)))
        return specs


def run(options: Options) -> int:
    """Measure, and show the table."""
    sizes, stream_bytes = [parse_size(word) for word in options.sizes.split(",")], parse_size(options.stream)
    rates = {"w0": options.rate, "w1": options.rate} if options.rate else {"w0": None}
    table = Table("engine", "bytes", "one_way_ms", "MB/s", *(["of the wire"] if options.rate else []))
    with Lab(rates, loopback=options.rate is None) as lab:
        hosts = list(lab) * (1 if options.rate else 2)
        goodput = measure_goodput(hosts[0], hosts[1]) if options.rate else None
        for label, (kind, settings) in zip(options.engine.split(","), options.specs(), strict=True):
            words = [kind, ",".join(map(str, sizes)), str(options.count), str(stream_bytes)]
            for row in _measure(hosts, words, settings):
                one_way_ms = statistics.median(row["ping_pong_s"]) / 2 * 1e3
                rate = row.get("stream_bytes_per_s")
                cells = [label, format_size(row["bytes"]), f"{one_way_ms:.3f}", f"{rate / 1e6:.0f}" if rate else ""]
                if goodput:
                    cells.append(f"{rate / goodput:.3f}" if rate else "")
                table.add_row(*cells)
    Console().print(table)
    return 0


def _measure(hosts: Sequence[Host], words: Sequence[str], settings: dict[str, str]) -> list[dict[str, Any]]:
    """What the two workers of an engine print: times of rank 0, rates of rank 1."""
    kind, sizes, count, stream_bytes = words
    job: dict[str, str | int] = {
        "worker_count": 2,
        "coordinator": f"{hosts[0].address}:{hosts[0].free_port()}",
        "token": secrets.token_hex(),
        **settings,
    }
    shared = write_environment(job, {"PYTHONPATH": str(_ROOT), "JAX_PLATFORMS": "cpu"})
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        command = [sys.executable, "-m", "bench.engines.messages", kind, folder, sizes, count, stream_bytes]
        workers = [
            host.start(
                command,
                env=shared | {"JAXHETERO_RANK": str(rank), "BENCH_HOST": host.address},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for rank, host in enumerate(hosts)
        ]
        outputs = [worker.communicate(timeout=_RUN_S) for worker in workers]
    for rank, (worker, (_, errors)) in enumerate(zip(workers, outputs, strict=True)):
        if worker.returncode != 0:
            raise BenchError(f"{kind}: worker {rank} ended with {worker.returncode}: {errors.strip()[-2000:]}")
    times, rates = ([json.loads(line) for line in output.splitlines() if line.startswith("{")] for output, _ in outputs)
    return [there | {"ping_pong_s": here["ping_pong_s"]} for here, there in zip(times, rates, strict=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and run."""
    return run_command(
        lambda: run(tyro.cli(Options, prog="python -m bench.channels", args=arguments, description=__doc__))
    )


if __name__ == "__main__":
    sys.exit(main())
