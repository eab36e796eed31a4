"""What failures of workers leave of the work: of a job that restarts from checkpoints, and of an elastic one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxhetero.errors import ConfigError

_DAY_S = 86400.0
# A change of the members, at most in the median. The step that it hits is done again.
_CHANGE_S = 0.1
# Weights and the two states of Adam, in the gradient's dtype.
_STATE_COPIES = 3


@dataclass(frozen=True)
class Failures:
    """How often workers are lost, and what it takes to have them back."""

    per_day: float
    """Of all workers together."""
    restart_s: float = 300.0
    """From a loss until the lost worker computes again: in a fixed job until all of them do."""
    checkpoint_s: float = 30.0
    """How long a fixed job stands still for a checkpoint."""

    def __post_init__(self) -> None:
        if self.per_day <= 0 or self.restart_s < 0 or self.checkpoint_s < 0:
            raise ConfigError("a goodput wants failures above 0, and times from 0 on")

    @property
    def apart_s(self) -> float:
        """The mean time from one failure to the next."""
        return _DAY_S / self.per_day


@dataclass(frozen=True)
class Goodput:
    """The work that counts, as a share of what the same workers do without failures and checkpoints."""

    fixed: float
    """Of a job that restarts from its checkpoints."""
    elastic: float
    checkpoint_every_s: float
    """The best interval for the fixed job."""


def goodput(failures: Failures, *, workers: int, step_s: float, gradient_bytes: int, worker_gbits: float) -> Goodput:
    """Compare a fixed job with an elastic one. Formulas: docs/how_to/simulate.md.

    Example:
      >>> from jaxhetero.simulator.goodput import Failures, goodput
      >>> found = goodput(Failures(8), workers=64, step_s=0.25, gradient_bytes=1_300_000_000, worker_gbits=100)
      >>> f"{found.fixed:.1%} {found.elastic:.1%}"
      '90.2% 100.0%'
    """
    every_s = best_interval_s(failures)
    handover_s = _STATE_COPIES * gradient_bytes * 8 / (worker_gbits * 1e9)
    return Goodput(
        fixed=fixed_goodput(failures, every_s),
        elastic=elastic_goodput(failures, workers, step_s + _CHANGE_S + handover_s),
        checkpoint_every_s=every_s,
    )


def fixed_goodput(failures: Failures, every_s: float) -> float:
    """Of a job with a checkpoint after every ``every_s`` of work.

    Failures come at random, also while the job restarts or writes a checkpoint. Daly, A higher order estimate of the
    optimum checkpoint interval for restart dumps, 2006.
    """
    apart_s, whole_s = failures.apart_s, every_s + failures.checkpoint_s
    return every_s / (apart_s * math.exp(failures.restart_s / apart_s) * math.expm1(whole_s / apart_s))


def best_interval_s(failures: Failures) -> float:
    """The interval of checkpoints with the most goodput; 1 s where they take no time."""
    low_s, high_s = 1.0, max(2.0, 2 * failures.apart_s)
    while high_s - low_s > 1e-3 * high_s:  # the goodput rises up to its maximum, and falls behind it
        third_s = (high_s - low_s) / 3
        if fixed_goodput(failures, low_s + third_s) < fixed_goodput(failures, high_s - third_s):
            low_s += third_s
        else:
            high_s -= third_s
    return (low_s + high_s) / 2


def elastic_goodput(failures: Failures, workers: int, pause_s: float) -> float:
    """Of a job in which a loss takes one worker away for ``restart_s``, and makes all stand still for ``pause_s``."""
    away = failures.restart_s / failures.apart_s  # the mean number of workers that are away
    return max(0.0, 1 - away / workers) / (1 + pause_s / failures.apart_s)
