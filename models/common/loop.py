"""The loop over steps. It keeps the device busy, checks the loss, and on Ctrl-C ends after the same step everywhere."""

from __future__ import annotations

import importlib
import math
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

import jaxhetero
from models.common.batches import Pieces
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
        # In an elastic job, SIGTERM makes this worker leave the others, as jaxhetero.elastic.gate does it.
        signals = [signal.SIGINT] if jaxhetero.elastic.is_elastic() else [signal.SIGINT, signal.SIGTERM]
        if threading.current_thread() is threading.main_thread():
            for number in signals:
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
    """Writes scalars and pictures to a folder for TensorBoard, while ``is_open``; without a folder, nothing."""

    def __init__(self, folder: Path | None) -> None:
        self.is_open = False
        self._folder = folder
        if folder and jaxhetero.elastic.is_elastic():
            # Any worker may become the first one, and the others would wait for seconds while it imports this.
            importlib.import_module("tensorboardX")

    def scalars(self, step: int, **values: float) -> None:
        """Add one point to each curve."""
        if self._folder and self.is_open:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def picture(self, step: int, pixels: NDArray[np.uint8]) -> None:
        """Add a picture: ``[height, width, 3]``."""
        if self._folder and self.is_open:
            self._writer.add_image("picture", pixels, step, dataformats="HWC")

    def close(self) -> None:
        """Write the buffered points and close the file."""
        if "_writer" in vars(self):
            self._writer.close()

    @cached_property
    def _writer(self) -> Any:
        from tensorboardX import SummaryWriter  # in a job that is not elastic, only one worker needs it

        return SummaryWriter(str(self._folder))


@jax.jit
def _over_workers(losses: list[jax.Array], is_asked: jax.Array) -> jax.Array:
    """The report of a step."""
    mine = jnp.stack([jnp.mean(jnp.stack(losses)).astype(jnp.float32), is_asked, 1])
    return jaxhetero.pmean(mine)


Step: TypeAlias = Callable[[Any, Iterable[tuple[Any, ...]], bool], tuple[Any, jax.Array]]
"""``(state, pieces, is_asked) -> (state, report)``: one step over this worker's pieces, their batches. ``is_asked``:
whether this worker was asked to stop. The report is float32[3], the same on all workers: the mean loss; more than 0 if
a worker was asked; and 0 if the step counts for nothing, since a worker was lost in it."""


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
    """Runs steps, and keeps the state, the losses and the evaluations.

    In an elastic job, workers come and go between its steps. What it keeps goes to those who come.
    """

    train_step: Step
    state: Any
    pieces: Pieces
    learning_rate: Callable[[Any], Any]
    interruption: Interruption
    progress: TrainProgress
    log: TensorboardLog
    advice: str
    """Which setting to change if the loss is not finite; the error message ends with it."""
    has_begun: bool = False
    """Whether the training has: of a worker that comes, when it has what the others have."""
    step: int = 0
    """Steps whose loss is known, counted from the start of the training."""
    losses: list[float] = field(default_factory=list)
    """One per step since step 0."""
    evaluations: list[dict[str, float]] = field(default_factory=list)
    meter: StepMeter = field(default_factory=StepMeter)
    is_stopped: bool = False
    """A worker was asked to stop. All workers have stopped after the same step."""
    team: jaxhetero.elastic.Team | None = None
    """Among whom the next step is dealt, once this worker has passed the gate in front of it."""

    def begin(self, step: int, state: Any, losses: list[float], evaluations: list[dict[str, float]]) -> None:
        """Go on from here."""
        self.has_begun, self.step, self.state = True, step, state
        self.losses, self.evaluations = list(losses), list(evaluations)
        self.progress.begin(step)

    def enter(self) -> None:
        """Pass the gate in front of the next step, if that is not done already. Call it on every worker."""
        if self.team is not None:
            return
        place = (self.has_begun, self.step, self.losses, self.evaluations)
        state, place, self.team = jaxhetero.elastic.gate(self.state, place)
        if place[1] != self.step or place[0] != self.has_begun:
            self.begin(place[1], state, *place[2:])
        self.progress.is_visible = self.log.is_open = self.team.is_first

    def run(self, end: int) -> None:
        """Run the steps up to ``end``, if nobody is asked to stop. Afterwards ``state`` is that after step ``step``.

        Raises:
          LossError: on every worker, after the same step, if the mean loss over the workers is not finite.
        """
        # Where workers may be lost, what comes of a step decides what the next one is.
        steps_ahead = 0 if jaxhetero.elastic.is_elastic() else STEPS_AHEAD
        in_flight: deque[jax.Array] = deque()
        with self.meter.measure():
            while self.step + len(in_flight) < end and not self.is_stopped:
                self.enter()
                in_flight.append(self._start_step(self.step + len(in_flight)))
                if len(in_flight) > steps_ahead:
                    self._finish(in_flight.popleft())
            while in_flight:
                self._finish(in_flight.popleft())
            jax.block_until_ready(self.state)

    def _start_step(self, step: int) -> jax.Array:
        """The report of the step, which may still run."""
        assert self.team is not None
        mine = self.pieces.of_step(step, self.team)
        self.team = None
        self.state, report = self.train_step(self.state, mine, self.interruption.is_asked)
        return report

    def _finish(self, report: jax.Array) -> None:
        loss, share_asked, is_whole = np.asarray(report).tolist()
        self.is_stopped |= share_asked > 0
        if not is_whole:
            return  # a worker was lost in it, and the state is that before it: the others do it again
        if not math.isfinite(loss):
            raise LossError(f"the loss is {loss} at step {self.step + 1}; {self.advice}")
        rate = float(self.learning_rate(self.step))
        self.step += 1
        self.meter.step_count += 1
        self.losses.append(loss)
        self.log.scalars(self.step, loss=loss, learning_rate=rate)
        self.progress.update(loss, rate, self._all_reduce_ms())

    def _all_reduce_ms(self) -> float | None:
        """The mean over this run's steps; None with one worker."""
        if jaxhetero.size() == 1:
            return None
        return jaxhetero.metrics().busy_us / 1e3 / self.meter.step_count
