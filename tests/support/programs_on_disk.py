"""How tests compile: with few passes, and the processes of later tests find on disk what earlier ones have compiled.

Every process still traces and lowers for itself; what has the same key for JAX is not compiled again.
What runs in pytest's own process has its JAX already, and compiles.
"""

from __future__ import annotations

import os
import tempfile
from importlib.metadata import version

import pytest

# XLA_FLAGS for small programs that run a few times.
FEW_PASSES = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1"
)
# XLA's newer emitter of fusions makes an MLIR context, with all its dialects, for each program; without it a test of
# meshes takes 17 CPU seconds in place of 25. JAX 0.12 has no other emitter, and XLA aborts at a flag that it does not
# know.
_OLDER_EMITTER = " --xla_cpu_use_fusion_emitters=false"
FAST_COMPILATION = FEW_PASSES + (_OLDER_EMITTER if version("jaxlib").startswith("0.10.") else "")

# A process that is killed as it writes leaves half a program; JAX says so, and compiles. Other warnings are errors.
WARNINGS_ARE_ERRORS = ",".join(
    ["error", *(f"ignore:Error {what} persistent compilation cache entry" for what in ("reading", "writing"))]
)


def compile_fast() -> None:
    """In all processes of the tests, unless XLA_FLAGS is set, be it to nothing."""
    os.environ.setdefault("XLA_FLAGS", FAST_COMPILATION)


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
