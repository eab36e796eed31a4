"""Tries many schedules of the protocol of elastic jobs: see ``tests/job/elastic_model.py``.

    python -m tests.long.elastic_schedules --schedules 200000 --first-seed 0
    python -m tests.long.elastic_schedules --broken any_view

Prints the first seed that breaks a promise, and which. Without ``--broken``, there should be none.
"""

from __future__ import annotations

import sys
import time
from typing import Literal

import tyro

from tests.job.elastic_model import BREAKS, first_break


def main(schedules: int = 200_000, first_seed: int = 0, broken: Literal[("", *BREAKS)] = "") -> None:  # type: ignore[valid-type]
    """Try the schedules of as many seeds.

    Args:
      schedules: how many.
      first_seed: of the first of them.
      broken: the rule that the protocol lacks.
    """
    began = time.monotonic()
    found = first_break(broken, range(first_seed, first_seed + schedules))
    took = f"{time.monotonic() - began:.0f} s"
    if found is None:
        print(f"{schedules} schedules from seed {first_seed}: no promise is broken, in {took}")
        return
    print(f"seed {found[0]}, after {took}: {found[1]}")
    sys.exit(not broken)


if __name__ == "__main__":
    tyro.cli(main)
