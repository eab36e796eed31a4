"""The first worker, which writes and reports: rank 0, but in an elastic job that has lost it."""

from __future__ import annotations

from typing import TypeVar

import jaxhetero

T = TypeVar("T")


def is_first() -> bool:
    """Whether this worker is the first one. Before the first gate of an elastic job, every worker is, to itself."""
    return jaxhetero.elastic.team().is_first


def from_first(x: T) -> T:
    """The first worker's ``x``, a pytree of arrays. Call it on every worker.

    Before the first gate of an elastic job, every worker keeps its own: the others do not wait for one that comes.
    """
    team = jaxhetero.elastic.team()
    if team.size == 1:
        return x
    result: T = jaxhetero.broadcast(x, root=team.ranks[0])
    return result


def total_of(x: T) -> T:
    """The sum over the workers of what each has found in its share of an evaluation: see ``split_over_workers``."""
    return x if jaxhetero.elastic.is_elastic() else jaxhetero.psum(x)
