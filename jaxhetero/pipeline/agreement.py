"""What all workers of a pipeline must have in common, checked before anything is compiled."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxhetero import _compat
from jaxhetero._collectives import api
from jaxhetero._job import world
from jaxhetero.errors import MismatchError
from jaxhetero.pipeline.costs import Measure
from jaxhetero.pipeline.graph import Graph
from jaxhetero.pipeline.schedules import Schedule
from jaxhetero.pipeline.stages import Stage


def digest(graph: Graph, more: str) -> bytes:
    """Of what a graph computes: its operations, and the shapes of what they make."""
    text = hashlib.sha256(more.encode())
    numbers: dict[Any, int] = {}

    def name(atom: Any) -> str:
        if hasattr(atom, "val"):
            return f"{atom.val}"
        return str(numbers.setdefault(atom, len(numbers)))

    for value in graph.inputs:
        text.update(f"{name(value)}:{value.aval.str_short()};".encode())
    for equation in graph.equations:
        inputs = ",".join(name(atom) for atom in equation.inputs)
        outputs = ",".join(f"{name(value)}:{value.aval.str_short()}" for value in equation.outputs)
        text.update(f"{outputs}={equation.name}({inputs}){_inner(equation.source)};".encode())
    text.update(",".join(name(value) for value in graph.outputs).encode())
    return text.digest()


def cut_digest(schedule: Schedule, edges: Sequence[int], stages: Sequence[Stage]) -> bytes:
    """Of a cut: where it is, and the values of each message in their order."""
    numbers = {value: number for number, value in enumerate(value for stage in stages for value in stage.sent)}
    received = [[numbers[value] for value in stage.received] for stage in stages]
    text = f"{schedule.name} {schedule.places} {schedule.stages_per_place} {list(edges)} {received}"
    return hashlib.sha256(text.encode()).digest()


def _inner(source: _compat.Equation) -> str:
    """The primitives inside an equation, for example those of a scan's body."""
    programs = _compat.inner_programs(source.params)
    return ";".join(f"{equation.primitive.name}{_inner(equation)}" for program in programs for equation in program.eqns)


def check_digest(own: bytes, what: str) -> None:
    """Compare a digest with those of all workers. Blocks until all have come.

    Raises:
      MismatchError: on every worker, if they differ. It names two of them.
    """
    if world.current().is_alone:
        return
    given = jax.device_put(np.frombuffer(own, np.uint8))
    digests = jax.device_get(api.all_gather(given, name="pipeline"))
    for rank, other in enumerate(digests):
        if not np.array_equal(other, digests[0]):
            raise MismatchError(
                f"pipeline: {what} of rank {rank} is another than that of rank 0; start the same program with the "
                "same settings on every worker"
            )


def measure_on_rank_0(graph: Graph) -> list[float]:
    """The seconds of each equation on the device of rank 0, on every worker. Blocks until rank 0 has measured them."""
    current = world.current()
    with jax.transfer_guard("allow"):  # for what equations are measured with
        measure = Measure()
        own = [measure(equation) if current.rank == 0 else 0.0 for equation in graph.equations]
    given = jax.device_put(np.array(own, np.float32))
    seconds = jax.device_get(api.broadcast(given, name="pipeline.costs"))
    return [float(second) for second in seconds]
