"""Compiles the C++ files of the benchmarks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path


def compiler() -> str:
    return os.environ.get("CXX", "g++")


def build(source: Path, folder: Path, include: str | None = None, more: Sequence[str] = ()) -> Path:
    """Compile ``source`` to a shared library in ``folder``, once.

    Args:
      source: the C++ file.
      folder: where to put the library.
      include: a folder of system headers.
      more: arguments of the compiler that come last: other sources, and flags.
    """
    library = folder / f"lib{source.stem}.so"
    if not library.exists():
        flags = ["-std=c++20", "-O2", "-shared", "-fPIC", "-pthread", *(["-isystem", include] if include else [])]
        subprocess.run([compiler(), *flags, str(source), "-o", str(library), *more], check=True)
    return library
