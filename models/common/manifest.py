"""SHA256SUMS: the checksums of a folder's files, in the format that ``sha256sum`` writes and checks."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from models.common.errors import DataError

MANIFEST_FILE = "SHA256SUMS"
# The checksum, then a blank and a star in binary mode or two blanks, then the name.
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def write_manifest(folder: Path) -> None:
    """Write the checksums of the files in ``folder``."""
    lines = []
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    (folder / MANIFEST_FILE).write_text("".join(lines), encoding="utf-8")


def parse_manifest(content: bytes, where: str) -> dict[str, str]:
    """From the name of each file to its checksum in hexadecimal digits.

    Raises:
      DataError: a line has another format.
    """
    found = {}
    for line in content.decode("utf-8", errors="replace").splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            raise DataError(f"{where} has the line {line[:80]!r}; sha256sum writes a checksum, two blanks and a name")
        found[match[2].removeprefix("./")] = match[1]
    return found
