"""The result of a run: measurements of the train steps, as a table, as JSON and as a plot."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from rich.table import Table

import jaxhetero
from models.common.first import from_first, is_first


class StepMeter:
    """Adds up the time and the traffic of the train steps, without compilation and evaluation."""

    def __init__(self) -> None:
        self.step_count = 0
        self.seconds = 0.0
        self.all_reduce_ms = 0.0
        self.sent_bytes = 0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure a block of steps. The block adds to ``step_count``, and waits until its last step has ended."""
        before, start = jaxhetero.metrics(), time.monotonic()
        yield
        after, end = jaxhetero.metrics(), time.monotonic()
        self.seconds += end - start
        self.all_reduce_ms += (after.busy_us - before.busy_us) / 1e3
        self.sent_bytes += after.sent_bytes - before.sent_bytes


@dataclass(frozen=True)
class Result:
    """The outcome of a run, the same on every worker except for the times."""

    worker_count: int
    parameter_count: int
    gradient_bytes: int
    first_step: int
    """0, or the step of the checkpoint from which the run was resumed."""
    step_count: int
    """Steps of this run; fewer than the settings ask for if the run was interrupted."""
    is_complete: bool
    train_seconds: float
    examples_per_second: float
    """Of all workers together, in the time of the train steps."""
    all_reduce_ms_per_step: float | None
    """Mean over the workers of the time in which a round was in flight. It includes waiting for slower workers. None
    with one worker."""
    sent_bytes_per_step: float | None
    """Mean over the workers of the bytes that the transport sent. None with one worker."""
    differing_worker_count: int
    """Workers whose final parameters are not bit for bit those of the first."""
    losses: list[float]
    """The mean over the global batch for each step since step 0, also for the steps before a resumption."""
    evaluations: list[dict[str, float]]
    """One entry per evaluation: the step after which it ran, and its scores."""
    weights_digest: str = ""
    """On the first worker, the beginning of the SHA-256 of the final parameters' bits, in hexadecimal: equal weights
    have the same one."""

    @classmethod
    def collect(cls, meter: StepMeter, *, global_batch: int, params: Any, **fields: Any) -> Result:
        """Combine the workers' measurements. Call it on every worker. ``fields`` are the fields not measured here."""
        worker_count = jaxhetero.size()
        steps, seconds = max(meter.step_count, 1), max(meter.seconds, 1e-9)
        all_reduce_ms, sent_bytes = jaxhetero.pmean(
            (jnp.float32(meter.all_reduce_ms / steps), jnp.float32(meter.sent_bytes / steps))
        )
        return cls(
            worker_count=worker_count,
            parameter_count=parameter_count(params),
            gradient_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
            step_count=meter.step_count,
            train_seconds=meter.seconds,
            examples_per_second=meter.step_count * global_batch / seconds,
            all_reduce_ms_per_step=float(all_reduce_ms) if worker_count > 1 else None,
            sent_bytes_per_step=float(sent_bytes) if worker_count > 1 else None,
            differing_worker_count=int(count_differing_workers(params)),
            weights_digest=digest_of(params) if is_first() else "",
            **fields,
        )

    @property
    def sent_bytes_ratio(self) -> float | None:
        """Bytes sent per worker and step, divided by the bytes of the gradient."""
        return None if self.sent_bytes_per_step is None else self.sent_bytes_per_step / self.gradient_bytes

    @property
    def scores(self) -> dict[str, float]:
        """The scores of the last evaluation."""
        return self.evaluations[-1] if self.evaluations else {}

    def to_table(self, title: str, unit: str) -> Table:
        """The table for the terminal. ``unit`` is the plural noun for examples, such as images."""
        table = Table(title=f"{title} on {self.worker_count} worker{'s' if self.worker_count > 1 else ''}")
        table.add_column("measure")
        table.add_column("value", justify="right")
        for name, value in self.scores.items():
            table.add_row(name.replace("_", " "), show_score(name, value))
        has_steps = self.step_count > 0  # of a run that is resumed after its last step there is nothing to say
        speed, all_reduce_ms, sent_bytes, ratio = (
            value if has_steps else None
            for value in (
                self.examples_per_second,
                self.all_reduce_ms_per_step,
                self.sent_bytes_per_step,
                self.sent_bytes_ratio,
            )
        )
        table.add_row("training speed", _or_na(speed, f"{{:.0f}} {unit}/s"))
        table.add_row("train steps", f"{self.step_count} in {self.train_seconds:.1f} s")
        table.add_row("all-reduce time per step, waits included", _or_na(all_reduce_ms, "{:.2f} ms"))
        table.add_row("gradient", f"{self.gradient_bytes:,} bytes")
        table.add_row("sent per worker per step (measured)", _or_na(sent_bytes, "{:,.0f} bytes"))
        table.add_row("sent / gradient bytes", _or_na(ratio, "{:.3f}x"))
        table.add_row("final weights", self._weights_text())
        table.add_row("their SHA-256 begins with", self.weights_digest)
        return table

    def _weights_text(self) -> str:
        if self.worker_count == 1:
            return "n/a"
        if self.differing_worker_count:
            return f"DIFFERENT on {self.differing_worker_count} of {self.worker_count} workers"
        return f"identical on {self.worker_count} workers"

    def write_json(self, path: Path, **more: Any) -> None:
        """Write all fields, the derived values and ``more``."""
        content = {**more, **dataclasses.asdict(self), "sent_bytes_ratio": self.sent_bytes_ratio}
        write_whole(path, json.dumps(content, indent=2) + "\n")


def show_score(name: str, value: float) -> str:
    """A score as text: accuracies in per cent, counts as whole numbers, the rest with four digits."""
    if name.endswith("accuracy"):
        return f"{value:.2%}"
    return f"{value:,.0f}" if name.endswith("count") or name == "step" else f"{value:.4g}"


def show_scores(scores: dict[str, float]) -> str:
    """All scores in one line of text."""
    return ", ".join(f"{name.replace('_', ' ')} {show_score(name, value)}" for name, value in scores.items())


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically: a reader sees the old content or the new content."""
    unfinished = path.with_name(f".{path.name}.part")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def plot_losses(path: Path, losses: Sequence[float], title: str) -> None:
    """Draw the loss of every step as a PNG."""
    from matplotlib.figure import Figure  # slow to import, and only one worker plots

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, linewidth=1)
    axes.set(title=title, xlabel="step", ylabel="loss, mean over the global batch")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def save_picture(path: Path, pixels: NDArray[np.uint8]) -> None:
    """Write a picture ``[height, width, 3]`` as a PNG."""
    from PIL import Image  # most trainers have no pictures

    Image.fromarray(pixels).save(path)


def parameter_count(params: Any) -> int:
    """The number of elements of all parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def digest_of(params: Any) -> str:
    """See ``Result.weights_digest``."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()[:12]


@jax.jit
def count_differing_workers(params: Any) -> jax.Array:
    """int32[]: how many workers have other bits than the first.

    The bits are compared as integers, so -0.0 differs from 0.0, and NaN equals itself.
    """
    bits = jax.tree.map(lambda leaf: jax.lax.bitcast_convert_type(leaf, jnp.uint32), params)
    equal = jax.tree.map(jnp.array_equal, bits, from_first(bits))
    differs = ~jnp.all(jnp.stack(jax.tree.leaves(equal)))
    return jaxhetero.psum(differs.astype(jnp.int32))


def _or_na(value: float | None, template: str) -> str:
    return "n/a" if value is None else template.format(value)
