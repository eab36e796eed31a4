"""The engines' names on the command line, and the requirements of each engine."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from bench.engines import build_native as native
from bench.engines.pattern import itemsize
from bench.harness.errors import BenchError
from jaxhetero.config import Config

KINDS = {
    "jaxhetero": "jaxhetero.psum",
    "gloo": "jax.lax.psum over JAX's CPU collectives (gloo)",
    "mpi": "MPICH's Allreduce through mpi4py, in jax.pure_callback",
    "echo": "an all-reduce's traffic without the all-reduce: bench/engines/echo.py",
}
COLLECTIVES = ("psum", "psum_scatter", "all_gather")
# Those that have the other collectives than psum.
_OF_ROWS = ("jaxhetero", "gloo")
# MPI has no 16-bit floats.
_MPI_DTYPES = ("float32", "int32")


@dataclass(frozen=True)
class EngineSpec:
    """One of ``KINDS``.

    ``jaxhetero:32768x4`` has that chunk_bytes and window_chunks, ``jaxhetero:strands=4+failover=0`` these settings.
    ``echo:32768x4`` has at most so many bytes in flight to a reducer.
    """

    label: str
    kind: str
    chunk_bytes: int | None = None
    window_chunks: int | None = None
    wire_dtype: str | None = None
    """The wire dtype of jaxhetero; None for the dtype of the payload."""
    combined: bool = False
    """For gloo in bench.train_step: XLA may combine all all-reduces of a program into one."""
    across: bool = False
    """For jaxhetero in bench.train_step: sums go on under the next step's forward pass."""
    settings: tuple[tuple[str, str], ...] = ()
    """Fields of ``jaxhetero.config.Config``, by name, with their values as text."""

    @classmethod
    def parse(cls, text: str, wire_dtype: str | None = None) -> EngineSpec:
        kind, _, setting = text.partition(":")
        if kind not in KINDS:
            raise BenchError(f"engine is {text!r}; there are: {', '.join(KINDS)}, and jaxhetero:CHUNK_BYTESxWINDOW")
        own_wire_dtype = wire_dtype if kind == "jaxhetero" else None
        if not setting:
            return cls(text, kind, wire_dtype=own_wire_dtype)
        if text == "gloo:combined":
            return cls(text, kind, combined=True)
        if text == "jaxhetero:across":
            return cls(text, kind, wire_dtype=own_wire_dtype, across=True)
        if kind == "jaxhetero" and "=" in setting:
            return cls(text, kind, wire_dtype=own_wire_dtype, settings=_parse_settings(setting))
        match = re.fullmatch(r"(\d+)x(\d+)", setting)
        if kind not in ("jaxhetero", "echo") or match is None:
            raise BenchError(f"engine is {text!r}; only jaxhetero and echo take a setting, as in jaxhetero:32768x4")
        return cls(text, kind, int(match[1]), int(match[2]), own_wire_dtype)

    @property
    def sums(self) -> bool:
        return self.kind != "echo"

    def wire_itemsize(self, dtype: str) -> float:
        """The bytes that an element of the payload has on the wire."""
        return 0.5 if self.wire_dtype == "int4" else itemsize(self.wire_dtype or dtype)


def _parse_settings(text: str) -> tuple[tuple[str, str], ...]:
    names = {field.name for field in fields(Config)}
    settings = tuple((name, value) for name, _, value in (word.partition("=") for word in text.split("+")))
    for name, _ in settings:
        if name not in names:
            raise BenchError(f"engine jaxhetero:{text}: there is no setting {name!r}; see docs/how_to/settings.md")
    return settings


def parse_engines(text: str, dtype: str, wire_dtype: str | None = None, collective: str = "psum") -> list[EngineSpec]:
    specs = [EngineSpec.parse(word.strip(), wire_dtype) for word in text.split(",")]
    if len({spec.label for spec in specs}) < len(specs):
        raise BenchError(f"--engine {text} names an engine twice")
    for spec in specs:
        if (reason := missing(spec.kind)) is not None:
            raise BenchError(f"engine {spec.kind} cannot run here: {reason}")
        if spec.kind == "mpi" and dtype not in _MPI_DTYPES:
            raise BenchError(f"engine mpi cannot sum {dtype}, only {' and '.join(_MPI_DTYPES)}")
        if collective != "psum" and spec.kind not in _OF_ROWS:
            raise BenchError(f"engine {spec.kind} has no {collective}, only {' and '.join(_OF_ROWS)} have")
    return specs


def missing(kind: str) -> str | None:
    """The reason why an engine cannot run here; None if it can."""
    if kind == "echo" and shutil.which(native.compiler()) is None:
        return f"there is no compiler {native.compiler()}"
    if kind != "mpi":
        return None
    if importlib.util.find_spec("mpi4py") is None:
        return "there is no mpi4py: pip install 'jaxhetero[bench]'"
    return None if mpiexec().is_file() else f"there is no {mpiexec()}: pip install mpich"


def mpiexec() -> Path:
    return Path(sys.prefix) / "bin" / "mpiexec"


_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_size(text: str) -> int:
    """Bytes of ``4``, ``64KiB`` or ``16MB``."""
    match = re.fullmatch(r"(\d+)([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS or int(match[1]) < 1:
        raise BenchError(f"size is {text!r}; it must be a number of bytes, or of KiB, MiB, GiB, KB, MB or GB")
    return int(match[1]) * _UNITS[match[2]]


def format_size(size_bytes: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:g} {name}"
    return f"{size_bytes} B"
