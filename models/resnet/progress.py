"""Progress on rank 0: a live bar in a terminal, a text line every two seconds in a log file or pipe."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LIVE_INTERVAL_S = 0.2
LINE_INTERVAL_S = 2.0
LINE_BAR_WIDTH = 20


class TrainProgress:
    """Shows epoch, step, loss and rate. Silent when not ``visible``, that is on every rank but 0."""

    def __init__(
        self, console: Console, *, epochs: int, steps_per_epoch: int, global_batch: int, visible: bool
    ) -> None:
        self._console = console
        self._epochs = epochs
        self._steps_per_epoch = steps_per_epoch
        self._step_count = epochs * steps_per_epoch
        self._global_batch = global_batch
        self._visible = visible
        self._interval_s = LIVE_INTERVAL_S if console.is_terminal else LINE_INTERVAL_S
        self._steps_done = 0
        self._epoch = 0
        self._drawn_at = self._epoch_start = time.monotonic()
        self._live: Progress | None = None
        if visible and console.is_terminal:
            self._live = Progress(
                TextColumn("epoch {task.fields[epoch]}"),
                BarColumn(),
                TextColumn("step"),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]}  {task.fields[rate]} images/s"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._live.add_task("train", total=self._step_count, epoch=f"1/{epochs}", loss="-", rate="-")

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def start_epoch(self, epoch: int) -> None:
        """The rate shown is that of the current epoch, so it leaves out evaluations."""
        self._epoch, self._epoch_start = epoch, time.monotonic()

    def update(self, loss: jax.Array) -> None:
        """Call after every step; draws when it is time to. ``loss`` is that of this worker's part of the batch.

        It is fetched only for drawing, because fetching it waits for the step to end.
        """
        self._steps_done += 1
        is_due = time.monotonic() - self._drawn_at >= self._interval_s or self._steps_done == self._step_count
        if not self._visible or not is_due:
            return
        loss_text = f"{float(loss):.3f}"
        self._drawn_at = time.monotonic()
        steps_in_epoch = self._steps_done - self._epoch * self._steps_per_epoch
        rate = steps_in_epoch * self._global_batch / max(self._drawn_at - self._epoch_start, 1e-9)
        self._draw(f"{self._epoch + 1}/{self._epochs}", loss_text, f"{rate:.0f}")

    def _draw(self, epoch: str, loss: str, rate: str) -> None:
        if self._live:
            self._live.update(self._task, completed=self._steps_done, epoch=epoch, loss=loss, rate=rate)
            return
        filled = LINE_BAR_WIDTH * self._steps_done // self._step_count
        bar = "#" * filled + "-" * (LINE_BAR_WIDTH - filled)
        self.print(f"epoch {epoch} [{bar}] step {self._steps_done}/{self._step_count} loss {loss} {rate} images/s")

    def print(self, line: str) -> None:
        """One line of text, above the bar if there is one."""
        if self._visible:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
