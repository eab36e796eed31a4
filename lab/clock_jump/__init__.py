"""A library to preload: the clock of the wall jumps ahead by an hour for one process, and for nobody else."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).parent / "clock_jump.cc"


def build(folder: Path) -> Path:
    """Compile it into ``folder``. The compiler is ``$CXX``, or g++."""
    library = folder / "libclock_jump.so"
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC"]
    subprocess.run([os.environ.get("CXX", "g++"), *flags, str(_SOURCE), "-o", str(library)], check=True)
    return library


def environment(library: Path, file: Path) -> dict[str, str]:
    """What a process needs whose clock is to jump when ``file`` appears."""
    return {"LD_PRELOAD": str(library), "CLOCK_JUMP_FILE": str(file)}
