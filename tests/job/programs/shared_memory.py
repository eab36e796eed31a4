"""A few sums; prints their bits, and how they came to the reducers and back."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxhetero


def thread_count() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def main() -> None:
    threads = -thread_count()
    jaxhetero.initialize()
    threads += thread_count()
    random = np.random.default_rng(jaxhetero.rank())
    total = jax.jit(jaxhetero.psum)
    digests: list[Any] = []
    narrow_total = jax.jit(functools.partial(jaxhetero.psum, wire_dtype="bfloat16"))
    for summed, count in ((total, 1), (total, 1000), (total, 3_000_000), (narrow_total, 3_000_000), (total, 7)):
        result = np.asarray(summed(random.standard_normal(count, dtype=np.float32)))
        digests.append([float(result[0]), int(result.view(np.uint32).astype(np.uint64).sum())])
    has_libfabric = "libfabric" in Path("/proc/self/maps").read_text()
    metrics = jaxhetero.metrics()
    jaxhetero.shutdown()
    names = ("shared_connection_count", "lent_bytes", "fabric_connection_count", "fabric_retry_count")
    counts = {name: getattr(metrics, name) for name in names}
    print(json.dumps({"digests": digests, "has_libfabric": has_libfabric, "threads": threads, **counts}))


if __name__ == "__main__":
    main()
