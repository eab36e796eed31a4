"""The names of ops in messages and traces."""

from __future__ import annotations

import sys
from pathlib import Path

from jaxhetero._compat import source_name

_PACKAGE_DIR = str(Path(__file__).parent.parent)


def op_label(collective: str, name: str | None) -> str:
    """``name``, or ``psum at train.py:train_step``."""
    return name or f"{collective} at {_caller()}"


def _caller() -> str:
    """``train.py:train_step``: the first frame outside this package. Without a line number, which every edit moves."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE_DIR):
        frame = frame.f_back
    return source_name(frame.f_code.co_filename, frame.f_code.co_qualname)
