"""Code that the benchmarks' commands share: exit codes, and checks of paths."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from bench.harness.errors import BenchError
from lab.netlab import LabError


def run_command(command: Callable[[], int]) -> int:
    """Call ``command`` and return its exit code, or 2 if it cannot run; the reason is printed without a traceback."""
    # SIGTERM raises, so that the blocks of `with` clean up.
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


def check_at_least(options: object, **least: int) -> None:
    """Raise ``BenchError`` if one of these options is given, and is less than it can be."""
    for name, lowest in least.items():
        value = getattr(options, name)
        if value is not None and value < lowest:
            raise BenchError(f"--{name} is {value}; it must be at least {lowest}")


def check_folders(*files: Path | None) -> None:
    """Raise ``BenchError`` before the run if a file could not be written after it."""
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise BenchError(f"cannot write {file}: there is no folder {file.parent}")
