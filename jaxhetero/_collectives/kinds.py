"""The kinds of collectives, which each have a primitive, and which the core knows by number."""

from __future__ import annotations

import enum


class Kind(enum.IntEnum):
    """How a round makes its result; the numbers are those of xla_ffi/wire/op_spec.h."""

    SUM = 1
    BROADCAST = 2
    MAX = 3
    MIN = 4
    SCATTER = 5
    GATHER = 6
    STORE = 7
    LOAD = 8
    MEASURE = 9
    UPDATE = 10
    MEAN8 = 11
    MEAN4 = 12
    MEANFLOAT8 = 13
