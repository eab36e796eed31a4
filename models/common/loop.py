"""The loop over steps. It keeps the device busy, checks the loss, and on Ctrl-C ends after the same step everywhere."""

from __future__ import annotations

import math
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

import jaxhetero
from models.common.errors import LossError
from models.common.progress import TrainProgress
from models.common.report import StepMeter

# How many steps are queued behind the running one. Enough steps keep the device busy while Python makes the next batch.
# Few steps keep the displayed progress close to the real progress.
STEPS_AHEAD = 2


class Interruption:
    """A context manager in which the first Ctrl-C or SIGTERM sets ``is_asked`` and the second one raises.

    Only the main thread can handle signals. In another one, such as Ray Train's, nothing changes.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True


class TensorboardLog:
    """Writes scalars and pictures to a folder for TensorBoard. Without a folder it writes nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._writer: Any = None
        if folder:
            from tensorboardX import SummaryWriter  # only rank 0 needs it

            self._writer = SummaryWriter(str(folder))

    def scalars(self, step: int, **values: float) -> None:
        """Add one point to each curve."""
        if self._writer:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def picture(self, step: int, pixels: NDArray[np.uint8]) -> None:
        """Add a picture: ``[height, width, 3]``."""
        if self._writer:
            self._writer.add_image("picture", pixels, step, dataformats="HWC")

    def close(self) -> None:
        """Write the buffered points and close the file."""
        if self._writer:
            self._writer.close()


@jax.jit
def _over_workers(losses: list[jax.Array], is_asked: jax.Array) -> jax.Array:
    """float32[2]: the mean loss, and the share of workers that were asked to stop."""
    mine = jnp.stack([jnp.mean(jnp.stack(losses)).astype(jnp.float32), is_asked])
    return jaxhetero.pmean(mine)


Step: TypeAlias = Callable[[Any, Iterable[tuple[Any, ...]], bool], tuple[Any, jax.Array]]
"""``(state, pieces, is_asked) -> (state, report)``: one step over this worker's pieces, their batches. ``is_asked``:
whether this worker was asked to stop. The report is float32[2], the same on all workers: the mean loss, and more than 0
if a worker was asked."""


def step_of_pieces(train_step: Callable[..., tuple[Any, jax.Array]]) -> Step:
    """A step made of ``(state, *batch) -> (state, loss)`` for each piece."""

    def step(state: Any, pieces: Iterable[tuple[Any, ...]], is_asked: bool) -> tuple[Any, jax.Array]:
        losses = []
        for batch in pieces:
            state, loss = train_step(state, *batch)
            losses.append(loss)
        return state, _over_workers(losses, np.float32(is_asked))

    return step


@dataclass
class Loop:
    """Runs steps, and keeps the state and the losses."""

    train_step: Step
    state: Any
    learning_rate: Callable[[Any], Any]
    interruption: Interruption
    progress: TrainProgress
    log: TensorboardLog
    advice: str
    """Which setting to change if the loss is not finite; the error message ends with it."""
    step: int = 0
    """Steps whose loss is known, counted from the start of the training."""
    losses: list[float] = field(default_factory=list)
    """One per step since step 0."""
    meter: StepMeter = field(default_factory=StepMeter)
    is_stopped: bool = False
    """A worker was asked to stop. All workers have stopped after the same step."""

    def run(self, batches: Iterator[tuple[Any, ...]], step_count: int, pieces: int) -> None:
        """Run at most ``step_count`` more steps. Afterwards ``state`` is the state after step ``step``.

        Raises:
          LossError: on every worker, after the same step, if the mean loss over the workers is not finite.
        """
        in_flight: deque[jax.Array] = deque()
        with self.meter.measure():
            for _ in range(step_count):
                mine = islice(batches, pieces)
                self.state, report = self.train_step(self.state, mine, self.interruption.is_asked)
                in_flight.append(report)
                if len(in_flight) > STEPS_AHEAD:
                    self._finish(in_flight.popleft())
                if self.is_stopped:
                    break
            while in_flight:
                self._finish(in_flight.popleft())
            jax.block_until_ready(self.state)

    def _finish(self, loss_and_stop: jax.Array) -> None:
        loss, share_asked = np.asarray(loss_and_stop).tolist()
        if not math.isfinite(loss):
            raise LossError(f"the loss is {loss} at step {self.step + 1}; {self.advice}")
        rate = float(self.learning_rate(self.step))
        self.step += 1
        self.meter.step_count += 1
        self.losses.append(loss)
        self.is_stopped |= share_asked > 0
        self.log.scalars(self.step, loss=loss, learning_rate=rate)
        self.progress.update(loss, rate, self._all_reduce_ms())

    def _all_reduce_ms(self) -> float | None:
        """The mean over this run's steps; None with one worker."""
        if jaxhetero.size() == 1:
            return None
        return jaxhetero.metrics().busy_us / 1e3 / self.meter.step_count
