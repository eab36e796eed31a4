"""``jaxhetero status``."""

from __future__ import annotations

from pathlib import Path

import click

from jaxhetero._job.launchers import read_reducer
from jaxhetero.cli.options import coordinator_option, token_file_option
from jaxhetero.config import colour_wanted, read_environment, read_token
from jaxhetero.errors import ConfigError, InternalError


@click.command("status")
@click.argument("log_dir", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@coordinator_option
@token_file_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status_command(log_dir: Path | None, coordinator: str | None, token_file: Path | None, as_json: bool) -> int:
    """Ask a running job who is there, how fast it is and who is late.

    A job of `jaxhetero launch` is found by the folder of its logs, by default the latest one in jaxhetero-logs. Any
    other by its coordinator and its token.

    Exits with 0 when there is no problem, with 1 when a process does not answer, is late or is missing, or no job
    answers.
    """
    from rich.console import Console

    from jaxhetero.doctor.status import find_job_file, run_status

    own = read_reducer() | read_environment()
    own |= {"coordinator": coordinator} if coordinator else {}
    own |= {"token": read_token(token_file)} if token_file else {}
    found = find_job_file(log_dir) if log_dir or not {"coordinator", "token"} <= own.keys() else own
    if not found:
        raise ConfigError(
            "no job: give LOG_DIR of a job of `jaxhetero launch` that runs, or --coordinator and --token-file"
        )
    console = None if as_json else Console(no_color=not colour_wanted())
    try:
        return run_status(str(found["coordinator"]), str(found["token"]), bool(found.get("encrypt")), console)
    except InternalError as error:
        raise click.ClickException(f"{error}; the job is starting, or hangs, or is over") from None
