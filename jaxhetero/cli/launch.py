"""``jaxhetero launch``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from jaxhetero.cli.options import MILLISECONDS, PORT
from jaxhetero.launch import Job, launch


# Our options end at the first word of COMMAND. So COMMAND keeps its own options even if `--` is forgotten.
@click.command("launch", context_settings={"allow_interspersed_args": False})
@click.option("--workers", "worker_count", type=click.IntRange(min=1), required=True, help="Worker processes to start.")
@click.option(
    "--reducers",
    "reducer_count",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Reducer processes to start. With 0, each worker runs one itself.",
)
@click.option(
    "--colocated",
    "colocated_count",
    type=click.IntRange(min=0),
    help="This number of workers, from rank 0 on, run a reducer as well. Useful with fewer reducers than workers.",
)
@click.option(
    "--elastic",
    metavar="MIN:MAX",
    default="",
    help="Go on without workers that are lost, as long as MIN are left; there may be MAX at most.",
)
@click.option("--coordinator-port", type=PORT, default=0, help="The port of rank 0. [default: any free one]")
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder for the output of every process. [default: jaxhetero-logs/DATE-TIME]",
)
@click.option(
    "--metrics-port",
    type=PORT,
    default=0,
    envvar="JAXHETERO_METRICS_PORT",
    help="The port of the metrics of worker 0; the other workers have those after it, then the reducers. [default: "
    "$JAXHETERO_METRICS_PORT, else none]",
)
@click.option(
    "--timeline",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write all rounds of all workers to this file at the end: a trace for https://ui.perfetto.dev.",
)
@click.option("--start-timeout-ms", type=MILLISECONDS, help="How long to wait for all processes at the start.")
@click.option("--timeout-ms", type=MILLISECONDS, help="How long a round may go without progress.")
@click.option(
    "--lost-after-ms", type=MILLISECONDS, help="With --elastic: after how long without a sign of life one is lost."
)
@click.option(
    "--stop-timeout-ms",
    type=click.IntRange(min=0),
    default=Job.stop_timeout_ms,
    show_default=True,
    help="How long processes may take to end before they are killed.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=Job.max_restarts,
    show_default=True,
    help="How often to start everything anew after a failure.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True, metavar="COMMAND...")
def launch_command(**options: Any) -> int:
    """Run COMMAND in several worker processes on this machine, with reducers beside them.

    Example: jaxhetero launch --workers 4 --reducers 4 -- python train.py --epochs 3

    Every process gets its rank, the coordinator and the job's secret in JAXHETERO_* variables. Its output is shown
    with its name in front and kept in a file. When one process fails, the launcher stops the others and returns the
    exit code of the process that failed. A reducer that is killed, or lost in another way, is no failure as long as the
    workers can do without it. Ctrl-C, SIGTERM and SIGHUP are passed on to the workers, and the reducers end after them;
    a second Ctrl-C kills all processes.

    With --elastic the job's coordinator is one more process, which the launcher starts again when it is killed. A
    worker that fails is no failure then, as long as enough are left.

    With --max-restarts N the launcher starts all workers and reducers anew after a failure, up to N times.
    JAXHETERO_RESTART_COUNT tells them how often. A program must resume from its latest checkpoint by itself, as the
    trainers in models/ do. Logs of a restart are in a folder restart-1, restart-2, ... beside the first logs, and the
    exit code is the one of the last start. Three kinds of jobs are not restarted: a job that was stopped by a signal to
    the launcher; a job in which a process raised ConfigError or exited with 2, 126 or 127, which stand for a wrong
    command line or setting; and a job whose workers have all ended well.
    """
    return launch(Job(**options))
