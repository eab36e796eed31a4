"""Three Ray nodes on this host, until standard input ends: one for two workers, two for a reducer each.

With an argument, all three have that number of CPUs. Prints the cluster's address. Ray's own files are in $RAY_TMPDIR.
"""

import sys

from ray.cluster_utils import Cluster

MEMORY_BYTES = 80 << 20

cluster = Cluster()
cpu_count = int(sys.argv[1]) if len(sys.argv) > 1 else 0
cluster.add_node(num_cpus=cpu_count or 2, object_store_memory=MEMORY_BYTES, include_dashboard=False)
for _ in range(2):
    cluster.add_node(num_cpus=cpu_count, object_store_memory=MEMORY_BYTES, resources={"reducer": 1})
print(cluster.address, flush=True)
sys.stdin.read()
