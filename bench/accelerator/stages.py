"""A model of timed waits, to be cut into stages: its tasks last as long as those of an accelerator.

Every block waits, in its forward pass and in its backward pass. Activations, gradients and what is sent are real
arrays. The gradients are zeros that cost nothing to add up, because the hosts of a lab share few cores.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxhetero


class StagedEmulation:
    """Steps of a model that is cut over the workers.

    Args:
      blocks: of the model; all alike.
      step_s: the seconds of a step on one accelerator: a third of it is the forward pass.
      parameter_bytes: of the whole model, float32.
      activation_bytes: of one microbatch, between two blocks.
      is_parted: whether gradients of activations and of parameters are waited for one after the other.
      settings: of ``jaxhetero.pipeline.value_and_grad``.
    """

    def __init__(
        self,
        *,
        blocks: int,
        step_s: float,
        parameter_bytes: int,
        activation_bytes: int,
        is_parted: bool,
        settings: dict[str, Any],
    ) -> None:
        third_s = step_s / 3 / blocks / settings["microbatches"]
        block = _block(third_s, is_parted=is_parted)

        def init() -> tuple[jax.Array, list[jax.Array]]:
            return jnp.zeros(()), [jnp.zeros(count) for _ in range(blocks)]

        def loss_fn(params: tuple[jax.Array, list[jax.Array]], x: jax.Array) -> jax.Array:
            offset, kernels = params
            x = x + offset  # so that the first block has a gradient to pass on, as the others have
            for kernel in kernels:
                x = block(kernel, x)
            return jnp.mean(x)

        count, width = parameter_bytes // 4 // blocks, activation_bytes // 4
        self._batch = np.zeros((settings["microbatches"], width), np.float32)
        self._grad_fn = jaxhetero.pipeline.value_and_grad(loss_fn, **settings)
        self._grad_fn.cut(jax.eval_shape(init), self._batch)
        self._params = self._grad_fn.init(init)

    def run(self) -> None:
        """One step; blocks until its gradients are there."""
        jax.block_until_ready(self._grad_fn(self._params, self._batch))

    def facts(self) -> dict[str, Any]:
        """What the cut is like, and the step that a simulation gives it, in parts of the time of one worker's tasks."""
        report = self._grad_fn.report()
        simulation = self._grad_fn.simulate(jaxhetero.pipeline.Network())
        return {
            "balance": report.balance,
            "bubble": simulation.bubble,
            "schedule": report.schedule.name,
            "places": report.schedule.places,
        }


_device = threading.Lock()


def _wait(seconds: float, after: jax.Array) -> jax.Array:
    """A zero, once ``after`` was there and the accelerator has worked for so long; it does one thing at a time."""

    def sleep(_: np.ndarray) -> np.ndarray:
        with _device:
            time.sleep(seconds)
        return np.zeros((), np.float32)

    zero: jax.Array = jax.pure_callback(sleep, jax.ShapeDtypeStruct((), jnp.float32), after.ravel()[0])
    return zero


Block = Callable[[jax.Array, jax.Array], jax.Array]


def _block(third_s: float, *, is_parted: bool) -> Block:
    """``x``, after a third of the block's time; its backward pass waits for the rest."""

    @jax.custom_vjp
    def block(kernel: jax.Array, x: jax.Array) -> jax.Array:
        return x + _wait(third_s, x) + 0 * kernel[0]

    def forward(kernel: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return block(kernel, x), kernel

    def backward(kernel: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        if is_parted:
            return jnp.zeros_like(kernel) + _wait(third_s, gradient), gradient + _wait(third_s, gradient)
        return jnp.zeros_like(kernel), gradient + _wait(2 * third_s, gradient)

    block.defvjp(forward, backward)
    return block
