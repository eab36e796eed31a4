"""When the emulated accelerator's program asks for its rounds, in seconds from the beginning of the step, and how many
buckets it then has in memory of their own that they did not have before; prints both."""

import json
import os
import sys
import time

import jaxhetero
from bench.accelerator.emulation import Emulation
from bench.engines.in_process import Jaxhetero

# XLA runs a program of a few instructions, or of small arrays only, one instruction after the other.
COUNT = 4096


def main() -> None:
    library, *ready_s = sys.argv[1:]
    os.environ["BENCH_WIRE_DTYPE"] = ""
    engine = Jaxhetero()
    emulation = Emulation(engine, [COUNT] * len(ready_s), [float(time_s) for time_s in ready_s], False, library)
    places = [set[int](), set[int]()]
    for held in places:  # the first one compiles
        emulation.prepare()
        begin_s = time.monotonic()
        emulation.run("step")
        held.update(bucket.unsafe_buffer_pointer() for bucket in emulation.buckets)
    assert emulation.wrong_count() == 0
    requested_s = sorted(times.requested_s - begin_s for times in jaxhetero.timeline() if times.requested_s >= begin_s)
    print(json.dumps({"requested_s": requested_s, "moved_count": len(places[1] - places[0])}))
    engine.close()


main()
