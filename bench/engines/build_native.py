"""Compiles the C++ files of the benchmarks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def compiler() -> str:
    return os.environ.get("CXX", "g++")


def build(source: Path, folder: Path, include: str | None = None) -> Path:
    """Compile ``source`` to a shared library in ``folder``, once. ``include`` is a folder of system headers."""
    library = folder / f"lib{source.stem}.so"
    if not library.exists():
        flags = ["-std=c++20", "-O2", "-shared", "-fPIC", "-pthread", *(["-isystem", include] if include else [])]
        subprocess.run([compiler(), *flags, str(source), "-o", str(library)], check=True)
    return library
