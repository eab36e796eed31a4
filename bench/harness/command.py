"""What the benchmarks have in common as commands."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from bench.errors import BenchError
from bench.netlab import LabError


def run_command(command: Callable[[], int]) -> int:
    """The exit code: that of ``command``, or 2 for what cannot be run, which is told without a traceback."""
    # So that what `with` opened is closed.
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        return command()
    except (BenchError, LabError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def check_folders(*files: Path | None) -> None:
    """Before the run, not after it."""
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise BenchError(f"cannot write {file}: there is no folder {file.parent}")
