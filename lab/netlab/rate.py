from __future__ import annotations

import re
from dataclasses import dataclass

from lab.netlab.errors import LabError

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


@dataclass(frozen=True)
class Rate:
    """The rate at which a network interface sends and, at the same time, receives."""

    bits_per_s: int

    def __post_init__(self) -> None:
        # tbf stores bytes per second. A rate below one packet in ten seconds is certainly a mistake.
        if self.bits_per_s < 1000:
            raise LabError(f"rate is {self.bits_per_s} bit/s; it must be at least 1kbit")

    @classmethod
    def parse(cls, text: str) -> Rate:
        """``200mbit``, ``1gbit``, ``2.5gbit``: a number and one of tc's units."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text)
        if match is None:
            raise LabError(f"rate is {text!r}; it must be a number and kbit, mbit or gbit, as in 200mbit")
        return cls(round(float(match[1]) * _UNITS[match[2]]))

    @property
    def bytes_per_s(self) -> float:
        return self.bits_per_s / 8

    def __str__(self) -> str:
        for unit, factor in reversed(_UNITS.items()):
            if self.bits_per_s >= factor:
                return f"{self.bits_per_s / factor:g}{unit}"
        raise AssertionError("a rate is at least 1kbit")
