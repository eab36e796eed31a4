"""One worker process of one engine. It runs the requests of a team, and sleeps between them.

``python -m bench.harness.worker LABEL KIND SOCKET``. Requests and answers are lines of JSON over a Unix socket. Unlike
TCP, such a socket works across network namespaces, and its traffic does not use the measured interfaces.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from bench.accelerator.across import AcrossEmulation
from bench.accelerator.emulation import Emulation
from bench.accelerator.stages import StagedEmulation
from bench.engines import pattern
from bench.engines.in_process import ENGINES, Arrays, Engine
from bench.engines.optimizer import OptimizerStep
from bench.engines.specs import COLLECTIVES
from jaxhetero.pipeline import Interconnect


class Worker:
    """The requests are the names of its public methods."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._all_reduce = engine.compile(self._sum_each)
        self._programs = {name: engine.compile(partial(self._collect_each, name)) for name in COLLECTIVES[1:]}
        self._collective = "psum"
        self._all_reduce_in_place = engine.compile(self._sum_each_computed, donated=0)
        self._given: Arrays = []
        self._result: Arrays = []
        self._in_place = False
        self._sum_count = 0
        self._bucket_count = 1
        self._shape: dict[str, Any] = {}
        self._values: str | None = None
        self._emulation: Emulation | None = None
        self._across: AcrossEmulation | None = None
        self._stages: StagedEmulation | None = None
        self._optimizer_steps: list[OptimizerStep] = []

    def _sum_each(self, arrays: Arrays) -> Arrays:
        """One all-reduce for each array. No data dependence orders them."""
        return [self._engine.psum([array], f"bench {index}")[0] for index, array in enumerate(arrays)]

    def _collect_each(self, collective: str, arrays: Arrays) -> Arrays:
        return [self._engine.collect(collective, [array], f"bench {index}")[0] for index, array in enumerate(arrays)]

    def _sum_each_computed(self, arrays: Arrays) -> Arrays:
        """The same for arrays that count as computed by the program, like the gradients of a train step."""
        return self._sum_each([self._engine.computed(array) for array in arrays])

    def greet(self) -> None:
        """All-reduce one element, so that no payload includes the cost of the first all-reduce."""
        jax.block_until_ready(self._all_reduce([self._engine.put(np.ones(1, np.float32))]))

    def prepare(
        self,
        count: int,
        dtype: str,
        exact_dtype: str,
        seed: int,
        bucket_count: int,
        in_place: bool,
        collective: str,
        values: str | None,
        warmup: int,
    ) -> dict[str, Any]:
        """Make this worker's contribution, compile, and run the collective ``warmup`` times."""
        engine = self._engine
        self._in_place, self._collective, self._sum_count = in_place, collective, 0
        self._shape = {"count": count, "dtype": dtype, "worker_count": engine.worker_count, "seed": seed}
        self._shape["exact_dtype"] = exact_dtype
        self._bucket_count = bucket_count
        self._values = values
        if values is None:
            whole = pattern.contribution(rank=engine.rank, **self._shape)
        else:
            whole = pattern.read_contribution(values, count, dtype, engine.rank)
        parts = self._cut(whole)
        if collective == "all_gather":
            parts = self._own_rows(parts)
        self._given = jax.block_until_ready([engine.put(part) for part in parts])
        del parts, whole
        # Otherwise memory that the pattern took would count as the engine's.
        ctypes.CDLL(None).malloc_trim(0)
        for _ in range(warmup):
            self._run_all_reduce()
        gc.collect()  # here, where no CPU time is counted
        return {}

    def measure(self, count: int) -> dict[str, Any]:
        """All-reduce once to start together, then ``count`` times. Answers with the end time of each all-reduce."""
        return {"ends_ns": _time(self._run_all_reduce, count)}

    def check(self) -> dict[str, Any]:
        """Count the wrong elements of the last result, and free the arrays that ``prepare`` made."""
        parts = [part.addressable_data(0) if isinstance(part, jax.Array) else part for part in self._result]
        result = np.concatenate([np.asarray(part) for part in parts])
        self._given = self._result = []
        return {"wrong_count": pattern.wrong_count(result, self._expected())}

    def _expected(self) -> np.ndarray:
        if self._collective == "all_gather":
            return pattern.expected_gather(**self._shape, bucket_count=self._bucket_count)
        if self._values is not None:
            if self._shape["exact_dtype"] in pattern.NUMBERS:
                count, workers = self._shape["count"], self._shape["worker_count"]
                return pattern.sum_in_numbers(self._values, count, self._shape["exact_dtype"], workers)
            shape = {name: self._shape[name] for name in ("count", "dtype", "worker_count")}
            return pattern.sum_of_files(self._values, **shape)
        total = pattern.expected_sum(**self._shape, sum_count=self._sum_count if self._in_place else 1)
        return total if self._collective == "psum" else np.concatenate(self._own_rows(self._cut(total)))

    def _cut(self, whole: np.ndarray) -> list[np.ndarray]:
        return np.array_split(whole, self._bucket_count)

    def _own_rows(self, parts: list[np.ndarray]) -> list[np.ndarray]:
        return [pattern.own_row(part, self._engine.rank, self._engine.worker_count) for part in parts]

    def _run_all_reduce(self) -> None:
        self._sum_count += 1
        self._result = []
        self._result = self.all_reduce(self._given, self._in_place)
        if self._in_place:
            self._given = self._result

    def all_reduce(self, arrays: Arrays, in_place: bool) -> Arrays:
        """Not a request: the sums of ``arrays``. In place they take the memory of ``arrays``, which are then gone."""
        program = self._all_reduce_in_place if in_place else self._programs.get(self._collective, self._all_reduce)
        sums: Arrays = jax.block_until_ready(program(arrays))
        return sums

    def prepare_emulation(self, **schedule: Any) -> dict[str, Any]:
        """Make the gradients of a train step and compile its programs; see ``Emulation``."""
        self._emulation = Emulation(self._engine, **schedule)
        gc.collect()
        return {}

    def measure_emulation(self, program: str, count: int) -> dict[str, Any]:
        """Run a program once to warm up, then ``count`` times. Answers with the begin and the end of each run."""
        assert self._emulation is not None
        gc.disable()
        begins_ns, ends_ns = [], []
        for _ in range(count + 1):
            self._emulation.prepare()
            begins_ns.append(time.monotonic_ns())
            self._emulation.run(program)
            ends_ns.append(time.monotonic_ns())
        gc.enable()
        return {"begins_ns": begins_ns[1:], "ends_ns": ends_ns[1:]}

    def check_emulation(self) -> dict[str, Any]:
        """Count the wrong elements of the last sums."""
        assert self._emulation is not None
        return {"wrong_count": self._emulation.wrong_count()}

    def prepare_across(self, **schedule: Any) -> dict[str, Any]:
        """Make the gradients of train steps across which sums go on, and compile; see ``AcrossEmulation``."""
        self._across = AcrossEmulation(**schedule)
        self._across.measure(1)
        gc.collect()
        return {"wrong_count": self._across.wrong_count()}

    def measure_across(self, count: int) -> dict[str, Any]:
        """Run ``count`` steps one behind the other. Answers with when they begin and end, and with wrong elements."""
        assert self._across is not None
        self.greet()
        gc.disable()
        begin_ns, end_ns = self._across.measure(count)
        gc.enable()
        return {"begins_ns": [begin_ns], "ends_ns": [end_ns], "wrong_count": self._across.wrong_count()}

    def prepare_optimizer(self, **how: Any) -> dict[str, Any]:
        """Make an optimizer and its step, and run it once; see ``OptimizerStep``."""
        self._optimizer_steps.append(OptimizerStep(**how))
        return {}

    def measure_optimizer(self, number: int, count: int) -> dict[str, Any]:
        """Run the step of the ``number``-th optimizer ``count`` times."""
        return self._optimizer_steps[number].measure(count)

    def prepare_stages(self, bytes_per_s: float, latency_s: float, **model: Any) -> dict[str, Any]:
        """Cut an emulated model over the workers, and run it once; see ``StagedEmulation``."""
        self._stages = StagedEmulation(network=Interconnect(bytes_per_s, latency_s), **model)
        self._stages.run()
        gc.collect()
        return self._stages.facts()

    def measure_stages(self, count: int) -> dict[str, Any]:
        """Run ``count`` steps, which begin together. Answers with the begin and the end of each."""
        assert self._stages is not None
        gc.disable()
        begins_ns, ends_ns = [], []
        for _ in range(count):
            self.greet()
            begins_ns.append(time.monotonic_ns())
            self._stages.run()
            ends_ns.append(time.monotonic_ns())
        gc.enable()
        return {"begins_ns": begins_ns, "ends_ns": ends_ns}

    def stop(self) -> dict[str, Any]:
        self._engine.close()
        return {}


def _time(run: Callable[[], None], count: int) -> list[int]:
    gc.disable()
    ends_ns = []
    for _ in range(count + 1):
        run()
        ends_ns.append(time.monotonic_ns())
    gc.enable()
    return ends_ns


def main() -> None:
    label, kind, path = sys.argv[1:]
    engine = ENGINES[kind]()
    worker = Worker(engine)
    worker.greet()
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
