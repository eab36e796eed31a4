"""Progress on rank 0: a live bar in a terminal, a text line every two seconds in a log file or pipe."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

LIVE_INTERVAL_S = 0.2
LINE_INTERVAL_S = 2.0
LINE_BAR_WIDTH = 20
LIVE_BAR_WIDTH = 20
# Of a terminal's columns: the word step, the time that is left, and a space between the parts.
_LIVE_COLUMNS = LIVE_BAR_WIDTH + len("step") + len("0:00:00") + 5


class TrainProgress:
    """Shows step, loss, learning rate, speed, and time in all-reduce. Silent while not ``is_visible``."""

    def __init__(self, console: Console, *, unit: str, step_count: int, global_batch: int, is_visible: bool) -> None:
        self._console = console
        self._unit = unit
        self._step_count = step_count
        self._global_batch = global_batch
        self.is_visible = is_visible
        self._interval_s = LIVE_INTERVAL_S if console.is_terminal else LINE_INTERVAL_S
        self._done = self._part_begin = 0
        self._label = ""
        self._drawn_at = self._part_start = time.monotonic()
        self._live: Progress | None = None
        if is_visible and console.is_terminal:
            self._live = Progress(
                TextColumn("{task.fields[label]}"),
                BarColumn(LIVE_BAR_WIDTH),
                TextColumn("step"),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._live.add_task("train", total=step_count, label="", figures="")

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def begin(self, step: int) -> None:
        """Go on after this step."""
        self._done = self._part_begin = step

    def start_part(self, label: str) -> None:
        """Begin a part of the run, such as an epoch. The speed shown is that of this part, so it omits evaluations."""
        self._label, self._part_begin, self._part_start = label, self._done, time.monotonic()

    def update(self, loss: float, learning_rate: float, all_reduce_ms: float | None) -> None:
        """Call it after every step with the step's figures. It draws once per interval.

        ``all_reduce_ms`` is None with one worker.
        """
        self._done += 1
        now = time.monotonic()
        is_due = now - self._drawn_at >= self._interval_s or self._done == self._step_count
        if not self.is_visible or not is_due:
            return
        self._drawn_at = now
        steps_per_second = (self._done - self._part_begin) / max(now - self._part_start, 1e-9)
        figures = {
            "loss": f"loss {loss:.3f}",
            "rate": f"lr {learning_rate:.3g}",
            "steps": f"{steps_per_second:.2f} steps/s",
            "examples": f"{steps_per_second * self._global_batch:.0f} {self._unit}/s",
        }
        if all_reduce_ms is not None:
            figures["all-reduce"] = f"all-reduce {all_reduce_ms:.1f} ms/step"
        self._draw(figures)

    def _draw(self, figures: dict[str, str]) -> None:
        if self._live:
            room = self._console.width - _LIVE_COLUMNS - len(self._label) - 2 * len(str(self._step_count)) - 1
            for name in ("rate", "examples", "all-reduce", "steps"):  # what a narrow terminal can do without
                if len(" ".join(figures.values())) > room:
                    figures.pop(name, None)
            self._live.update(self._task, completed=self._done, label=self._label, figures=" ".join(figures.values()))
            return
        bar = _line_bar(self._done, self._step_count)
        label = f"{self._label} " if self._label else ""
        self.print(f"{label}{bar} step {self._done}/{self._step_count} {' '.join(figures.values())}")

    def print(self, line: str) -> None:
        """One line of text, above the bar if there is one."""
        if self.is_visible:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class CopyProgress:
    """Shows how much of the data is staged, over all hosts. Silent when not ``visible``."""

    def __init__(self, console: Console, *, visible: bool) -> None:
        self._console = console
        self._visible = visible
        self._start = self._drawn_at = time.monotonic()
        self._copied_bytes = self._host_count = 0
        self._live: Progress | None = None
        if visible and console.is_terminal:
            columns = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._live = Progress(TextColumn("staging"), BarColumn(), *columns, console=console, transient=True)
            self._task = self._live.add_task("stage", total=None)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
        if self._visible and kind is None and self._host_count:
            self._print(f"staged {self._figures(self._copied_bytes)} in {time.monotonic() - self._start:.1f} s")

    def update(self, copied_bytes: float, total_bytes: float, host_count: int) -> None:
        """Call it often, with sums over the hosts that copy. It draws once per interval."""
        self._copied_bytes, self._host_count = round(copied_bytes), host_count
        now = time.monotonic()
        if self._live:
            self._live.update(self._task, completed=copied_bytes, total=total_bytes or None)
        elif self._visible and total_bytes and now - self._drawn_at >= LINE_INTERVAL_S:
            self._drawn_at = now
            bar = _line_bar(copied_bytes, total_bytes)
            self._print(f"staging {bar} {decimal(self._copied_bytes)} of {self._figures(round(total_bytes))}")

    def _figures(self, size_bytes: int) -> str:
        speed = decimal(round(self._copied_bytes / max(time.monotonic() - self._start, 1e-9)))
        hosts = f" on {self._host_count} hosts" if self._host_count > 1 else ""
        return f"{decimal(size_bytes)}{hosts} at {speed}/s"

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _line_bar(done: float, total: float) -> str:
    filled = int(LINE_BAR_WIDTH * done // total)
    return f"[{'#' * filled}{'-' * (LINE_BAR_WIDTH - filled)}]"
