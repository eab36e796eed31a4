"""The entries of a JSON file, field by field: what is missing or of another kind is refused by its name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from models.common.errors import DataError

# From here on a float may be another integer than the one that was written.
_EXACT = 2.0**53


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry."""

    fields: Mapping[str, Any]
    name: str
    """Its own name in an error message."""
    file: Path

    @property
    def where(self) -> str:
        """The entry and its file."""
        return f"{self.name} of {self.file}" if self.name else str(self.file)

    def refuse(self, what: str) -> NoReturn:
        """Raise ``DataError``. The message says ``what`` the entry is or has."""
        raise DataError(f"{self.where} {what}")

    def get(self, name: str) -> Any:
        """A field of any kind."""
        if name not in self.fields:
            self.refuse(f"has no {name!r}")
        return self.fields[name]

    def text(self, name: str) -> str:
        """A field that is a string."""
        value = self.get(name)
        if not isinstance(value, str) or not value:
            self.refuse(f"has the {name} {_shown(value)}, which is no text")
        return value

    def integer(self, name: str) -> int:
        """A field that is an integer, or a float with the value of one."""
        value = self.get(name)
        if not _is_number(value) or value != value // 1 or (isinstance(value, float) and abs(value) >= _EXACT):
            self.refuse(f"has the {name} {_shown(value)}, which is no integer")
        return int(value)

    def number(self, name: str) -> float:
        """A field that is a finite number."""
        value = self.get(name)
        if not is_finite(value):
            self.refuse(f"has the {name} {_shown(value)}, which is no finite number")
        return float(value)

    def numbers(self, name: str, count: int) -> list[float]:
        """A field that is a list of so many finite numbers."""
        value = self.get(name)
        if not isinstance(value, list) or len(value) != count or not all(map(is_finite, value)):
            self.refuse(f"has the {name} {_shown(value)}, which is no list of {count} finite numbers")
        return [float(number) for number in value]

    def flag(self, name: str) -> bool:
        """A field that is 0 or 1. One that is missing is 0."""
        value = self.fields.get(name, 0)
        if not isinstance(value, int | float) or value not in (0, 1):
            self.refuse(f"has the {name} {_shown(value)}, which is neither 0 nor 1")
        return bool(value)

    def entries(self, name: str, kind: str) -> Iterator[Entry]:
        """A field that is a list of entries. An entry's name is ``kind`` with its id, or its place if it has none."""
        value = self.get(name)
        if not isinstance(value, list):
            self.refuse(f"has {name} that are no list")
        for place, fields in enumerate(value):
            if not isinstance(fields, dict):
                self.refuse(f"has {name} of which number {place} is no object: {_shown(fields)}")
            yield Entry(fields, f"{kind} {fields['id']}" if "id" in fields else f"{kind} number {place}", self.file)


def is_finite(value: Any) -> bool:
    """Whether the value is a number that a float can hold."""
    if not _is_number(value):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    """The value as in JSON's text, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
