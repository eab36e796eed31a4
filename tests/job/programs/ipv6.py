"""A sum, a message to the other worker, and what others see of the job: its metrics and its state."""

import json
import urllib.request

import jax.numpy as jnp
import numpy as np

import jaxhetero
from jaxhetero._job import world
from jaxhetero._job.channels import Channels
from jaxhetero.config import format_address
from jaxhetero.doctor.status import read_status

jaxhetero.initialize()
config, peer = world.current().config, 1 - jaxhetero.rank()
total = float(jaxhetero.psum(jnp.float32(jaxhetero.rank() + 1)))
channels, message = Channels(), np.zeros(1, np.int32)
sent = channels.post_send(peer, 0, [np.full(1, jaxhetero.rank(), np.int32)], 0, "a rank")
channels.finish(channels.post_receive(peer, 0, [message], 0, "a rank"))
channels.finish(sent)
with urllib.request.urlopen(f"http://{format_address('::1', config.metrics_port)}/metrics", timeout=10) as answer:
    families = {line.split()[2] for line in answer.read().decode().splitlines() if line.startswith("# TYPE")}
job = read_status(config.coordinator, config.token, seconds=0.1)
jaxhetero.barrier()
jaxhetero.shutdown()
print(
    json.dumps(
        {
            "total": total,
            "message": int(message[0]),
            "has_metrics": bool(families),
            "hosts": sorted({process.address.rpartition(":")[0] for process in job.processes}),
        }
    )
)
