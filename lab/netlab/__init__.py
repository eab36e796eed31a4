"""Many hosts on one machine, each with a network namespace and a network interface of a given rate.

    with Lab({"w0": "200mbit", "w1": "200mbit", "r0": None}) as lab:
        server = lab["r0"].start(["python", "server.py", lab["r0"].address])
        lab["w0"].run(["python", "client.py", "r0"])
        lab["w1"].cut()

This needs root and iproute2. Without them the hosts are on loopback, each with an address of its own, and operations
that need a network interface raise ``LabError``. With ``CI=true``, ``Lab`` raises if there can be no namespaces.
"""

from lab.netlab._namespaces import missing
from lab.netlab.counters import Counters
from lab.netlab.errors import LabError
from lab.netlab.goodput import measure_goodput
from lab.netlab.host import Host
from lab.netlab.lab import Lab
from lab.netlab.ping import measure_round_trip
from lab.netlab.rate import Rate

__all__ = ["Counters", "Host", "Lab", "LabError", "Rate", "measure_goodput", "measure_round_trip", "missing"]
