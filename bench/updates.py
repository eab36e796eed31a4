"""How fast one core applies AdamW as a reducer does, against XLA and against a copy of memory.

    python -m bench.updates

The reducer's own code updates the weights and both moments of one large tensor in place, chunk by chunk: as one fused
loop, and interpreted, operation by operation. Beside it, ``jax.jit`` of ``optax.adamw`` with donated buffers does the
same, and ``memcpy`` copies the tensor. Each figure is a median over turns in alternation, on one core, in elements a
second of CPU time.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from bench.engines.build_native import build
from bench.harness.command import check_folders, run_command
from bench.harness.errors import BenchError
from bench.harness.report import describe_machine, write_result

_SOURCE = Path(__file__).with_suffix(".cc")
_CORE = _SOURCE.parents[1] / "xla_ffi"
_SOURCES = ("update/fused.cc", "update/program.cc", "update/run.cc", "update/tensor_sum.cc", "wire/codec.cc")
# As many as the program has, of sizes that keep every number in range.
_SCALARS = np.array([0.1, 0.9, 0.001, 0.999, 1.1, 1.2, 0.0, 1e-8, 1e-4, -1e-3, 1.0, 1.0, 1.0], np.float32)


@dataclass(frozen=True)
class Options:
    """AdamW on one core."""

    millions: float = 16.0
    """Elements of the tensor, in millions."""
    chunk_kib: int = 128
    """The size of a chunk of float32."""
    turns: int = 5
    """How often each is measured."""
    json: Path | None = None
    """A file for the results."""


Engine = Callable[[], float]


def _native_engines(options: Options, library: ctypes.CDLL, count: int) -> dict[str, Engine]:
    library.update_per_s.restype = library.copy_per_s.restype = ctypes.c_double
    random = np.random.default_rng(0)
    arrays = [np.abs(random.normal(size=count)).astype(np.float32) for _ in range(4)]
    sent = np.zeros(count, np.uint16)
    pointers = (ctypes.c_void_p * 4)(*(array.ctypes.data for array in arrays))
    scalars = ctypes.c_void_p(_SCALARS.ctypes.data)
    sizes = ctypes.c_size_t(count), ctypes.c_size_t(options.chunk_kib << 8), ctypes.c_size_t(1)

    def update(interpret: bool, narrow: bool) -> float:
        out = ctypes.c_void_p(sent.ctypes.data if narrow else None)
        return float(library.update_per_s(ctypes.c_bool(interpret), pointers, out, scalars, *sizes))

    def copy() -> float:
        return float(library.copy_per_s(*(ctypes.c_void_p(array.ctypes.data) for array in arrays[:2]), *sizes))

    return {
        "fused": lambda: update(False, False),
        "fused, bfloat16 weights out": lambda: update(False, True),
        "interpreted": lambda: update(True, False),
        "interpreted, bfloat16 weights out": lambda: update(True, True),
        "memory copy": copy,
    }


def _jitted_engine(count: int) -> Engine:
    import jax
    import jax.numpy as jnp
    import optax

    tx = optax.adamw(1e-3)

    def step(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    jitted = jax.jit(step, donate_argnums=(0, 1))
    params = jnp.ones(count, jnp.float32)
    gradients = jnp.full(count, 1e-3, jnp.float32)
    known = jax.block_until_ready(jitted(params, tx.init(params), gradients))

    def run() -> float:
        nonlocal known
        start = time.process_time()
        known = jax.block_until_ready(jitted(*known, gradients))
        return count / (time.process_time() - start)

    return run


def measure(options: Options, library: ctypes.CDLL) -> dict[str, float]:
    """Elements a second of CPU time, of each engine."""
    count = int(options.millions * 1e6)
    engines = _native_engines(options, library, count) | {"jit(optax.adamw), donated": _jitted_engine(count)}
    found: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(options.turns):
        for name, engine in engines.items():
            found[name].append(engine())
    return {name: statistics.median(rates) for name, rates in found.items()}


def show(rates: dict[str, float], console: Console) -> None:
    """A table of the engines, against the jitted one."""
    jitted = rates["jit(optax.adamw), donated"]
    table = Table("engine", "Gparam/s of CPU time", "against jit")
    for name, rate in rates.items():
        table.add_row(name, f"{rate / 1e9:.2f}", f"{rate / jitted:.2f}")
    console.print(table)


def run(options: Options) -> int:
    """Measure on one of the cores that this process may use, and show the table."""
    if options.millions <= 0 or options.chunk_kib < 1 or options.turns < 1:
        raise BenchError("the tensor, the chunks and the turns must be at least one")
    check_folders(options.json)
    # Before XLA makes its threads.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as folder:
        more = ["-O3", "-ffp-contract=off", f"-I{_CORE.parent}", *(str(_CORE / name) for name in _SOURCES)]
        rates = measure(options, ctypes.CDLL(str(build(_SOURCE, Path(folder), more=more))))
    show(rates, Console())
    if options.json is not None:
        content = {"machine": describe_machine(), "options": asdict(options) | {"json": None}, "params_per_s": rates}
        write_result(options.json, content)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and run."""
    return run_command(lambda: run(tyro.cli(Options, args=arguments, description=__doc__)))


if __name__ == "__main__":
    sys.exit(main())
