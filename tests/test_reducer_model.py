"""The reducer's state machine against a model of ten lines, under orders of events that hypothesis thinks up."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

ROOT = Path(__file__).parent.parent
CORE = ["checksum", "reduce", "reducer", "wire"]
SOURCES = ["tests/programs/reducer_machine.cc", *(f"xla_ffi/{name}.cc" for name in CORE)]
OPS = 2
CHUNK = 3
CHUNKS = 4
TOTAL = CHUNK * CHUNKS - 1  # the last chunk is short
WINDOW = 2


class Model:
    """What a reducer is: once everybody's piece of a chunk is there, everybody gets the sum."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.pieces: defaultdict[tuple[int, int, int], dict[int, list[int]]] = defaultdict(dict)

    def push(self, rank: int, op: int, round_number: int, chunk: int, values: list[int]) -> list[str]:
        pieces = self.pieces[op, round_number, chunk]
        pieces[rank] = values
        if len(pieces) < self.workers:
            return []
        total = " ".join(map(str, map(sum, zip(*pieces.values(), strict=True))))
        head = f"{op} {round_number} {chunk * CHUNK} {int(chunk == CHUNKS - 1)}"
        return [f"result {worker} {head} {total}" for worker in range(self.workers)]


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real Reducer behind a line protocol."""
    path = tmp_path_factory.mktemp("reducer") / "machine"
    subprocess.run(["c++", "-std=c++20", "-O0", "-I.", "-o", path, *SOURCES], cwd=ROOT, check=True)
    return path


class Reducer:
    def __init__(self, binary: Path) -> None:
        self._process = subprocess.Popen([binary], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, *words: object) -> list[str]:
        """The lines that answer a command; the last is how it went."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(*words, file=self._process.stdin, flush=True)
        lines = [self._process.stdout.readline().rstrip("\n")]
        while lines[-1] != "ok" and not lines[-1].startswith("error"):
            assert lines[-1], "the reducer crashed"
            lines.append(self._process.stdout.readline().rstrip("\n"))
        return lines

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def reducer(binary: Path) -> Iterator[Reducer]:
    reducer = Reducer(binary)
    yield reducer
    reducer.close()


def make_machine(reducer: Reducer) -> type[RuleBasedStateMachine]:
    """The state machine of hypothesis; a class of its own per test, because it takes no arguments."""
    ranks = st.integers(0, 3)
    ops = st.integers(0, OPS - 1)

    class Interleaving(RuleBasedStateMachine):
        """Honest workers, until one errs or dies; afterwards everybody must have been told."""

        @initialize(workers=st.integers(1, 4), quiet_steps=st.sampled_from([2, 10, 30, 1000]))
        def start(self, workers: int, quiet_steps: int) -> None:
            self.quiet_steps = quiet_steps  # before anything goes wrong
            self.workers = workers
            self.model = Model(workers)
            self.begun: dict[int, tuple[int, int, int, list[int]]] = {}
            self.pushed = [[0] * OPS for _ in range(workers)]  # chunks, over all rounds
            self.returned = [[0] * OPS for _ in range(workers)]
            self.gone: set[int] = set()
            self.over = False
            assert reducer("new", workers, CHUNK, WINDOW) == ["ok"]
            for rank in range(workers):
                for op in range(OPS):
                    assert reducer("describe", rank, op) == ["ok"]

        def can_begin(self, rank: int, op: int) -> bool:
            """As a worker's window has it: the next round only after the last chunk of this one is back."""
            pushed, returned = self.pushed[rank][op], self.returned[rank][op]
            return not self.gone and pushed - returned < WINDOW and pushed // CHUNKS == returned // CHUNKS

        def header(self, rank: int, op: int, index: int) -> tuple[int, ...]:
            chunk = index % CHUNKS
            last = chunk == CHUNKS - 1
            count = TOTAL - chunk * CHUNK if last else CHUNK
            return rank, op, index // CHUNKS, chunk * CHUNK, count, TOTAL, int(last)

        def may_err(self, rank: int) -> bool:
            self.quiet_steps -= 1
            return self.quiet_steps < 0 and rank < self.workers and rank not in self.gone and not self.over

        @precondition(lambda self: not self.over)
        @rule(moves=st.lists(st.tuples(st.integers(0, 1000), st.integers(-5, 5)), min_size=10, max_size=60))
        def go_on(self, moves: list[tuple[int, int]]) -> None:
            """Headers and payloads of honest workers, in any order that they may come in."""
            for choice, seed in moves:
                places = [(rank, op) for rank in range(self.workers) for op in range(OPS)]
                possible = [(rank, op) for rank, op in places if rank in self.begun or self.can_begin(rank, op)]
                if not possible:
                    return
                rank, op = possible[choice % len(possible)]
                if rank in self.begun:
                    self.commit(rank)
                else:
                    self.begin(rank, op, seed)

        def begin(self, rank: int, op: int, seed: int) -> None:
            index = self.pushed[rank][op]
            header = self.header(rank, op, index)
            assert reducer("begin", *header) == ["ok"]
            self.begun[rank] = (op, *divmod(index, CHUNKS), [seed * 10 + i for i in range(header[4])])
            self.pushed[rank][op] += 1

        def commit(self, rank: int) -> None:
            op, round_number, chunk, values = self.begun.pop(rank)
            expected = self.model.push(rank, op, round_number, chunk, values)
            assert reducer("commit", rank, *values) == [*expected, "ok"]
            for worker in range(self.workers if expected else 0):
                self.returned[worker][op] += 1

        @rule(rank=ranks, op=ops, step=st.sampled_from([-2, -1, 1, 2, CHUNKS]))
        def push_out_of_order(self, rank: int, op: int, step: int) -> None:
            """A chunk that was pushed already, or is not yet due."""
            if not self.may_err(rank) or rank in self.begun or self.gone:
                return
            pushed = self.pushed[rank][op]
            index = pushed + step
            if index < 0 or (pushed % CHUNKS == 0 and index // CHUNKS == pushed // CHUNKS):
                return  # a round's first chunk defines where the shard begins
            *frames, end = reducer("begin", *self.header(rank, op, index))
            assert end.startswith("error"), (index, end)
            self.expect_fault(frames + (reducer("lose", rank)[:-1] if not frames else []), {rank}, optional=rank)

        @rule(rank=ranks)
        def die(self, rank: int) -> None:
            """At any moment, also between the header and the payload of a chunk."""
            if self.may_err(rank):
                self.expect_fault(reducer("lose", rank)[:-1], {rank})

        @rule(rank=ranks)
        def leave(self, rank: int) -> None:
            """In order. Whoever waits for this worker must be told."""
            if not self.may_err(rank) or rank in self.begun:
                return
            awaited = any(
                self.pushed[other][op] > self.returned[other][op] and self.pushed[rank][op] == self.returned[rank][op]
                for other in range(self.workers)
                for op in range(OPS)
            )
            frames = reducer("leave", rank)[:-1]
            self.gone.add(rank)
            if awaited:
                self.expect_fault(frames, set())

        def expect_fault(self, frames: list[str], dead: set[int], optional: int = -1) -> None:
            """Everybody who is still there is told; nothing else is sent."""
            told = {int(frame.split()[1]) for frame in frames if frame.startswith("fault")}
            assert len(told) == len(frames)
            assert told - {optional} == set(range(self.workers)) - self.gone - dead
            self.over = True
            # From here on nobody can go on.
            for rank in set(range(self.workers)) - self.gone:
                assert reducer("begin", *self.header(rank, 0, self.pushed[rank][0]))[-1].startswith("error")

    return Interleaving


def test_any_interleaving_gives_what_the_model_gives(reducer: Reducer) -> None:
    run_state_machine_as_test(
        make_machine(reducer),
        settings=settings(
            max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
