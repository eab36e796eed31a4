"""Gathers what `python -m bench.gpu` needs on a machine without a network that has JAX for CUDA and NumPy.

    python -m bench.gpu.pack FOLDER --python-version 3.12

FOLDER gets the wheel of jaxhetero, the wheels of what the benchmark and its tests import, and the sources. There:

    pip install --no-index --no-deps FOLDER/*.whl
    tar -xzf FOLDER/sources.tar.gz && python -m bench.gpu --parts sums,kernels
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bench.harness.command import run_command
from bench.harness.errors import BenchError

ROOT = Path(__file__).resolve().parents[2]
# What the benchmark and its tests import, apart from JAX and what JAX needs, which the machine has.
PACKAGES = (
    *("click", "flax", "optax", "prometheus-client", "psutil", "rich", "tyro"),
    *("filelock", "hypothesis", "pytest", "pytest-timeout", "pytest-xdist"),
)
_THERE = ("jax", "jaxlib", "ml_dtypes", "numpy", "opt_einsum", "scipy")
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


@dataclass(frozen=True)
class Options:
    """Gathers the benchmark and what it needs in a folder."""

    folder: Annotated[Path, tyro.conf.Positional]
    """Where to put it. It is made if necessary."""
    python_version: str = "3.12"
    """The machine's version of Python, 3.12 or later."""

    def __post_init__(self) -> None:
        if sys.version_info < (3, 12):
            raise BenchError("run this with Python 3.12 or later, whose wheel of jaxhetero serves all later versions")


def run(options: Options) -> int:
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = str(options.folder.resolve())
    pip = [sys.executable, "-m", "pip"]
    platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
    download = ["download", "--only-binary=:all:", "--python-version", options.python_version, *platforms]
    _call([*pip, "wheel", "--no-deps", "--wheel-dir", folder, str(ROOT)])
    _call([*pip, *download, "--dest", folder, *PACKAGES])
    for name in _THERE:
        for wheel in options.folder.glob(f"{name}-*.whl"):
            wheel.unlink()
    _call(["git", "-C", str(ROOT), "archive", "--output", f"{folder}/sources.tar.gz", "HEAD"])
    return 0


def _call(command: list[str]) -> None:
    if code := subprocess.run(command).returncode:
        raise BenchError(f"{' '.join(command[:4])} ... ended with code {code}; its output is above")


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(
        lambda: run(tyro.cli(Options, prog="python -m bench.gpu.pack", args=arguments, description=__doc__))
    )


if __name__ == "__main__":
    sys.exit(main())
