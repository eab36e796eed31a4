"""What an all-reduce, or a train step, takes on hosts and networks that are not here.

A simulated job has the plan, the window and the push rule of a real worker, and a real reducer's state machine: it is
their code. Hosts, processors and the network below are a model. ``docs/how_to/simulate.md`` says how it is checked
against measurements, and what it leaves out. Nothing here needs ``jaxhetero.initialize()``, and no job needs it.

Example:
  Eight workers and eight reducers at 10 Gbit/s, and a bucket of 64 MiB:

  >>> from jaxhetero.simulator import Host, Job, simulate
  >>> host = Host.of_gbits(10)
  >>> outcome = simulate(Job(workers=(host,) * 8, reducers=(host,) * 8), 64 * 2**20)
  >>> 1.0 < outcome.over_limit < 1.1
  True
"""

from __future__ import annotations

from jaxhetero.simulator.hosts import Costs, Host, Network
from jaxhetero.simulator.job import Bucket, Job, Outcome, across_steps, simulate, simulate_steps

__all__ = [
    "Bucket",
    "Costs",
    "Host",
    "Job",
    "Network",
    "Outcome",
    "across_steps",
    "simulate",
    "simulate_steps",
]
