"""Room for the reducers in a cluster, and what to say where there is none."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from jaxhetero.errors import StartTimeout

Resources = Mapping[str, float]


def place(bundle: Resources, count: int, strategy: str, timeout_s: float) -> PlacementGroup:
    """A placement group with ``count`` equal bundles. Blocks until Ray has found room for all of them.

    Raises:
      StartTimeout: it has not within ``timeout_s``. The message says what the cluster has.
    """
    group = placement_group([dict(bundle)] * count, strategy=strategy, name="jaxhetero reducers")
    if group.wait(timeout_s):
        return group
    remove_placement_group(group)
    raise StartTimeout(
        f"{describe_lack(bundle, count, strategy, timeout_s)}. Add hosts, or change reducers, resources_per_reducer or "
        "placement_strategy; where hosts come late, raise start_timeout_ms in settings"
    )


def describe_lack(bundle: Resources, count: int, strategy: str, timeout_s: float) -> str:
    """Which reducers have no place, what they ask for, and what every host has."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    free_by_id = available_resources_per_node()
    free = [free_by_id.get(node["NodeID"], {}) for node in nodes]
    fit_count = count_fitting(bundle, free, strategy)
    missing = f"reducer {count - 1} has" if fit_count >= count - 1 else f"reducers {fit_count} to {count - 1} have"
    hosts = "; ".join(
        f"{node['NodeManagerAddress']} has {show(node['Resources'], bundle)}, free {show(own, bundle)}"
        for node, own in zip(nodes, free, strict=True)
    )
    return (
        f"{missing} no place after {timeout_s:g} s: {count} bundles of {show(bundle, bundle)} are wanted, placed by "
        f"{strategy}, and {min(fit_count, count)} fit. The cluster: {hosts}"
    )


def count_fitting(bundle: Resources, free: Sequence[Resources], strategy: str) -> int:
    """How many such bundles the hosts can take, by what each has free.

    Example:
      >>> from jaxhetero.cluster.ray.placement import count_fitting
      >>> count_fitting({"CPU": 2}, [{"CPU": 5}, {"CPU": 3}, {}], "SPREAD")
      3
    """
    counts = [int(min(host.get(name, 0) / amount for name, amount in bundle.items())) for host in free]
    if strategy == "STRICT_PACK":
        return max(counts, default=0)
    if strategy == "STRICT_SPREAD":
        return sum(count > 0 for count in counts)
    return sum(counts)


def show(resources: Resources, asked: Resources) -> str:
    """What is asked for, and what else a user has given a host: no memory, and nothing that Ray adds for itself.

    Example:
      >>> from jaxhetero.cluster.ray.placement import show
      >>> show({"CPU": 2.0, "node:10.0.0.1": 1.0, "memory": 3e9, "reducer": 1.0}, asked={"reducer": 1})
      'CPU 2, reducer 1'
    """
    own = [name for name in sorted(resources) if name in asked or not re.search(":|_group_|memory", name)]
    return ", ".join(f"{name} {resources[name]:g}" for name in own) or "nothing"
