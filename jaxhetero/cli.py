"""The ``jaxhetero`` command. It reads the command line only: the work is in ``launch``, ``reducer`` and ``doctor``.

Exit codes: 0 for a job that ended well, 2 for a wrong command line or setting, 1 for every other error of our own,
128 + N when signal N ended it. ``launch`` returns the exit code of the process that failed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from jaxhetero._engines import read_process_count, read_reducer
from jaxhetero.config import ReducerConfig, colour_wanted, read_environment, read_token
from jaxhetero.errors import ConfigError, JaxheteroError
from jaxhetero.launch import Job, launch
from jaxhetero.reducer import keep_reducer, run_reducer

_MILLISECONDS = click.IntRange(min=1)
_PORT = click.IntRange(0, 65535)


def _show_version(context: click.Context, _option: click.Parameter, asked: bool) -> None:
    if asked:
        from jaxhetero import __version__

        click.echo(f"jaxhetero {__version__}")
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def commands() -> None:
    """Data-parallel JAX training over workers and CPU reducers."""


@commands.command("reducer")
@click.option("--coordinator", metavar="HOST:PORT", help="Where rank 0 listens. [default: $JAXHETERO_COORDINATOR]")
@click.option(
    "--host",
    metavar="ADDRESS",
    help="The address to listen on. [default: the address of the interface that leads to the coordinator]",
)
@click.option("--interface", metavar="NAME", help="The network interface whose address to use.")
@click.option("--port", type=_PORT, default=0, help="The port to listen on. [default: any free one]")
@click.option(
    "--number",
    type=click.IntRange(min=-1),
    help="Which of the job's reducers it is, from 0: its name in all messages. [default: as Slurm or Kubernetes counts "
    "them, else the lowest that is free]",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="File with the job's secret. [default: $JAXHETERO_TOKEN, else the file $JAXHETERO_TOKEN_FILE]",
)
@click.option(
    "--metrics-port",
    type=_PORT,
    help="The port of the metrics for Prometheus. [default: $JAXHETERO_METRICS_PORT, else none]",
)
@click.option("--start-timeout-ms", type=_MILLISECONDS, help="How long to wait for all processes at the start.")
@click.option("--timeout-ms", type=_MILLISECONDS, help="How long a round may go without progress.")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
@click.option(
    "--restart",
    "restart_count",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="How often to start it anew after a crash, or when the job went on without it.",
)
def _reducer(
    token_file: Path | None, port: int, log_level: str, restart_count: int, **options: str | int | None
) -> int:
    """Run one dedicated reducer until every worker has left.

    Exits with 0 after that, with 1 when the job failed, with 2 for a wrong setting, with 3 when the job went on without
    this reducer and did not take it back, and with 128 + N when stopped by signal N (Ctrl-C: 130, SIGTERM: 143).
    """
    config = replace(_reducer_config(token_file, **options), port=port)
    return keep_reducer(config, restart_count, log_level) if restart_count else run_reducer(config, log_level)


def _reducer_config(token_file: Path | None, **options: str | int | None) -> ReducerConfig:
    """The settings of a reducer: given options, then the environment, then what an engine tells."""
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if token_file is not None:
        given["token"] = read_token(token_file)
    found = read_reducer() | read_environment() | given
    settings: dict[str, Any] = {name: found[name] for name in found.keys() & ReducerConfig.__dataclass_fields__.keys()}
    return ReducerConfig(**settings)


@commands.command("doctor")
@click.option("--coordinator", metavar="HOST:PORT", help="Where rank 0 will listen. [default: $JAXHETERO_COORDINATOR]")
@click.option(
    "--processes",
    type=click.IntRange(min=2),
    help="How many workers and reducers the job will have. [default: as many as Slurm or MPI has started]",
)
@click.option("--host", metavar="ADDRESS", help="The address of this process. [default: by the routes]")
@click.option("--interface", metavar="NAME", help="The network interface whose address to use.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="File with the job's secret. [default: $JAXHETERO_TOKEN, else the file $JAXHETERO_TOKEN_FILE]",
)
@click.option("--start-timeout-ms", type=_MILLISECONDS, help="How long to wait for all processes.")
@click.option(
    "--measure-ms", type=_MILLISECONDS, default=500, show_default=True, help="How long each pair sends to each other."
)
def _doctor(processes: int | None, measure_ms: int, token_file: Path | None, **options: str | int | None) -> int:
    """Check hosts, network and settings before a long job. Run it on every host at the same time.

    Shows the processes that came, their versions, clocks and interfaces, and the goodput between every pair, and says
    what to mend. Exits with 0 when there is nothing to mend, with 1 when there is, with 2 for a wrong setting.
    """
    from rich.console import Console

    from jaxhetero.doctor import Visit, run_doctor

    processes = processes or read_process_count()
    if processes is None:
        raise click.UsageError("Give --processes: how many workers and reducers the job will have.")
    config = _reducer_config(token_file, **options)
    timeout_s = config.start_timeout_ms / 1000
    visit = Visit(config.coordinator, config.token, processes, config.host, timeout_s, measure_ms / 1000)
    return run_doctor(visit, Console(no_color=not colour_wanted()))


@commands.command("status")
@click.argument("log_dir", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option("--coordinator", metavar="HOST:PORT", help="Where rank 0 listens. [default: $JAXHETERO_COORDINATOR]")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="File with the job's secret. [default: $JAXHETERO_TOKEN, else the file $JAXHETERO_TOKEN_FILE]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def _status(log_dir: Path | None, coordinator: str | None, token_file: Path | None, as_json: bool) -> int:
    """Ask a running job who is there, how fast it is and who is late.

    A job of `jaxhetero launch` is found by the folder of its logs, by default the latest one in jaxhetero-logs. Any
    other by its coordinator and its token.

    Exits with 0 when there is no problem, with 1 when a process does not answer, is late or is missing, or no job
    answers.
    """
    from rich.console import Console

    from jaxhetero.status import find_job_file, run_status

    own = read_reducer() | read_environment()
    own |= {"coordinator": coordinator} if coordinator else {}
    own |= {"token": read_token(token_file)} if token_file else {}
    found = find_job_file(log_dir) if log_dir or not {"coordinator", "token"} <= own.keys() else own
    if not found:
        raise ConfigError(
            "no job: give LOG_DIR of a job of `jaxhetero launch` that runs, or --coordinator and --token-file"
        )
    console = None if as_json else Console(no_color=not colour_wanted())
    return run_status(str(found["coordinator"]), str(found["token"]), console)


@commands.command("slurm", context_settings={"allow_interspersed_args": False})
@click.option("--workers", type=click.IntRange(min=1), required=True, help="Worker processes.")
@click.option("--workers-nodes", type=click.IntRange(min=1), help="Nodes for them. [default: one for each]")
@click.option("--workers-partition", default="", help="Their partition. [default: Slurm's]")
@click.option("--workers-cpus", type=click.IntRange(min=1), default=None, help="CPUs for each of them.")
@click.option("--workers-option", multiple=True, metavar="OPTION", help="More for sbatch, such as --gres=gpu:8.")
@click.option(
    "--reducers",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Reducer processes. With 0, each worker runs one itself.",
)
@click.option("--reducers-nodes", type=click.IntRange(min=1), help="Nodes for them. [default: one for each]")
@click.option("--reducers-partition", default="", help="Their partition. [default: Slurm's]")
@click.option("--reducers-cpus", type=click.IntRange(min=1), default=None, help="CPUs for each of them.")
@click.option("--reducers-option", multiple=True, metavar="OPTION", help="More for sbatch.")
@click.option(
    "--colocated",
    "colocated_count",
    type=click.IntRange(min=0),
    help="In how many workers a reducer runs as well, to relieve fewer reducers than workers.",
)
@click.option("--job-name", "name", default="jaxhetero", show_default=True, help="The job's name.")
@click.option("--time", "time_limit", default="", help="The time limit, as sbatch takes it.")
@click.option("--output", default="", help="The file of the job's output, as sbatch takes it.")
@click.option("--start-timeout-ms", type=_MILLISECONDS, help="How long to wait for all processes at the start.")
@click.option("--timeout-ms", type=_MILLISECONDS, help="How long a round may go without progress.")
@click.option(
    "--requeue",
    "max_restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="How often to queue the job again after workers or their nodes have failed.",
)
@click.option("--doctor", is_flag=True, help="Run `jaxhetero doctor` on the job's nodes in place of the job.")
@click.option("--submit", is_flag=True, help="Give the script to sbatch. [default: show it]")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND...")
def _slurm(submit: bool, **options: Any) -> int:
    """Write the Slurm batch script of a job, or submit it.

    Example: jaxhetero slurm --workers 16 --workers-nodes 2 --reducers 8 --reducers-partition cpu --submit -- \
    python train.py

    With reducers it is a heterogeneous job of two components. A reducer that crashes is started anew, and the death of
    its node does not end the job. With --requeue N the job is queued again after workers or their nodes have failed,
    up to N times; JAXHETERO_RESTART_COUNT tells the program how often, and it must resume from its latest checkpoint.
    """
    from jaxhetero.cluster.slurm import make_job

    job = make_job(**options)
    if submit:
        return subprocess.run(["sbatch"], input=job.script(), text=True, check=False).returncode
    click.echo(job.script(), nl=False)
    return 0


# Our options end at the first word of COMMAND. So COMMAND keeps its own options even if `--` is forgotten.
@commands.command("launch", context_settings={"allow_interspersed_args": False})
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
    help="In how many workers a reducer runs as well, to relieve fewer reducers than workers.",
)
@click.option("--coordinator-port", type=_PORT, default=0, help="The port of rank 0. [default: any free one]")
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder for the output of every process. [default: jaxhetero-logs/DATE-TIME]",
)
@click.option(
    "--metrics-port",
    type=_PORT,
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
@click.option("--start-timeout-ms", type=_MILLISECONDS, help="How long to wait for all processes at the start.")
@click.option("--timeout-ms", type=_MILLISECONDS, help="How long a round may go without progress.")
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
def _launch(**options: Any) -> int:
    """Run COMMAND in several worker processes on this machine, with reducers beside them.

    Example: jaxhetero launch --workers 4 --reducers 4 -- python train.py --epochs 3

    Every process gets its rank, the coordinator and the job's secret in JAXHETERO_* variables. Its output is shown
    with its name in front and kept in a file. When one process fails, the launcher stops the others and returns the
    exit code of the process that failed. A reducer that is killed, or lost in another way, is no failure as long as the
    workers can do without it. Ctrl-C, SIGTERM and SIGHUP are passed on to the workers, and the reducers end after them;
    a second Ctrl-C kills all processes.

    With --max-restarts N the launcher starts all workers and reducers anew after a failure, up to N times.
    JAXHETERO_RESTART_COUNT tells them how often. A program must resume from its latest checkpoint by itself, as the
    trainers in models/ do. Logs of a restart are in a folder restart-1, restart-2, ... beside the first logs, and the
    exit code is the one of the last start. Three kinds of jobs are not restarted: a job that was stopped by a signal to
    the launcher; a job in which a process raised ConfigError or exited with 2, 126 or 127, which stand for a wrong
    command line or setting; and a job whose workers have all ended well.
    """
    return launch(Job(**options))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. An error is one line on standard error."""
    try:
        # Not standalone: click's own error output takes three lines.
        return commands.main(arguments, prog_name="jaxhetero", standalone_mode=False) or 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "jaxhetero"
        return _fail(path, f"{error.format_message()} See `{path} --help`.", error.exit_code)
    except click.ClickException as error:
        return _fail("jaxhetero", error.format_message(), error.exit_code)
    except JaxheteroError as error:
        return _fail("jaxhetero", f"{type(error).__name__}: {error}", 2 if isinstance(error, ConfigError) else 1)
    except (click.Abort, KeyboardInterrupt):
        return 130


def _fail(path: str, message: str, code: int) -> int:
    print(f"{path}: {message}", file=sys.stderr)
    return code
