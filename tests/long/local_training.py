"""A trainer whose workers exchange weights by ``local_steps``, and not gradients in every step.

    jaxhetero launch --workers 2 --reducers 1 -- python -m tests.long.local_training 8 models.resnet --preset mnist

The first argument is ``every``; the others are the trainer and its own arguments. What it prints compares with what the
trainer prints by itself. It has no checkpoints: they would lack the state of ``local_steps``.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import optax

import jaxhetero
from jaxhetero.optimizers import LocalSteps, local_steps
from models.common.training import Training


class LocalStep:
    """The train step of one worker, with an exchange behind it."""

    def __init__(self, step: Any, local: LocalSteps) -> None:
        self._step, self._local = step, local
        self._state: Any = None
        self._number = 0

    def lower(self, state: Any, *batch: Any) -> LocalStep:
        self._state = self._local.init(state.params)
        self._step = self._step.lower(state, *batch)
        return self

    def compile(self) -> LocalStep:
        self._step = self._step.compile()
        return self

    def __call__(self, state: Any, *batch: Any) -> tuple[Any, Any]:
        state, loss = self._step(state, *batch)
        params, self._state = self._local.exchange(state.params, self._state, self._number)
        self._number += 1
        return state._replace(params=params), loss

    def settle(self, state: Any) -> Any:
        params, self._state = self._local.settle(state.params, self._state)
        return state._replace(params=params)


def main() -> None:
    every, sys.argv = int(sys.argv[1]), sys.argv[2:]
    run = Training.run

    def run_locally(training: Training, *arguments: Any) -> Any:
        step = LocalStep(training.train_step, local_steps(every=every, fragments=min(4, every), overlap=every // 4))
        training.train_step, training.settle = step, step.settle
        return run(training, *arguments)

    Training.run = run_locally  # type: ignore[method-assign]
    jaxhetero.all_reduce_gradients = lambda **_: optax.identity()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
