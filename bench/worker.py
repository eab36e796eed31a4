"""One worker process of one engine: does what the controller tells it, and sleeps in between.

``python -m bench.worker LABEL KIND SOCKET``. Requests and answers are lines of JSON over a Unix socket, which unlike
TCP reaches across network namespaces and does not disturb what is measured.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import time
from typing import Any

import jax
import numpy as np

from bench import pattern
from bench.engines import ENGINES, Engine


class Worker:
    """Answers to the requests, by their names."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._step = engine.make_step()
        self._given: jax.Array | None = None
        self._result: jax.Array | None = None
        self._shape: dict[str, Any] = {}

    def prepare(self, count: int, dtype: str, seed: int, warmup: int) -> dict[str, Any]:
        """Make this worker's contribution, compile, and all-reduce ``warmup`` times."""
        engine = self._engine
        self._shape = {"count": count, "dtype": dtype, "worker_count": engine.worker_count, "seed": seed}
        self._given = jax.block_until_ready(engine.put(pattern.contribution(rank=engine.rank, **self._shape)))
        for _ in range(warmup):
            self._all_reduce()
        return {}

    def measure(self, count: int) -> dict[str, Any]:
        """All-reduce once to begin together and ``count`` times more; when each one ended."""
        gc.collect()
        gc.disable()
        ends_ns = []
        for _ in range(count + 1):
            self._all_reduce()
            ends_ns.append(time.monotonic_ns())
        gc.enable()
        return {"ends_ns": ends_ns}

    def check(self) -> dict[str, Any]:
        """How many elements of the last result are wrong. Frees what ``prepare`` made."""
        assert self._result is not None
        result = np.asarray(self._result.addressable_data(0))
        self._given = self._result = None
        return {"wrong_count": pattern.wrong_count(result, pattern.expected_sum(**self._shape))}

    def stop(self) -> dict[str, Any]:
        self._engine.close()
        return {}

    def _all_reduce(self) -> None:
        assert self._given is not None
        self._result = jax.block_until_ready(self._step(self._given))


def main() -> None:
    label, kind, path = sys.argv[1:]
    engine = ENGINES[kind]()
    worker = Worker(engine)
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(path)
        stream = channel.makefile("rw", encoding="utf-8")
        answer: dict[str, Any] = {"label": label, "rank": engine.rank, "pid": os.getpid()}
        while True:
            print(json.dumps(answer), file=stream, flush=True)
            line = stream.readline()
            if not line:
                return
            request = json.loads(line)
            answer = getattr(worker, request.pop("do"))(**request)


if __name__ == "__main__":
    main()
