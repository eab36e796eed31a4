"""Checked all-reduces of float32, of which rank 0 prints the time of each, and its log.

The arguments: how many megabytes, how many rounds at most; and a file that ends them earlier once it is there.

Prints on its last line what metrics() counts, and a digest of all totals.
"""

import hashlib
import json
import logging
import sys
import time
from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np

import jaxhetero


def main() -> None:
    megabytes, rounds = float(sys.argv[1]), int(sys.argv[2])
    end = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    jaxhetero.initialize()
    rank, size = jaxhetero.rank(), jaxhetero.size()
    # Of any bits, so that another order of the additions would be seen. A power of two makes each round another.
    base = np.random.default_rng(7).standard_normal(int(megabytes * 2**20) // 4, np.float32)
    expected = base.copy()
    for other in range(1, size):
        expected += base * np.float32(1 + other / 7)
    total = jax.jit(jaxhetero.psum)
    digest = hashlib.sha256()
    for number in range(rounds):
        # All workers stop after the same round.
        if end is not None and number % 5 == 0 and int(jaxhetero.pmax(np.int32(end.exists()))):
            break
        scale = np.float32(2 ** (number % 5))
        own = base * np.float32(1 + rank / 7) * scale
        begun = time.perf_counter()
        found = np.asarray(total(own))
        ms = 1000 * (time.perf_counter() - begun)
        assert np.array_equal(found, expected * scale), f"round {number}"
        digest.update(found.data)
        if rank == 0:
            print(f"round {number} {ms:.1f}", flush=True)
    print(json.dumps({"metrics": asdict(jaxhetero.metrics()), "digest": digest.hexdigest()}))
    jaxhetero.shutdown()


if __name__ == "__main__":
    main()
