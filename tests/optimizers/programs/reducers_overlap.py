"""A step of LAMB on reducers whose gradients are ready one after the other; prints when its rounds were asked for.

Arguments: the path of the compiled bench/accelerator/wait.cc, the name of an optimizer of bench.optimizer_steps, and
the seconds until each bucket is ready.
"""

import json
import sys
import time

import jaxhetero
from bench.engines.optimizer import OptimizerStep

COUNT = 65_536


def main() -> None:
    library, optimizer, *ready_s = sys.argv[1:]
    jaxhetero.initialize()
    step = OptimizerStep(
        optimizer=optimizer,
        backups=0,
        counts=[COUNT] * len(ready_s),
        ready_s=[float(time_s) for time_s in ready_s],
        dtype="float32",
        library=library,
    )
    jaxhetero.barrier(name="begin")
    begin_s = time.monotonic()
    step.run()
    rounds = [times for times in jaxhetero.timeline() if times.requested_s > begin_s]
    in_order = sorted(rounds, key=lambda times: times.requested_s)
    print(json.dumps([times.op.split(" (")[0].removeprefix("optimizer 0 ") for times in in_order]))


main()
