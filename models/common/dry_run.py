"""``--dry-run``: the sizes of a run and the best possible time of its all-reduces, without the run itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from rich.table import Table

import jaxhetero
from models.common.batches import BatchSplit


@dataclass(frozen=True)
class DryRun:
    """The figures of a run that ``--dry-run`` prints."""

    params: Any
    """A tree of arrays or of their shapes and dtypes."""
    split: BatchSplit
    step_count: int
    reducer_count: int
    network_gbps: float
    unit: str

    def to_table(self, title: str) -> Table:
        """The table for the terminal."""
        leaves = jax.tree.leaves(self.params)
        sizes = [leaf.size * np.dtype(leaf.dtype).itemsize for leaf in leaves]
        gradient_bytes = sum(sizes)
        buckets = jaxhetero.make_buckets(leaves)
        workers = self.split.worker_count
        rate = self.network_gbps * 1e9 / 8
        seconds = jaxhetero.best_time_s(gradient_bytes, [rate] * workers, [rate] * self.reducer_count)
        table = Table(title=title)
        table.add_column("dry run")
        table.add_column("value", justify="right")
        table.add_row("parameters", f"{sum(leaf.size for leaf in leaves):,} in {len(leaves)} arrays")
        table.add_row("workers, reducers", f"{workers}, {self.reducer_count or 'one in each worker'}")
        table.add_row("steps", f"{self.step_count:,}")
        table.add_row(f"{self.unit} per step", f"{self.split.global_batch:,}")
        table.add_row(
            f"{self.unit} per worker",
            f"{self.split.accumulate_every} x {self.split.micro_batch:,}, one all-reduce after them",
        )
        table.add_row("gradient", f"{gradient_bytes:,} bytes")
        table.add_row("buckets", f"{len(buckets)}, the largest {_largest(buckets, sizes):,} bytes")
        table.add_row("bytes per worker and step", f"{gradient_bytes if workers > 1 else 0:,} each way")
        if workers == 1:
            table.caption = "for the workers and reducers of a job: jaxhetero launch ... --dry-run"
        if workers > 1:
            table.add_row(
                f"best possible all-reduce at {self.network_gbps:g} Gbit/s", f"{seconds * 1e3:.2f} ms per step"
            )
            table.add_row("in all steps", f"{seconds * self.step_count:,.1f} s")
        return table


def _largest(buckets: list[list[int]], sizes: list[int]) -> int:
    return max(sum(sizes[index] for index in bucket) for bucket in buckets)
