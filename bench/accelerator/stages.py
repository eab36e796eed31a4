"""A model of timed waits, to be cut into stages: its tasks last as long as those of an accelerator.

Every stage has one block, which waits in its forward pass and in its backward pass. Activations, gradients and what is
sent are real arrays. The gradients are zeros that cost nothing to add up, because the hosts of a lab share few cores.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxhetero
from jaxhetero.pipeline.schedules import Task, TaskKind
from jaxhetero.pipeline.simulation import simulate

_WORK = "bench_work"


class StagedEmulation:
    """Steps of a model that is cut over the workers.

    Args:
      seconds: what a step of each block takes on one accelerator, a third of it is the forward pass; as many blocks as
        stages.
      counts: the parameters of each block, float32.
      tied: two blocks, of which the second uses the parameters of the first as well.
      activation_bytes: of one microbatch, between two blocks.
      is_parted: whether gradients of activations and of parameters are waited for one after the other.
      network: between the hosts.
      library: the path of the compiled wait.cc.
      settings: of ``jaxhetero.pipeline.value_and_grad``.
    """

    def __init__(
        self,
        *,
        seconds: Sequence[float],
        counts: Sequence[int],
        tied: Sequence[int],
        activation_bytes: int,
        is_parted: bool,
        network: jaxhetero.pipeline.Interconnect,
        library: str,
        settings: dict[str, Any],
    ) -> None:
        jax.ffi.register_ffi_target(_WORK, jax.ffi.pycapsule(ctypes.CDLL(library).BenchWork), platform="cpu")
        microbatches = settings["microbatches"]
        self._third_s = [step_s / 3 / microbatches for step_s in seconds]
        self._counts = counts
        self._activation_bytes = activation_bytes
        self._network = network
        blocks = [_block(third_s, is_parted=is_parted) for third_s in self._third_s]
        # Of each block, the other blocks whose parameters it uses.
        others = {tied[1]: [tied[0]]} if tied else {}

        def init() -> tuple[jax.Array, list[jax.Array]]:
            return jnp.zeros(()), [jnp.zeros(count) for count in counts]

        def loss_fn(params: tuple[jax.Array, list[jax.Array]], x: jax.Array) -> jax.Array:
            offset, kernels = params
            x = x + offset  # so that the first block has a gradient to pass on, as the others have
            for number, block in enumerate(blocks):
                x = block([kernels[used] for used in (number, *others.get(number, ()))], x)
            return jnp.mean(x)

        self._batch = np.zeros((microbatches, activation_bytes // 4), np.float32)
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
        counts = [stage.parameter_count for stage in report.stages]
        # A stage has its block's, those that it is tied to, and the first one the offset.
        assert all(map(operator.ge, counts, self._counts)), f"not one block a stage: {counts}, {self._counts}"

        def task_s(task: Task) -> float:
            third_s: float = self._third_s[task.stage]
            return 2 * third_s if task.kind is TaskKind.BACKWARD and not schedule.is_parted else third_s

        def reduce_s(stage: int) -> float:
            return 4 * counts[stage] / network.bytes_per_s + network.latency_s

        transfers = {(stage, stage + 1): float(self._activation_bytes) for stage in range(schedule.stage_count - 1)}
        is_reduced = self._grad_fn.replica_count > 1
        simulation = simulate(schedule, task_s, transfers, network, reduce_s if is_reduced else None)
        return {"simulated_s": simulation.step_s, "parameter_counts": counts}


def _work(seconds: float, after: jax.Array, part: int = 0) -> jax.Array:
    """A zero, once ``after`` was there and the accelerator has worked for so long; it does one thing at a time."""
    call = jax.ffi.ffi_call(_WORK, jax.ShapeDtypeStruct((), jnp.float32))
    zero: jax.Array = call(after.ravel()[0], work_s=np.float64(seconds), part=np.int64(part))
    return zero


Block = Callable[[list[jax.Array], jax.Array], jax.Array]


def _block(third_s: float, *, is_parted: bool) -> Block:
    """``x``, after a third of the block's time; its backward pass waits for the rest."""

    @jax.custom_vjp
    def block(kernels: list[jax.Array], x: jax.Array) -> jax.Array:
        return x + _work(third_s, x) + 0 * sum(kernel[0] for kernel in kernels)

    def forward(kernels: list[jax.Array], x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        return block(kernels, x), kernels

    def backward(kernels: list[jax.Array], gradient: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        zeros = jax.tree.map(jnp.zeros_like, kernels)
        if is_parted:
            waited = _work(third_s, gradient, 1)
            return [zero + waited for zero in zeros], gradient + _work(third_s, gradient)
        return zeros, gradient + _work(2 * third_s, gradient)

    block.defvjp(forward, backward)
    return block
