"""How fast one core codes and decodes floats for the wire, against how fast it copies memory, and how short codes are.

    python -m bench.codes

The values are normal, like gradients, at a scale for each row of 128; of float32 also such values in bfloat16, as a
model that computes in bfloat16 has them, and the totals of eight of these. Random bits have no code that is shorter.
The same core copies the same chunks in between with the C library's ``memcpy``. Each is a median over turns in
alternation. ``--files`` measures values from files instead, of float32, or of bfloat16 if their names end so.

The columns:

    part         bytes of the codes over those of the values
    encode GB/s  bytes of values
    decode GB/s  bytes of values
    copy GB/s    bytes of values
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from bench.engines.build_native import build
from bench.harness.command import check_folders, run_command
from bench.harness.errors import BenchError
from bench.harness.report import describe_machine, write_result

_SOURCE = Path(__file__).with_suffix(".cc")
_ROOT = _SOURCE.parents[1]
# As in xla_ffi/sum/reduce.h, and in xla_ffi/codec/float_code.h.
_TYPES = {"bfloat16": 2, "float32": 3}
_VECTORS = ("none", "AVX2", "AVX-512")


@dataclass(frozen=True)
class Options:
    """Codes of one core."""

    chunk_kib: int = 64
    """The size of a chunk."""
    region_mib: int = 4
    """How much memory the values take."""
    files: tuple[Path, ...] = ()
    """Files of values, in place of those that are made."""
    turns: int = 5
    """How often each is measured."""
    seconds: float = 0.05
    """How long one measurement takes."""
    json: Path | None = None
    """A file for the results."""


@dataclass(frozen=True)
class Row:
    """Medians over turns, in bytes of values a second."""

    values: str
    type: str
    vectors: str
    part: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float
    copy_bytes_per_s: float


class _Rates(ctypes.Structure):
    _fields_ = [(name, ctypes.c_double) for name in ("encode", "decode", "copy", "part")]


def _rounded(values: np.ndarray) -> np.ndarray:
    """To bfloat16, as the upper halves of float32."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def make_values(bytes_: int) -> dict[tuple[str, str], np.ndarray]:
    """By name and type, values of so many bytes."""
    random = np.random.default_rng(0)
    count = bytes_ // 4

    def gradients() -> np.ndarray:
        scales = np.exp(random.normal(-7, 1, (count // 128, 1)))
        return (random.standard_normal((count // 128, 128)) * scales).astype(np.float32).ravel()

    def halves() -> np.ndarray:
        return _rounded(np.concatenate([gradients(), gradients()])).view(np.uint16)[1::2].copy()

    totals = _rounded(gradients())
    for _ in range(7):
        totals += _rounded(gradients())
    return {
        ("gradients", "float32"): gradients(),
        ("gradients of bfloat16", "float32"): _rounded(gradients()),
        ("totals of these over 8", "float32"): totals,
        ("random bits", "float32"): random.integers(0, 2**32, count, dtype=np.uint32),
        ("gradients", "bfloat16"): halves(),
        ("random bits", "bfloat16"): random.integers(0, 2**16, 2 * count, dtype=np.uint16),
    }


def read_values(files: Sequence[Path], chunk_bytes: int) -> dict[tuple[str, str], np.ndarray]:
    """Whole chunks of each file."""
    values = {}
    for file in files:
        content = np.fromfile(file, np.uint8)
        if len(content) < chunk_bytes:
            raise BenchError(f"{file} has {len(content)} bytes; it must have at least a chunk of {chunk_bytes}")
        dtype = "bfloat16" if file.name.endswith("bfloat16") else "float32"
        values[file.name, dtype] = content[: len(content) // chunk_bytes * chunk_bytes]
    return values


def load_library(folder: Path) -> ctypes.CDLL:
    """The native half, compiled to a folder."""
    more = ["-O3", f"-I{_ROOT}", str(_ROOT / "xla_ffi/codec/float_code.cc")]
    library = ctypes.CDLL(str(build(_SOURCE, folder, more=more)))
    library.measure.restype = _Rates
    return library


def _measure(
    library: ctypes.CDLL, dtype: str, vectors: int, values: np.ndarray, chunk_bytes: int, seconds: float
) -> _Rates:
    arguments = (
        ctypes.c_uint8(_TYPES[dtype]),
        ctypes.c_int(vectors),
        ctypes.c_void_p(values.ctypes.data),
        ctypes.c_size_t(values.nbytes),
        ctypes.c_size_t(chunk_bytes),
        ctypes.c_double(seconds),
    )
    rates: _Rates = library.measure(*arguments)
    return rates


def coded_part(library: ctypes.CDLL, dtype: str, values: np.ndarray, chunk_bytes: int) -> float:
    """The bytes of the codes of whole chunks over those of the chunks."""
    return float(_measure(library, dtype, 0, values, chunk_bytes, 0).part)


def measure(options: Options, library: ctypes.CDLL) -> list[Row]:
    """Every kind of values and every vector unit, on one core."""
    chunk_bytes = options.chunk_kib << 10
    made = read_values(options.files, chunk_bytes) if options.files else make_values(options.region_mib << 20)
    rows = []
    for (name, dtype), values in made.items():
        for number, vectors in enumerate(_VECTORS):
            turns = [
                _measure(library, dtype, number, values, chunk_bytes, options.seconds) for _ in range(options.turns)
            ]
            if turns[0].part == 0:
                continue
            rates = (
                statistics.median(getattr(turn, field) for turn in turns) for field in ("encode", "decode", "copy")
            )
            rows.append(Row(name, dtype, vectors, turns[0].part, *rates))
    return rows


def show(rows: Sequence[Row], console: Console) -> None:
    """A table of the rows."""
    table = Table("values", "type", "vectors", "part", "encode GB/s", "decode GB/s", "copy GB/s")
    for row in rows:
        rates = (row.encode_bytes_per_s, row.decode_bytes_per_s, row.copy_bytes_per_s)
        shown = (f"{rate / 1e9:.1f}" if rate > 0 else "-" for rate in rates)
        table.add_row(row.values, row.type, row.vectors, f"{row.part:.3f}", *shown)
    console.print(table)


def run(options: Options) -> int:
    """Measure on one of the cores that this process may use, and show the table."""
    if options.chunk_kib < 1 or options.region_mib << 10 < options.chunk_kib or options.turns < 1:
        raise BenchError("a chunk must have at least 1 KiB and fit in a region, and there must be a turn")
    check_folders(options.json)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options, load_library(Path(folder)))
    show(rows, Console())
    if options.json is not None:
        content = {
            "machine": describe_machine(),
            "options": asdict(options) | {"json": None, "files": [file.name for file in options.files]},
            "rows": [asdict(row) for row in rows],
        }
        write_result(options.json, content)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and run."""
    return run_command(lambda: run(tyro.cli(Options, args=arguments, description=__doc__)))


if __name__ == "__main__":
    sys.exit(main())
