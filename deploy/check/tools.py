"""Where programs are."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def find_tool(name: str) -> str | None:
    """A program beside this Python, as pip installs it, else one on PATH."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
