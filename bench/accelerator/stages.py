"""A model of timed waits, to be cut into stages: its tasks last as long as those of an accelerator.

Every stage has one block, which waits in its forward pass and in its backward pass. Activations, gradients and what is
sent are real arrays. The gradients are zeros that cost nothing to add up, because the hosts of a lab share few cores.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxhetero
from jaxhetero.pipeline.schedules import Kind, Task
from jaxhetero.pipeline.simulation import simulate

_WORK = "bench_work"


class StagedEmulation:
    """Steps of a model that is cut over the workers.

    Args:
      blocks: of the model, as many as stages; all alike.
      step_s: the seconds of a step on one accelerator: a third of it is the forward pass.
      parameter_bytes: of the whole model, float32.
      activation_bytes: of one microbatch, between two blocks.
      is_parted: whether gradients of activations and of parameters are waited for one after the other.
      network: between the hosts.
      library: the path of the compiled wait.cc.
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
        network: jaxhetero.pipeline.Network,
        library: str,
        settings: dict[str, Any],
    ) -> None:
        jax.ffi.register_ffi_target(_WORK, jax.ffi.pycapsule(ctypes.CDLL(library).BenchWork), platform="cpu")
        self._third_s: float = step_s / 3 / blocks / settings["microbatches"]
        count, width = parameter_bytes // 4 // blocks, activation_bytes // 4
        self._parameter_bytes = 4 * count
        self._activation_bytes = activation_bytes
        self._network = network
        block = _block(self._third_s, is_parted=is_parted)

        def init() -> tuple[jax.Array, list[jax.Array]]:
            return jnp.zeros(()), [jnp.zeros(count) for _ in range(blocks)]

        def loss_fn(params: tuple[jax.Array, list[jax.Array]], x: jax.Array) -> jax.Array:
            offset, kernels = params
            x = x + offset  # so that the first block has a gradient to pass on, as the others have
            for kernel in kernels:
                x = block(kernel, x)
            return jnp.mean(x)

        self._batch = np.zeros((settings["microbatches"], width), np.float32)
        self._grad_fn = jaxhetero.pipeline.value_and_grad(loss_fn, **settings)
        self._grad_fn.cut(jax.eval_shape(init), self._batch)
        self._params = self._grad_fn.init(init)

    def run(self) -> None:
        """One step; blocks until its gradients are there."""
        jax.block_until_ready(self._grad_fn(self._params, self._batch))

    def facts(self) -> dict[str, Any]:
        """The step that a simulation finds, with the waits as the costs: on paper they are nothing."""
        report = self._grad_fn.report()
        schedule, network = report.schedule, self._network
        sizes = [stage.parameter_bytes for stage in report.stages]
        assert all(int(size // self._parameter_bytes) == 1 for size in sizes), f"not one block a stage: {sizes}"

        def task_s(task: Task) -> float:
            return 2 * self._third_s if task.kind is Kind.BACKWARD and not schedule.is_parted else self._third_s

        def reduce_s(stage: int) -> float:
            return self._parameter_bytes / network.bytes_per_s + network.latency_s

        transfers = {(stage, stage + 1): float(self._activation_bytes) for stage in range(schedule.stage_count - 1)}
        is_reduced = self._grad_fn.replica_count > 1
        simulation = simulate(schedule, task_s, transfers, network, reduce_s if is_reduced else None)
        return {"simulated_s": simulation.step_s}


def _work(seconds: float, after: jax.Array, part: int = 0) -> jax.Array:
    """A zero, once ``after`` was there and the accelerator has worked for so long; it does one thing at a time."""
    call = jax.ffi.ffi_call(_WORK, jax.ShapeDtypeStruct((), jnp.float32))
    zero: jax.Array = call(after.ravel()[0], work_s=np.float64(seconds), part=np.int64(part))
    return zero


Block = Callable[[jax.Array, jax.Array], jax.Array]


def _block(third_s: float, *, is_parted: bool) -> Block:
    """``x``, after a third of the block's time; its backward pass waits for the rest."""

    @jax.custom_vjp
    def block(kernel: jax.Array, x: jax.Array) -> jax.Array:
        return x + _work(third_s, x) + 0 * kernel[0]

    def forward(kernel: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return block(kernel, x), kernel

    def backward(kernel: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        if is_parted:
            return jnp.zeros_like(kernel) + _work(third_s, gradient, 1), gradient + _work(third_s, gradient)
        return jnp.zeros_like(kernel), gradient + _work(2 * third_s, gradient)

    block.defvjp(forward, backward)
    return block
