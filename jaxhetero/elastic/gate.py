"""The gate between two steps; see ``xla_ffi/worker/gate.h``."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp

from jaxhetero._job import world
from jaxhetero.elastic.handover import Handover
from jaxhetero.errors import ConfigError, JaxheteroError, WorkerLost, from_status

if TYPE_CHECKING:
    from jaxhetero._native import Communicator

State = TypeVar("State")
Place = TypeVar("Place")
# What this worker does at a gate, the view, and the ranks of its members and of those who come.
_Turn = tuple[str, int, list[int], list[int]]

# How long native code may keep a Ctrl-C waiting.
_POLL_MS = 100
_GLANCE_S = 0.002
# A handover that fails is mostly the first sign of a loss, which the coordinator then tells of.
_GRACE_S = 10.0


@dataclass(frozen=True)
class Team:
    """The workers among which a step is divided. All of them agree on it.

    Example:
      >>> team = jaxhetero.elastic.Team(ranks=(0, 2, 3), rank=2, view=5)
      >>> team.index, team.size, team.is_first
      (1, 3, False)
    """

    ranks: tuple[int, ...]
    """Of its members, in order."""
    rank: int
    """This worker's own."""
    view: int
    """The number of the view in which this worker passes the gate."""

    @property
    def index(self) -> int:
        """This worker's place in the team, from 0."""
        return self.ranks.index(self.rank)

    @property
    def size(self) -> int:
        """How many members it has."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this worker is the one that writes checkpoints and reports."""
        return self.index == 0


def gate(state: State, place: Place) -> tuple[State, Place, Team]:
    """Pass the gate between two steps, where workers come and go. In a job that is not elastic, it lets pass at once.

    Every worker calls it before each step, with the state behind the step before. Mostly it comes back within
    microseconds. When somebody waits to come in, all workers meet at a gate. A worker that comes gets state and place
    from the others there; what it gave itself says only of which shapes they are. Those who were there before get back
    what they gave.

    A worker that comes compiles its programs before its first gate, so that nobody waits for that:
    ``step = jax.jit(step).lower(state, ...).compile()``. It calls no collective before that gate.

    Args:
      state: a pytree of arrays and numbers, the same on all workers.
      place: where in the data the next step is, the same on all workers: ints, floats, bools, strings, bytes and None,
        and lists, tuples, dicts and sets of these.

    Returns:
      ``state``, ``place``, and the team among which the next step is divided.

    SIGTERM makes a worker leave: at the next gate where all meet, it ends its program with ``SystemExit(0)``, and the
    others go on. So does ``leave()``.

    Raises:
      NotInitializedError: before ``initialize()``.
      WorkerLost: the job has gone on without this worker, or too few workers are left.
      MismatchError: the state of this worker has other shapes than the others'; or their place has an object of
        another kind; or they differ among themselves.

    Example:
      >>> state, place, team = jaxhetero.elastic.gate({"w": jnp.ones(3)}, 0)
      >>> team.size
      1
    """
    current = world.current()
    communicator = current._communicator
    if communicator is None or not current.is_elastic:
        return state, place, team()
    _leave_on_sigterm()
    turn: _Turn | None = None
    while True:
        if turn is None:
            turn = _wait(communicator)
            continue
        (what, view, ranks, joining), turn = turn, None
        if what == "pass":
            passed = _own().team = Team(tuple(ranks), current.rank, view)
            return state, place, passed
        if what == "leave":
            world.shutdown()
            raise SystemExit(0)
        if what == "meet":
            _finish_programs(state)
            communicator.say_met()
            continue
        handover = Handover(communicator, current.rank, view, ranks, joining)
        try:
            if what == "take":
                state, place = handover.take(state, place)
                communicator.say_present(view)
            else:
                _finish_programs(state)
                handover.give(state, place)
        except WorkerLost as loss:
            turn = _turn_behind(loss, communicator, view)
        communicator.say_given(view)


@dataclass
class _Own:
    """What this worker knows of itself in a world."""

    world: weakref.ref[world.World]
    team: Team | None = None
    is_leaving: bool = False


_latest: list[_Own] = []


def _own() -> _Own:
    current = world.current()
    if not _latest or _latest[0].world() is not current:
        _latest[:] = [_Own(weakref.ref(current))]
    return _latest[0]


def team() -> Team:
    """The team that ``gate`` gave last; of a job that is not elastic, all workers. Does not block.

    Before the first gate of an elastic job it has this worker alone.

    Raises:
      NotInitializedError: before ``initialize()``.

    Example:
      >>> jaxhetero.elastic.team().is_first
      True
    """
    current, own = world.current(), _own()
    if own.team is not None:
        return own.team
    return Team((current.rank,) if current.is_elastic else tuple(range(current.size)), current.rank, 0)


def leave() -> None:
    """Make this worker leave the job, at the next gate where all meet. Does not block. See ``gate``.

    Raises:
      NotInitializedError: before ``initialize()``.
      ConfigError: the job is not elastic.
    """
    current = world.current()
    if current._communicator is None or not current.is_elastic:
        raise ConfigError("leave() is for elastic jobs; give initialize(elastic='MIN:MAX')")
    _own().is_leaving = True
    current._communicator.ask_to_leave()


def leaving() -> bool:
    """Whether this worker is to leave, since it got SIGTERM, as before a preemption, or called ``leave()``.

    It goes on until the next gate where all meet: a program that wants to save something of its own does so now. Does
    not block.

    Raises:
      NotInitializedError: before ``initialize()``.

    Example:
      >>> jaxhetero.elastic.leaving()
      False
    """
    return _own().is_leaving


def skip_unless(condition: Any, new: State, old: State) -> State:
    """``new`` if ``condition`` holds, else ``old``; inside a compiled program, leaf by leaf.

    With ``who.same`` as the condition, a step in which a worker was lost between two buckets does not count.

    Example:
      >>> float(jaxhetero.elastic.skip_unless(jnp.bool_(False), jnp.ones(()), jnp.zeros(())))
      0.0
    """
    chosen: State = jax.tree.map(lambda one, other: jnp.where(condition, one, other), new, old)
    return chosen


def _wait(communicator: Communicator) -> _Turn | None:
    """What this worker does next. Each "pass" counts as a gate, so it must not be dropped."""
    found = communicator.wait_at_gate(_POLL_MS)
    if found is None:
        return None
    status, what, _, view, ranks, joining = found
    if status[0] != "ok":
        raise from_status(*status)
    return what, view, ranks, joining


def _turn_behind(loss: WorkerLost, communicator: Communicator, view: int) -> _Turn | None:
    """Where a handover fails because somebody was lost, the next view begins it anew, or needs none."""
    end = time.monotonic() + _GRACE_S
    while (turn := _wait(communicator)) is not None and turn[0] != "pass" and turn[1] == view:
        if time.monotonic() > end:
            raise loss
        time.sleep(_GLANCE_S)
    return turn


def _finish_programs(state: Any) -> None:
    """Their rounds are over then. Without another program: a survivor compiles none."""
    jax.block_until_ready(state)
    for array in jax.live_arrays():
        while not array.is_deleted() and not array.is_ready():
            time.sleep(_GLANCE_S)


def _leave_on_sigterm() -> None:
    """Unless the program has a handler of its own."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return

    def ask(*_: object) -> None:
        with contextlib.suppress(JaxheteroError):
            leave()

    signal.signal(signal.SIGTERM, ask)
