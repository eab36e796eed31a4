"""``jaxhetero doctor``."""

from __future__ import annotations

from pathlib import Path

import click

from jaxhetero._job.launchers import read_process_count
from jaxhetero.cli.options import MILLISECONDS, reducer_config, token_file_option
from jaxhetero.config import colour_wanted


@click.command("doctor")
@click.option("--coordinator", metavar="HOST:PORT", help="Where rank 0 will listen. [default: $JAXHETERO_COORDINATOR]")
@click.option(
    "--processes",
    type=click.IntRange(min=2),
    help="How many workers and reducers the job will have. [default: as many as Slurm or MPI has started]",
)
@click.option("--host", metavar="ADDRESS", help="The address of this process. [default: by the routes]")
@click.option("--interface", metavar="NAME", help="The network interface whose address to use.")
@token_file_option
@click.option("--start-timeout-ms", type=MILLISECONDS, help="How long to wait for all processes.")
@click.option(
    "--measure-ms", type=MILLISECONDS, default=500, show_default=True, help="How long each pair sends to each other."
)
def doctor_command(processes: int | None, measure_ms: int, token_file: Path | None, **options: str | int | None) -> int:
    """Check hosts, network and settings before a long job. Run it on every host at the same time.

    Shows the processes that came, their versions, clocks and interfaces, and the goodput between every pair, and says
    what to mend. Where Slurm or MPI has started the processes, only one shows it. Exits with 0 when there is nothing
    to mend, with 1 when there is, with 2 for a wrong setting.
    """
    from rich.console import Console

    from jaxhetero.doctor import Visit, run_doctor

    by_hand = processes is not None
    processes = processes or read_process_count()
    if processes is None:
        raise click.UsageError("Give --processes: how many workers and reducers the job will have.")
    config = reducer_config(token_file, **options)
    timeout_s = config.start_timeout_ms / 1000
    # What a launcher has started writes to one place.
    visit = Visit(config.coordinator, config.token, processes, config.host, timeout_s, measure_ms / 1000, by_hand)
    return run_doctor(visit, Console(no_color=not colour_wanted()))
