"""What a run ends with: measurements of the train steps, a table for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from rich.table import Table

import jaxhetero


class StepMeter:
    """Adds up what the train steps alone took: no compilation, no evaluation."""

    def __init__(self) -> None:
        self.step_count = 0
        self.seconds = 0.0
        self.all_reduce_ms = 0.0
        self.sent_bytes = 0

    @contextmanager
    def measure(self, step_count: int) -> Iterator[None]:
        """Around ``step_count`` steps; the last one must have ended inside the block."""
        before, start = jaxhetero.metrics(), time.monotonic()
        yield
        after, end = jaxhetero.metrics(), time.monotonic()
        self.step_count += step_count
        self.seconds += end - start
        self.all_reduce_ms += (after.busy_us - before.busy_us) / 1e3
        self.sent_bytes += after.sent_bytes - before.sent_bytes


@dataclass(frozen=True)
class Result:
    """The outcome of a run, the same on every rank except for the times of rank 0."""

    worker_count: int
    parameter_count: int
    gradient_bytes: int
    step_count: int
    test_correct_count: int
    test_image_count: int
    train_seconds: float
    images_per_second: float
    """Of all workers together, in the train steps alone."""
    all_reduce_ms_per_step: float | None
    """Mean over the workers of the time in which a round was in flight, the wait for slower workers included.
    None with one worker, here and below."""
    sent_bytes_per_step: float | None
    """Mean over the workers of what the transport put on the wire."""
    differing_worker_count: int
    """Workers whose final parameters are not bit for bit those of rank 0."""
    losses: list[float]
    """One per step: the mean over the global batch."""
    accuracies: list[float]
    """One per evaluation."""

    @classmethod
    def collect(cls, meter: StepMeter, *, global_batch: int, **fields: Any) -> Result:
        """Put the workers' measurements together; call it on every worker. ``fields`` are the other fields."""
        worker_count = jaxhetero.size()
        all_reduce_ms, sent_bytes = jaxhetero.pmean(
            (jnp.float32(meter.all_reduce_ms / meter.step_count), jnp.float32(meter.sent_bytes / meter.step_count))
        )
        return cls(
            worker_count=worker_count,
            step_count=meter.step_count,
            train_seconds=meter.seconds,
            images_per_second=meter.step_count * global_batch / meter.seconds,
            all_reduce_ms_per_step=float(all_reduce_ms) if worker_count > 1 else None,
            sent_bytes_per_step=float(sent_bytes) if worker_count > 1 else None,
            **fields,
        )

    @property
    def test_accuracy(self) -> float:
        return self.test_correct_count / self.test_image_count

    @property
    def sent_bytes_ratio(self) -> float | None:
        """Bytes sent per worker and step, by the bytes of the gradient."""
        return None if self.sent_bytes_per_step is None else self.sent_bytes_per_step / self.gradient_bytes

    def to_table(self) -> Table:
        """For the terminal."""
        table = Table(title=f"ResNet on {self.worker_count} worker{'s' if self.worker_count > 1 else ''}")
        table.add_column("measure")
        table.add_column("value", justify="right")
        table.add_row(
            "test accuracy", f"{self.test_accuracy:.2%} ({self.test_correct_count} of {self.test_image_count})"
        )
        table.add_row("training speed", f"{self.images_per_second:.0f} images/s")
        table.add_row("train steps", f"{self.step_count} in {self.train_seconds:.1f} s")
        table.add_row("all-reduce time per step, waits included", _or_na(self.all_reduce_ms_per_step, "{:.2f} ms"))
        table.add_row("gradient", f"{self.gradient_bytes:,} bytes")
        table.add_row("sent per worker per step (measured)", _or_na(self.sent_bytes_per_step, "{:,.0f} bytes"))
        table.add_row("sent / gradient bytes", _or_na(self.sent_bytes_ratio, "{:.3f}x"))
        table.add_row("final weights", self._weights_text())
        return table

    def _weights_text(self) -> str:
        if self.worker_count == 1:
            return "n/a"
        if self.differing_worker_count:
            return f"DIFFERENT on {self.differing_worker_count} of {self.worker_count} workers"
        return f"identical on {self.worker_count} workers"

    def write_json(self, path: Path, **more: Any) -> None:
        """All fields, the derived values, and ``more``, for programs."""
        content = {
            **more,
            **dataclasses.asdict(self),
            "test_accuracy": self.test_accuracy,
            "sent_bytes_ratio": self.sent_bytes_ratio,
        }
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _or_na(value: float | None, template: str) -> str:
    return "n/a" if value is None else template.format(value)
