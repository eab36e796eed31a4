"""A few sums; prints their bits, and what of them went through memory shared with reducers."""

import functools
import json
from typing import Any

import jax
import numpy as np

import jaxhetero


def main() -> None:
    jaxhetero.initialize()
    random = np.random.default_rng(jaxhetero.rank())
    total = jax.jit(jaxhetero.psum)
    digests: list[Any] = []
    narrow_total = jax.jit(functools.partial(jaxhetero.psum, wire_dtype="bfloat16"))
    for summed, count in ((total, 1), (total, 1000), (total, 3_000_000), (narrow_total, 3_000_000), (total, 7)):
        result = np.asarray(summed(random.standard_normal(count, dtype=np.float32)))
        digests.append([float(result[0]), int(result.view(np.uint32).astype(np.uint64).sum())])
    metrics = jaxhetero.metrics()
    jaxhetero.shutdown()
    shared = {name: getattr(metrics, name) for name in ("shared_connection_count", "lent_bytes")}
    print(json.dumps({"digests": digests, **shared}))


if __name__ == "__main__":
    main()
