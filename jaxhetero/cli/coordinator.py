"""``jaxhetero coordinator``."""

from __future__ import annotations

from pathlib import Path

import click

from jaxhetero.cli.options import LOG_LEVEL, MILLISECONDS, coordinator_config, token_file_option
from jaxhetero.launch.coordinator import run_coordinator


@click.command("coordinator")
@click.option("--coordinator", metavar="HOST:PORT", help="Where to listen. [default: $JAXHETERO_COORDINATOR]")
@token_file_option
@click.option("--start-timeout-ms", type=MILLISECONDS, help="How long to wait for all processes at the start.")
@click.option("--timeout-ms", type=MILLISECONDS, help="How long a change of the members may take.")
@click.option(
    "--lost-after-ms", type=MILLISECONDS, help="How long a process may give no sign of life before it counts as lost."
)
@click.option("--rejoin-timeout-ms", type=MILLISECONDS, help="How long too few workers wait at their gates for others.")
@click.option(
    "--history-file",
    type=click.Path(dir_okay=False),
    help="Append to it, in JSON, who takes part in which rounds.",
)
@click.option("--log-level", type=LOG_LEVEL, default="info", show_default=True)
def coordinator_command(token_file: Path | None, log_level: str, **options: str | int | None) -> int:
    """Run the coordinator of an elastic job until every worker has left.

    Only one may run for a job. It has nothing on disk: one that was killed may be started again at the same address,
    and rounds go on meanwhile. Exits with 0 when all workers have left in order, with 1 when the job failed, with 2 for
    a wrong setting, and with 128 + N when stopped by signal N.
    """
    return run_coordinator(coordinator_config(token_file, **options), log_level)
