"""``jaxhetero slurm``."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import click

from jaxhetero.cli.options import MILLISECONDS
from jaxhetero.errors import ConfigError


@click.command("slurm", context_settings={"allow_interspersed_args": False})
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
    help="This number of workers, from rank 0 on, run a reducer as well. Useful with fewer reducers than workers.",
)
@click.option(
    "--elastic",
    metavar="MIN:MAX",
    default="",
    help="Go on when a worker or its node is lost, as long as MIN are left. Each worker has a node of its own.",
)
@click.option("--job-name", "name", default="jaxhetero", show_default=True, help="The job's name.")
@click.option("--time", "time_limit", default="", help="The time limit, as sbatch takes it.")
@click.option("--output", default="", help="The file of the job's output, as sbatch takes it.")
@click.option("--start-timeout-ms", type=MILLISECONDS, help="How long to wait for all processes at the start.")
@click.option("--timeout-ms", type=MILLISECONDS, help="How long a round may go without progress.")
@click.option(
    "--lost-after-ms", type=MILLISECONDS, help="With --elastic: after how long without a sign of life one is lost."
)
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
def slurm_command(submit: bool, **options: Any) -> int:
    """Write the Slurm batch script of a job, or submit it.

    Example: jaxhetero slurm --workers 16 --workers-nodes 2 --reducers 8 --reducers-partition cpu --submit -- \
    python train.py

    With reducers it is a heterogeneous job of two components. A reducer that crashes is started anew, and the death of
    its node does not end the job. With --requeue N the job is queued again after workers or their nodes have failed,
    up to N times; JAXHETERO_RESTART_COUNT tells the program how often, and it must resume from its latest checkpoint.

    With --elastic a lost worker or its node does not end the job. The coordinator runs on the node of the batch script,
    and each worker is a step of its own, which is started again while a node is free. With more --workers-nodes than
    --workers there are nodes to spare. A minute before the time limit, the workers get SIGTERM, on which they leave.
    """
    from jaxhetero.cluster.slurm import make_job

    job = make_job(**options)
    if submit:
        if shutil.which("sbatch") is None:
            raise ConfigError("there is no sbatch here: submit from a host of the Slurm cluster, or without --submit")
        return subprocess.run(["sbatch"], input=job.script(), text=True, check=False).returncode
    click.echo(job.script(), nl=False)
    return 0
