"""``python -m models.common.compare RESULT RESULT ...``: compares the loss curves of several runs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from models.common.command import run_command
from models.common.errors import DataError


def compare(paths: list[Path]) -> float:
    """The largest relative difference from the first run's losses. Prints one line for each other run."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    first = np.array(runs[0]["losses"])
    largest = 0.0
    for path, run in zip(paths[1:], runs[1:], strict=True):
        losses = np.array(run["losses"])
        if losses.shape != first.shape:
            raise DataError(f"{path} has {len(losses)} losses and {paths[0]} {len(first)}; they are of other runs")
        differences = np.abs(losses - first) / first
        largest = max(largest, float(differences.max()))
        print(
            f"{run['worker_count']} workers against {runs[0]['worker_count']}: {len(first)} losses from {first[0]:.4f} "
            f"to {first[-1]:.4f}, relative difference at most {differences.max():.2e}, at the last step "
            f"{differences[-1]:.2e}"
        )
    return largest


def run(arguments: list[str]) -> int:
    """Compare. Returns the exit code: 1 if the largest relative difference is more than --tolerance."""
    parser = argparse.ArgumentParser(prog="python -m models.common.compare", description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT", help="a file that --json wrote")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="the largest relative difference allowed")
    options = parser.parse_args(arguments)
    return int(compare(options.results) > options.tolerance)


if __name__ == "__main__":
    sys.exit(run_command(run))
