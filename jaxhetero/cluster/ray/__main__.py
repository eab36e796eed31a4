"""``python -m jaxhetero.cluster.ray doctor``."""

from __future__ import annotations

import sys

import click
import ray
from rich.console import Console

from jaxhetero.cluster.ray.doctor import run_doctor
from jaxhetero.config import colour_wanted
from jaxhetero.errors import JaxheteroError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def commands() -> None:
    """Jobs of jaxhetero on a Ray cluster."""


@commands.command()
@click.option("--address", default="auto", show_default=True, help="The cluster's address, as for ray.init().")
@click.option("--interface", default="", metavar="NAME", help="The network interface to use. [default: by the routes]")
@click.option(
    "--start-timeout-ms",
    type=click.IntRange(min=1),
    default=120_000,
    show_default=True,
    help="How long to wait for all nodes.",
)
@click.option(
    "--measure-ms",
    type=click.IntRange(min=1),
    default=500,
    show_default=True,
    help="How long each pair sends to each other.",
)
def doctor(address: str, interface: str, start_timeout_ms: int, measure_ms: int) -> None:
    """Run `jaxhetero doctor` on every node of the cluster, and show what it has found.

    Exits with 0 when there is nothing to mend, else with 1.
    """
    console = Console(no_color=not colour_wanted())
    try:
        ray.init(address, log_to_driver=False, logging_level="warning")
        code = run_doctor(
            console, interface=interface, start_timeout_s=start_timeout_ms / 1000, seconds=measure_ms / 1000
        )
    except (JaxheteroError, ConnectionError) as error:
        print(f"jaxhetero.cluster.ray doctor: {error}", file=sys.stderr)
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    commands()
