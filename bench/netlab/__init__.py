"""Many hosts on one machine, each with a network namespace and a network interface of a given rate.

    with Lab({"w0": "200mbit", "w1": "200mbit", "r0": None}) as lab:
        server = lab["r0"].start(["python", "server.py", lab["r0"].address])
        lab["w0"].run(["python", "client.py", "r0"])
        lab["w1"].cut()

This needs root and iproute2. Without them the hosts are on loopback, each with an address of its own, and operations
that need a network interface raise ``LabError``. With ``CI=true``, ``Lab`` raises if there can be no namespaces.
"""

from bench.netlab._namespaces import missing
from bench.netlab.counters import Counters
from bench.netlab.errors import LabError
from bench.netlab.goodput import measure_goodput
from bench.netlab.host import Host
from bench.netlab.lab import Lab
from bench.netlab.ping import measure_round_trip
from bench.netlab.rate import Rate

__all__ = ["Counters", "Host", "Lab", "LabError", "Rate", "measure_goodput", "measure_round_trip", "missing"]
