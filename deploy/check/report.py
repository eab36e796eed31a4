"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Report:
    """What is wrong in one file, and what could not be checked, with the reason."""

    problems: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
