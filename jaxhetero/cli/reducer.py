"""``jaxhetero reducer``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from jaxhetero.cli.options import LOG_LEVEL, MILLISECONDS, PORT, coordinator_option, reducer_config, token_file_option
from jaxhetero.launch.reducer import keep_reducer, run_reducer


@click.command("reducer")
@coordinator_option
@click.option(
    "--host",
    metavar="ADDRESS",
    help="The address to listen on. [default: the address of the interface that leads to the coordinator]",
)
@click.option("--interface", metavar="NAME", help="The network interface whose address to use.")
@click.option("--port", type=PORT, default=0, help="The port to listen on. [default: any free one]")
@click.option(
    "--number",
    type=click.IntRange(min=-1),
    help="Which of the job's reducers it is, from 0: its name in all messages. [default: as Slurm or Kubernetes counts "
    "them, else the lowest that is free]",
)
@token_file_option
@click.option(
    "--metrics-port",
    type=PORT,
    help="The port of the metrics for Prometheus. [default: $JAXHETERO_METRICS_PORT, else none]",
)
@click.option("--start-timeout-ms", type=MILLISECONDS, help="How long to wait for all processes at the start.")
@click.option("--timeout-ms", type=MILLISECONDS, help="How long a round may go without progress.")
@click.option("--log-level", type=LOG_LEVEL, default="info", show_default=True)
@click.option(
    "--restart",
    "restart_count",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="How often to start it anew after a crash, or when the job went on without it.",
)
def reducer_command(
    token_file: Path | None, port: int, log_level: str, restart_count: int, **options: str | int | None
) -> int:
    """Run one dedicated reducer until every worker has left.

    Exits with 0 after that, with 1 when the job failed, with 2 for a wrong setting, with 3 when the job went on without
    this reducer and did not take it back, and with 128 + N when stopped by signal N (Ctrl-C: 130, SIGTERM: 143).
    """
    config = replace(reducer_config(token_file, **options), port=port)
    return keep_reducer(config, restart_count, log_level) if restart_count else run_reducer(config, log_level)
