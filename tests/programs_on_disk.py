"""XLA's programs on disk: the processes of later tests find what those of earlier ones have compiled.

Every process still traces and lowers for itself; what has the same key for JAX is not compiled again.
What runs in pytest's own process has its JAX already, and compiles.
"""

from __future__ import annotations

import os
import tempfile

import pytest

# A process that is killed as it writes leaves half a program; JAX says so, and compiles.
_HALF = "Error reading persistent compilation cache entry"
# Every other warning of a test's process is an error.
WARNINGS_ARE_ERRORS = f"error,ignore:{_HALF}"


def share_programs(config: pytest.Config) -> None:
    """Among all processes that pytest starts, until it ends; or in a folder that is named already, and kept."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="jaxhetero-programs-")
        config.add_cleanup(folder.cleanup)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder.name
    # With any limit JAX locks the folder: nobody reads what another has half written.
    os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(1 << 30))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
