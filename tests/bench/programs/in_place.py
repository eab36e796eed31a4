"""How many sums of bench.harness.worker take the memory of their operands: apart, and in place."""

import json
import os

import numpy as np

from bench.engines.in_process import Jaxhetero
from bench.harness.worker import Worker


def main() -> None:
    os.environ["BENCH_WIRE_DTYPE"] = ""
    engine = Jaxhetero()
    worker = Worker(engine)
    counts = []
    for in_place in (False, True):
        given = [engine.put(np.ones(1 << 16, np.float32)) for _ in range(3)]
        places = [array.unsafe_buffer_pointer() for array in given]
        sums = worker.all_reduce(given, in_place)
        counts.append(sum(total.unsafe_buffer_pointer() == place for total, place in zip(sums, places, strict=True)))
    print(json.dumps(counts))
    engine.close()


main()
