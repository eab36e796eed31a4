"""The errors that end a trainer with one line on standard error, and the exit code of each."""

from __future__ import annotations


class TrainerError(Exception):
    """Base class. The message says what is wrong, where, and what to do about it."""

    exit_code = 1


class SettingsError(TrainerError):
    """A setting that cannot work."""

    exit_code = 2


class DataError(TrainerError):
    """Data that is missing, truncated, out of range, or in another format."""


class CheckpointError(TrainerError):
    """A checkpoint that is missing, incomplete, or of another model."""


class LossError(TrainerError):
    """The loss is infinite or not a number."""


def require(condition: bool, message: str) -> None:
    """Raise ``SettingsError`` with this message unless the condition holds."""
    if not condition:
        raise SettingsError(message)
