"""Three Ray nodes on this host, until standard input ends: one for two workers, two for a reducer each.

Prints the cluster's address. Ray's own files are in $RAY_TMPDIR.
"""

import sys

from ray.cluster_utils import Cluster

MEMORY_BYTES = 80 << 20

cluster = Cluster()
cluster.add_node(num_cpus=2, object_store_memory=MEMORY_BYTES, include_dashboard=False)
for _ in range(2):
    cluster.add_node(num_cpus=0, object_store_memory=MEMORY_BYTES, resources={"reducer": 1})
print(cluster.address, flush=True)
sys.stdin.read()
