"""Options that several commands have, and the settings that follow from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from jaxhetero._job.launchers import read_reducer
from jaxhetero.config import CoordinatorConfig, ReducerConfig, read_environment, read_token

MILLISECONDS = click.IntRange(min=1)
PORT = click.IntRange(0, 65535)
LOG_LEVEL = click.Choice(["debug", "info", "warning", "error"])

coordinator_option = click.option(
    "--coordinator", metavar="HOST:PORT", help="Where rank 0 listens. [default: $JAXHETERO_COORDINATOR]"
)
token_file_option = click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="File with the job's secret. [default: $JAXHETERO_TOKEN, else the file $JAXHETERO_TOKEN_FILE]",
)


def coordinator_config(token_file: Path | None, **options: str | int | None) -> CoordinatorConfig:
    """The settings of a coordinator: given options, then the environment."""
    found = read_environment() | _given(token_file, options)
    settings: dict[str, Any] = {
        name: found[name] for name in found.keys() & CoordinatorConfig.__dataclass_fields__.keys()
    }
    return CoordinatorConfig(**settings)


def reducer_config(token_file: Path | None, **options: str | int | None) -> ReducerConfig:
    """The settings of a reducer: given options, then the environment, then what a launcher tells."""
    found = read_reducer() | read_environment() | _given(token_file, options)
    settings: dict[str, Any] = {name: found[name] for name in found.keys() & ReducerConfig.__dataclass_fields__.keys()}
    return ReducerConfig(**settings)


def _given(token_file: Path | None, options: dict[str, str | int | None]) -> dict[str, Any]:
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if token_file is not None:
        given["token"] = read_token(token_file)
    return given
