"""XLA's programs on disk: the processes of later tests find what those of earlier ones have compiled.

Every process still traces and lowers for itself; what has the same key for JAX is not compiled again.
What runs in pytest's own process has its JAX already, and compiles.
"""

from __future__ import annotations

import os
import tempfile

import pytest

# A process that is killed as it writes leaves half a program; JAX says so, and compiles. Other warnings are errors.
WARNINGS_ARE_ERRORS = ",".join(
    ["error", *(f"ignore:Error {what} persistent compilation cache entry" for what in ("reading", "writing"))]
)


def share_programs(config: pytest.Config) -> None:
    """Among all processes that pytest starts, until it ends; or in the folder TESTS_PROGRAMS, which stays."""
    folder = os.environ.get("TESTS_PROGRAMS")
    if folder is None:
        temporary = tempfile.TemporaryDirectory(prefix="jaxhetero-programs-")
        config.add_cleanup(temporary.cleanup)
        folder = os.environ["TESTS_PROGRAMS"] = temporary.name  # the processes of pytest-xdist find it there
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(1 << 30),  # with any limit JAX locks the folder
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
