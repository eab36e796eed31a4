"""An ``Update`` bucket by bucket: the rounds of each, what reducers are told of them, and what they wait for.

``xla_ffi/update/bucket_update.h`` is the other half: it tells what a description means, and reads it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from jaxhetero.optimizers._programs.program import OutputType, Program
from jaxhetero.optimizers._programs.update import Leaf, Origin, Pass, Source, Update

_CONSTANT, _SENT, _DERIVED = 1, 2, 3


@dataclass(frozen=True)
class Stage:
    """A round of a bucket in a step: a measure, or the update.

    Attributes:
      description: for the reducers.
      sent: the scalars that workers send: the totals of the bucket's earlier measures, in their order; other totals
        and the workers' own numbers.
      totals: the numbers of the totals that a measure gives.
      level: of a measure, as of its passes.
    """

    description: bytes
    sent: tuple[Source, ...]
    totals: tuple[int, ...]
    level: int


@dataclass(frozen=True)
class BucketPlan:
    """What is done with a bucket in a step.

    Attributes:
      leaves: the numbers of its leaves among those of the weights.
      slot_count: the weights, and as many states as any leaf has.
      stages: measures, and the update at last.
    """

    leaves: tuple[int, ...]
    slot_count: int
    stages: tuple[Stage, ...]


def plan_bucket(update: Update, leaves: Sequence[int], sizes: Sequence[int], weights: OutputType) -> BucketPlan:
    """The plan of a bucket.

    Args:
      update: of all weights.
      leaves: their numbers.
      sizes: how many elements each of them has.
      weights: as what workers get the weights.
    """
    members = [update.leaves[leaf] for leaf in leaves]
    state_count = max(len(member.states) for member in members)
    stages: list[Stage] = []
    for level in sorted({pass_.level for member in members for pass_ in member.passes[:-1]}):
        runs = [_measure(update, member, level) for member in members]
        stages.append(_Writer(update, stages).stage(runs, sizes, state_count, OutputType.F32, has_outputs=False))
    runs = [_run(update, member.passes[-1]) for member in members]
    stages.append(_Writer(update, stages).stage(runs, sizes, state_count, weights, has_outputs=True))
    return BucketPlan(tuple(leaves), 1 + state_count, tuple(stages))


@dataclass(frozen=True)
class _Run:
    """A pass, with its program."""

    program: Program
    scalars: tuple[Source, ...] = ()
    totals: tuple[int, ...] = ()
    level: int = 0


def _run(update: Update, pass_: Pass) -> _Run:
    return _Run(update.programs[pass_.program], pass_.scalars, pass_.totals, pass_.level)


def _measure(update: Update, leaf: Leaf, level: int) -> _Run:
    """Of a leaf that has no sums of this level, as others of its bucket have: a pass that does nothing."""
    nothing = _Run(Program(2 + len(leaf.states), 0, 0, (), (), ()))
    return next((_run(update, pass_) for pass_ in leaf.passes[:-1] if pass_.level == level), nothing)


class _Writer:
    """Writes the description of a stage. It has what the stage needs alone, with numbers of its own."""

    def __init__(self, update: Update, earlier: Sequence[Stage]) -> None:
        self._update = update
        self._programs: dict[Program, int] = {}
        measured = [Source(Origin.TOTAL, total) for stage in earlier for total in stage.totals]
        self._sent: dict[Source, int] = {source: number for number, source in enumerate(measured)}
        self._derived: dict[int, int] = {}
        self._derivations: list[bytes] = []
        self._totals: dict[int, int] = {}

    def stage(
        self,
        runs: Sequence[_Run],
        sizes: Sequence[int],
        state_count: int,
        weights: OutputType,
        *,
        has_outputs: bool,
    ) -> Stage:
        """A run for each leaf, which has so many elements."""
        leaves = []
        for run, size in zip(runs, sizes, strict=True):
            totals = [struct.pack("<I", self._totals.setdefault(total, len(self._totals))) for total in run.totals]
            leaves.append(struct.pack("<Q", size) + self._pass(run) + _list(totals))
        programs = [struct.pack("<I", len(encoded)) + encoded for encoded in map(Program.encode, self._programs)]
        head = struct.pack("<IIIBB", len(self._sent), state_count, len(self._totals), weights, has_outputs)
        description = head + _list(programs) + _list(self._derivations) + _list(leaves)
        level = max(run.level for run in runs)
        return Stage(description, tuple(self._sent), tuple(self._totals), level)

    def _pass(self, run: _Run) -> bytes:
        scalars = _list([self._scalar(source) for source in run.scalars])
        return struct.pack("<I", self._programs.setdefault(run.program, len(self._programs))) + scalars

    def _scalar(self, source: Source) -> bytes:
        if source.origin == Origin.CONSTANT:
            return struct.pack("<BI", _CONSTANT, source.number)
        if source.origin == Origin.DERIVED:
            return struct.pack("<BI", _DERIVED, self._derive(source.number))
        return struct.pack("<BI", _SENT, self._sent.setdefault(source, len(self._sent)))

    def _derive(self, number: int) -> int:
        """The number of a derived scalar here; those that it needs come before it."""
        if number not in self._derived:
            pass_ = self._update.derived[number]
            encoded = self._pass(_run(self._update, pass_))
            self._derived[number] = len(self._derivations)
            self._derivations.append(encoded)
        return self._derived[number]


def _list(items: Sequence[bytes]) -> bytes:
    return struct.pack("<I", len(items)) + b"".join(items)
