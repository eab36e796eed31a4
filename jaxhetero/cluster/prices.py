"""What instances of a cloud cost and can do, from ``prices.toml`` beside this file: for estimates, not for invoices."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from datetime import date
from importlib.resources import files


@dataclass(frozen=True)
class Instance:
    """A type of instance, at its on-demand price for Linux.

    Example:
      >>> from jaxhetero.cluster.prices import read_prices
      >>> instance = read_prices()["p4d.24xlarge"]
      >>> instance.accelerator, instance.accelerator_count, instance.nic_gbits / instance.nic_count
      ('A100', 8, 100.0)
    """

    name: str
    region: str
    usd_per_hour: float
    date: date
    """The day of the price."""
    source: str
    """Where the price is from."""
    vcpus: int
    memory_gib: float
    nic_gbits: float
    """Gbit/s each way of all network cards together. A TCP connection uses one card."""
    nic_count: int = 1
    """How many network cards share it."""
    accelerator: str = ""
    accelerator_count: int = 0


def read_prices() -> dict[str, Instance]:
    """All instance types that have a price, by their name. Reads a file of a few kilobytes.

    Example:
      >>> from jaxhetero.cluster.prices import read_prices
      >>> prices = read_prices()
      >>> workers, reducers = prices["p3.16xlarge"], prices["m4.16xlarge"]
      >>> round(8 * workers.usd_per_hour + 8 * reducers.usd_per_hour, 2)  # eight of each, an hour, USD
      221.44
    """
    table = tomllib.loads(files(__package__).joinpath("prices.toml").read_text(encoding="utf-8"))
    sources = table["sources"]
    instances = [Instance(**{**row, **sources[row["source"]], "region": table["region"]}) for row in table["instances"]]
    return {instance.name: instance for instance in instances}
