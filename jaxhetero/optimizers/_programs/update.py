"""A step of an optimizer as reducers take it: which programs run on which tensors, and where scalars come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from jaxhetero.optimizers._programs.program import Program


class Origin(IntEnum):
    """Where a scalar comes from."""

    CONSTANT = 1
    WORKERS = 2
    TOTAL = 3
    DERIVED = 4


@dataclass(frozen=True)
class Source:
    """A scalar of a program: the number of a scalar of the workers, of a total or of a derived scalar; or a constant.

    ``number`` of a constant is the bits of its float32: as floats, 0.0 and -0.0 would be the same.
    """

    origin: Origin
    number: int

    @classmethod
    def of_constant(cls, value: float) -> Source:
        """The source that always has this value, rounded to float32."""
        return cls(Origin.CONSTANT, int(np.float32(value).view(np.uint32)))

    @property
    def constant(self) -> np.float32:
        """The value of a constant."""
        return np.uint32(self.number).view(np.float32)


@dataclass(frozen=True)
class Pass:
    """A run of a program: over a tensor, or, for a derived scalar, over one element without inputs.

    Attributes:
      program: its number.
      scalars: one source for each scalar of the program. The pass can run once they are known.
      totals: the number of the total that each summand of the program gives.
      level: how many sums come one after the other up to these totals. They need those of lower levels alone.
    """

    program: int
    scalars: tuple[Source, ...]
    totals: tuple[int, ...] = ()
    level: int = 0


@dataclass(frozen=True)
class Leaf:
    """What reducers keep of a leaf and do with it in a step.

    The inputs of its programs are the gradient, the weights, and the states. The outputs of its last pass are the
    weights, the states, and the weights that workers get, if those have another dtype. No other pass has outputs: until
    the last one, a step can be given up or done again.

    Attributes:
      states: which leaves of the optimizer's state, in the order of ``jax.tree.leaves``.
      passes: in order.
    """

    states: tuple[int, ...]
    passes: tuple[Pass, ...]


@dataclass(frozen=True)
class Update:
    """A step of an optimizer.

    Attributes:
      programs: each program once. Leaves that are treated alike share theirs.
      leaves: for each leaf of the weights, in the order of ``jax.tree.leaves``.
      total_count: how many sums over tensors there are.
      derived: for each derived scalar, the pass whose one output is its value.
      worker_states: which leaves of the optimizer's state stay with the workers.
      scalars: takes these states, and gives the workers' scalars of this step, float32[...]. Jitted. Every worker gets
        the same.
      returned_totals: the totals that workers need for the next step.
      advance: takes the workers' states and the returned totals, float32[...], and gives the next states. Jitted.
    """

    programs: tuple[Program, ...]
    leaves: tuple[Leaf, ...]
    total_count: int
    derived: tuple[Pass, ...]
    worker_states: tuple[int, ...]
    scalars: Callable[[Sequence[Any]], Any] = field(compare=False)
    returned_totals: tuple[int, ...]
    advance: Callable[[Sequence[Any], Any], list[Any]] = field(compare=False)
