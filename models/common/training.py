"""A whole training run: resume, run stretches of steps, evaluate and save after each stretch, collect the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from models.common.batches import BatchSplit, Pieces
from models.common.checkpoint import Checkpoints
from models.common.command import CHECKPOINTS, RunOptions
from models.common.first import is_first
from models.common.loop import Interruption, Loop, Step, TensorboardLog, step_of_pieces
from models.common.optimizer import share_residuals
from models.common.progress import TrainProgress
from models.common.report import Result, parameter_count, save_picture, show_scores
from models.common.stages import StagedStep
from models.common.steps import ExactStep

Scores = dict[str, float]

PICTURE = "picture.png"
"""The name of the picture of the last evaluation in the output folder."""


@dataclass
class Training:
    """The parts of a training that differ between trainers. ``run`` runs it, on every worker."""

    title: str
    unit: str
    """The plural noun for examples: images, sequences."""
    split: BatchSplit
    step_count: int
    stretch_steps: int
    """Steps between checkpoints, such as those of an epoch. These steps are one *stretch*."""
    evaluate_every: int
    """Stretches between evaluations. There is always an evaluation after the last stretch."""
    label: Callable[[int], str]
    """From a step to the name that the progress display gives to its stretch."""
    state: Any
    """A tree with the field ``params``; the same on every worker."""
    train_step: Any
    """Jitted: ``(state, *batch) -> (state, loss)``. Or an ``ExactStep``, or a ``StagedStep``, which takes all pieces of
    a step at once."""
    batches: Callable[[BatchSplit, int], Iterator[tuple[Any, ...]]]
    """From a split and a step to this worker's batches from that step on, to the end of the run or without end."""
    learning_rate: Callable[[Any], Any]
    evaluate: Callable[[Any], Scores]
    identity: dict[str, Any]
    """Settings that a checkpoint must have in common with this run; see ``Checkpoints``."""
    advice: str
    """Which setting to change if the loss is not finite."""
    synchronize: Callable[[Any], Any] = lambda state: state
    """Makes the workers' states equal, before an evaluation or a checkpoint, but for their residuals, which every
    trainer has. A ``StagedStep`` has its own way."""
    pull: Callable[[Any], Any] = lambda state: state
    """From the state to that of a checkpoint, which has what reducers keep."""
    push: Callable[[Any], Any] = lambda state: state
    """The opposite."""
    begin: Callable[[Any], Any] = lambda state: state
    """From the state to that which steps are given. It may have another structure behind the first step."""
    settle: Callable[[Any], Any] = lambda state: state
    """The opposite."""
    draw: Callable[[], NDArray[np.uint8]] | None = None
    """Draws what the last evaluation found: uint8 ``[height, width, 3]``. The first worker calls it. It goes to
    TensorBoard and into PICTURE in the output folder."""

    def run(self, options: RunOptions, console: Console) -> Result:
        """Train, and return the result. Call it on every worker.

        The run continues from a checkpoint if the options say so, or if the launcher has restarted the job.
        """
        checkpoints = Checkpoints(options.output / CHECKPOINTS, self.identity, options.keep) if options.output else None
        if isinstance(self.train_step, ExactStep):
            self.state = self.train_step.prepare(self.state)
        progress = TrainProgress(
            console,
            unit=self.unit,
            step_count=self.step_count,
            global_batch=self.split.global_batch,
            is_visible=is_first(),
        )
        with Interruption() as interruption, progress:
            log = TensorboardLog(options.output / "tensorboard" if options.output else None)
            loop = self._make_loop(interruption, progress, log)
            loop.enter()
            if not loop.has_begun:
                self._begin(loop, checkpoints, options)
            first_step = loop.step
            self._run_stretches(loop, checkpoints, options)
        loop.log.close()
        return Result.collect(
            loop.meter,
            global_batch=self.split.global_batch,
            params=loop.state.params,
            first_step=first_step,
            is_complete=loop.step >= self.step_count,
            losses=loop.losses,
            evaluations=loop.evaluations,
        )

    def _make_loop(self, interruption: Interruption, progress: TrainProgress, log: TensorboardLog) -> Loop:
        """All programs are compiled in it."""
        pieces = Pieces(self.split, self.batches, are_joined=isinstance(self.train_step, StagedStep))
        step = self._compile(progress, pieces)
        return Loop(step, self.state, pieces, self.learning_rate, interruption, progress, log, self.advice)

    def _begin(self, loop: Loop, checkpoints: Checkpoints | None, options: RunOptions) -> None:
        """From a checkpoint, if the options say so, or if the launcher has restarted the job."""
        if checkpoints and (chosen := checkpoints.choose(options.resume)):
            first_step, state, history = checkpoints.restore(chosen, self.pull(loop.state))
            # Only the first worker gets the history.
            history = history or {"losses": [0.0] * first_step, "evaluations": []}
            loop.begin(first_step, self.push(state), history["losses"], history["evaluations"])
            loop.progress.print(f"resumed from step {first_step} of {self.step_count}")
        else:
            loop.begin(0, loop.state, [], [])

    def _run_stretches(
        self,
        loop: Loop,
        checkpoints: Checkpoints | None,
        options: RunOptions,
    ) -> None:
        while loop.step < self.step_count and not loop.is_stopped:
            loop.progress.start_part(self.label(loop.step))
            number = loop.step // self.stretch_steps + 1
            end = min(number * self.stretch_steps, self.step_count)
            loop.state = self.begin(loop.state)
            loop.run(end)
            loop.state = self.settle(loop.state)
            loop.state = self._equal_on_all_workers(loop.state)
            if loop.step == end and (number % self.evaluate_every == 0 or end == self.step_count):
                scores = {"step": float(loop.step), **self.evaluate(loop.state)}
                loop.evaluations.append(scores)
                mean_loss = np.mean(loop.losses[-self.stretch_steps :])
                loop.progress.print(f"{self.label(loop.step - 1)} mean loss {mean_loss:.3f}, {show_scores(scores)}")
                loop.log.scalars(loop.step, **{name: value for name, value in scores.items() if name != "step"})
                if self.draw and (path := options.file(PICTURE)):
                    picture = self.draw()
                    loop.log.picture(loop.step, picture)
                    save_picture(path, picture)
            if checkpoints:
                history = {"losses": loop.losses, "evaluations": loop.evaluations}
                checkpoints.save(loop.step, self.pull(loop.state), history)
            if options.report:
                scores = loop.evaluations[-1] if loop.evaluations else {}
                options.report(loop.step, scores, options.checkpoint(loop.step))
        if loop.is_stopped and loop.step < self.step_count:
            kept = "its checkpoint is saved" if checkpoints else "nothing is saved without --output"
            loop.progress.print(f"stopped after step {loop.step} of {self.step_count}; {kept}")

    def _equal_on_all_workers(self, state: Any) -> Any:
        if isinstance(self.train_step, StagedStep):
            return self.train_step.make_whole(state)
        if isinstance(self.train_step, ExactStep):
            return state  # equal already, and a mean of equal numbers may have other bits
        state = self.synchronize(state)
        return state._replace(opt_state=share_residuals(state.opt_state))

    def _compile(self, progress: TrainProgress, pieces: Pieces) -> Step:
        """Compile the train step before the first step, so that all steps can be timed alike."""
        start = time.monotonic()
        compiled = self._compile_for(self.begin(self.state), *jax.tree.map(_abstract, pieces.example()))
        split = self.split
        if isinstance(compiled, StagedStep):
            progress.print(compiled.report)
        progress.print(
            f"{self.title}, {parameter_count(self.state.params):,} parameters; {split.worker_count} x "
            f"{split.accumulate_every} x {split.micro_batch} {self.unit} per step, {self.step_count} steps; "
            f"compiled in {time.monotonic() - start:.1f} s"
        )
        return compiled if isinstance(compiled, ExactStep) else step_of_pieces(compiled)

    def _compile_for(self, state: Any, *batch: Any) -> Any:
        compiled = self.train_step.lower(state, *batch).compile()
        if state is self.state:  # steps are given what they give
            return compiled
        later, _ = jax.eval_shape(self.train_step, state, *batch)
        again = self.train_step.lower(later, *batch).compile()
        by_structure: dict[Any, Any] = {jax.tree.structure(state): compiled, jax.tree.structure(later): again}
        return lambda state, *batch: by_structure[jax.tree.structure(state)](state, *batch)


def _abstract(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(array), jax.dtypes.canonicalize_dtype(array.dtype))
