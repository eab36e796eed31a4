"""The reducer's state machine against a model of ten lines, under orders of events that hypothesis thinks up.

Several reducers and workers that keep to the rules of failover, without sockets: reducers die and come, so views
change, and what the old view has left undone is pushed again. Every total must be the sum of what all contributed. Of a
scatter, a worker must get its row alone; of a gather, it pushes its row alone. An op may have a group: then all of this
holds among its members, and the other workers hear nothing of it.
"""

from __future__ import annotations

import itertools
import subprocess
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
CORE = ROOT / "xla_ffi"
SOURCES = [
    ROOT / "tests/job/programs/reducer_machine.cc",
    *(path for folder in ("sum", "codec", "update", "wire") for path in (CORE / folder).glob("*.cc")),
    *(CORE / "reducer").glob("state_machine*.cc"),
    *(CORE / "reducer" / f"{name}.cc" for name in ("backups", "kept_states", "state_op")),
    CORE / "base" / "fd.cc",
    *(CORE / "transport" / f"{name}.cc" for name in ("lent_memory", "shared_memory")),
]
SUM, SCATTER, GATHER = 1, 5, 6
KINDS = (SUM, SCATTER, GATHER)  # of each op
OPS = len(KINDS)
CHUNK = 2
TOTAL = 7  # elements of a sum's bucket: shards of one to four chunks, of which the last may be short
ROW = 3  # elements of a row, so that chunks lie in one row or in two
WINDOW = 2


class Op(NamedTuple):
    kind: int
    members: tuple[int, ...]
    """The ranks that take part, in order."""

    @property
    def total_count(self) -> int:
        return TOTAL if self.kind == SUM else ROW * len(self.members)

    def row(self, rank: int) -> range:
        place = self.members.index(rank)
        return range(ROW * place, ROW * (place + 1))

    def is_pushed(self, rank: int, element: int) -> bool:
        return self.kind != GATHER or element in self.row(rank)

    def answer(self, rank: int, elements: range, total: list[int]) -> list[int]:
        """What a worker is sent of a chunk; nothing of what it has."""
        if self.kind == GATHER and all(element in self.row(rank) for element in elements):
            return []
        is_wanted = [self.kind != SCATTER or element in self.row(rank) for element in elements]
        return list(itertools.compress(total, is_wanted))


class Chunk(NamedTuple):
    """Of a round, as a reducer gets it."""

    op: int
    round: int
    offset: int
    last: int


class Model:
    """What a view's reducers are: once every member's piece of a chunk is there, every member is answered."""

    def __init__(self, ops: list[Op]) -> None:
        self.ops = ops
        self.pieces: defaultdict[Chunk, dict[int, dict[int, int]]] = defaultdict(dict)

    def push(self, rank: int, chunk: Chunk, count: int, piece: dict[int, int]) -> list[str]:
        op = self.ops[chunk.op]
        pieces = self.pieces[chunk]
        pieces[rank] = piece
        if len(pieces) < len(op.members):
            return []
        elements = range(chunk.offset, chunk.offset + count)
        total = [sum(values.get(element, 0) for values in pieces.values()) for element in elements]
        return [
            " ".join(map(str, ["result", worker, *chunk, count, *op.answer(worker, elements, total)]))
            for worker in op.members
        ]


class Segment:
    """What one worker has to do with one reducer in the round of an op that it runs."""

    def __init__(self, reducer: int, begin: int, end: int) -> None:
        self.reducer = reducer
        self.chunks = [(at, min(at + CHUNK, end)) for at in range(begin, end, CHUNK)]
        self.pushed = 0
        self.returned = 0

    @property
    def may_push(self) -> bool:
        return self.pushed < len(self.chunks) and self.pushed - self.returned < WINDOW


class Worker:
    """An honest one: what it runs, what it has completed, and what it keeps for those who have not."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.completed = [0] * OPS
        self.running = [0] * OPS
        self.segments: list[list[Segment]] = [[] for _ in range(OPS)]
        self.kept: dict[tuple[int, int], list[int]] = {}  # contributions, by op and round
        # By reducer, the chunk, its size and its payload, where the header is there and the payload is not.
        self.begun: dict[int, tuple[Chunk, int, dict[int, int]]] = {}
        self.coming: defaultdict[int, deque[str]] = defaultdict(deque)  # by reducer: totals on their way here

    def begin_round(self, op: int, number: int, view: list[int], total: int) -> None:
        self.running[op] = number
        cuts = [total * i // len(view) for i in range(len(view) + 1)]
        # Another first reducer for each op, as with small buckets.
        order = view[op % len(view) :] + view[: op % len(view)]
        self.segments[op] = [Segment(*place) for place in zip(order, cuts, cuts[1:], strict=False)]

    def segment_at(self, op: int, reducer: int) -> Segment:
        [segment] = [segment for segment in self.segments[op] if segment.reducer == reducer]
        return segment

    def chunk(self, op: int, segment: Segment, index: int) -> tuple[Chunk, int]:
        begin, end = segment.chunks[index]
        return Chunk(op, self.running[op], begin, int(index == len(segment.chunks) - 1)), end - begin


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real Reducer behind a line protocol."""
    path = tmp_path_factory.mktemp("reducer") / "machine"
    subprocess.run(["c++", "-std=c++20", "-O0", "-I.", "-o", path, *SOURCES], cwd=ROOT, check=True)
    return path


class Reducers:
    def __init__(self, binary: Path) -> None:
        self._process = subprocess.Popen([binary], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, *words: object) -> list[str]:
        """The lines that answer a command; the last is how it went."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(*words, file=self._process.stdin, flush=True)
        lines = [self._process.stdout.readline().rstrip("\n")]
        while lines[-1] != "ok" and not lines[-1].startswith("error"):
            assert lines[-1], "the reducers crashed"
            lines.append(self._process.stdout.readline().rstrip("\n"))
        return lines

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def reducers(binary: Path) -> Iterator[Reducers]:
    reducers = Reducers(binary)
    yield reducers
    reducers.close()


class Job:
    """Honest workers and reducers that die and come, until a worker errs or dies: then everybody must be told."""

    def __init__(self, reducers: Reducers, workers: int, groups: list[set[int]], view: int, seen: Counter[str]) -> None:
        everybody = set(range(workers))
        chosen = [sorted(group & everybody or everybody) for group in groups]
        self.ops = [Op(kind, tuple(group)) for kind, group in zip(KINDS, chosen, strict=True)]
        self.reducers = reducers
        self.seen = seen  # what happened, counted
        self.workers = [Worker(rank) for rank in range(workers)]
        self.given: dict[tuple[int, int, int], list[int]] = {}  # what was contributed, by op, round and rank
        self.gone: set[int] = set()
        self.over = False
        self.begin_view(list(range(view)))

    # --- Views.

    def begin_view(self, view: list[int]) -> None:
        """Everybody connects anew: what was on its way is lost, and so is all that reducers knew."""
        self.view = view
        self.dead: set[int] = set()
        self.model = Model(self.ops)
        self.totals: defaultdict[tuple[int, int], int] = defaultdict(int)  # chunks, by reducer and op
        self.pushes: defaultdict[tuple[int, int, int], int] = defaultdict(int)  # the same by reducer, op and rank
        for reducer in view:
            assert self.reducers("new", reducer, len(self.workers), CHUNK, WINDOW) == ["ok"]
            for number, op in enumerate(self.ops):
                group = op.members if len(op.members) < len(self.workers) else ()
                told = (number, self.next_round(number), op.kind, op.total_count, *group)
                for rank in op.members:
                    assert self.reducers("describe", reducer, rank, *told) == ["ok"]
        for op in range(OPS):
            number = self.next_round(op)
            for worker in self.members(op):
                self.seen["replay"] += worker.completed[op] > number
                worker.begin_round(op, number, view, self.ops[op].total_count)
        for worker in self.workers:
            worker.begun.clear()
            worker.coming.clear()

    def next_round(self, op: int) -> int:
        """Those who have completed a round that others have not push it again for them."""
        return min(worker.completed[op] for worker in self.members(op))

    def members(self, op: int) -> list[Worker]:
        return [self.workers[rank] for rank in self.ops[op].members]

    @property
    def living(self) -> list[int]:
        return [reducer for reducer in self.view if reducer not in self.dead]

    def lose_reducer(self, random: Random) -> None:
        """It takes nothing any more; what it has sent may still come. Until all are told, the others go on."""
        if len(self.living) > 1:
            self.dead.add(random.choice(self.living))
            self.seen["reducer's death"] += 1

    def change_view(self, random: Random) -> None:
        """Because somebody died or comes. Of what was on its way, some workers get more than others."""
        for worker in self.workers:
            for reducer, coming in worker.coming.items():
                for _ in range(random.choice([0, len(coming)])):
                    self.take_total(worker, reducer)
        name = max(self.view) + 1
        newcomers = range(name, name + random.randrange(3))
        self.begin_view([*self.living, *newcomers][-3:])

    # --- What honest workers do.

    def go_on(self, random: Random) -> None:
        """Headers, payloads and totals, in any order that they may come in; to one worker perhaps no total comes."""
        deaf = random.randrange(2 * len(self.workers))
        for _ in range(random.choice([10, 100])):
            possible = list(self.possible(deaf, random))
            if self.over or not possible:
                return
            random.choice(possible)()

    def possible(self, deaf: int, random: Random) -> Iterator[Callable[[], None]]:
        for worker in self.workers:
            for reducer, coming in worker.coming.items():
                if coming and worker.rank != deaf:
                    yield partial(self.take_total, worker, reducer)
            for reducer in worker.begun.keys() - self.dead:
                yield partial(self.commit, worker, reducer)
            for op in range(OPS):
                for segment in worker.segments[op]:
                    busy = self.gone or segment.reducer in self.dead or segment.reducer in worker.begun
                    if segment.may_push and not busy:
                        yield partial(self.begin, worker, op, segment, random)

    def contribution(self, worker: Worker, op: int, random: Random) -> list[int]:
        number = worker.running[op]
        if number < worker.completed[op]:
            return worker.kept[op, number]  # a replay: it must have been kept
        total = self.ops[op].total_count
        return self.given.setdefault((op, number, worker.rank), [random.randrange(-99, 100) for _ in range(total)])

    def begin(self, worker: Worker, op: int, segment: Segment, random: Random) -> None:
        chunk, count = worker.chunk(op, segment, segment.pushed)
        values = self.contribution(worker, op, random)
        elements = range(chunk.offset, chunk.offset + count)
        assert self.begin_chunk(worker, segment, chunk, count) == ["ok"]
        piece = {element: values[element] for element in elements if self.ops[op].is_pushed(worker.rank, element)}
        worker.begun[segment.reducer] = chunk, count, piece
        segment.pushed += 1
        self.pushes[segment.reducer, op, worker.rank] += 1

    def begin_chunk(self, worker: Worker, segment: Segment, chunk: Chunk, count: int) -> list[str]:
        op, number, offset, last = chunk
        pushed = sum(self.ops[op].is_pushed(worker.rank, element) for element in range(offset, offset + count))
        return self.reducers("begin", segment.reducer, worker.rank, op, number, offset, count, last, pushed)

    def commit(self, worker: Worker, reducer: int) -> None:
        chunk, count, piece = worker.begun.pop(reducer)
        expected = self.model.push(worker.rank, chunk, count, piece)
        assert self.reducers("commit", reducer, worker.rank, *piece.values()) == [*expected, "ok"]
        self.totals[reducer, chunk.op] += bool(expected)
        for other, frame in zip(self.members(chunk.op), expected, strict=False):
            other.coming[reducer].append(frame)

    def take_total(self, worker: Worker, reducer: int) -> None:
        words = map(int, worker.coming[reducer].popleft().split()[1:])
        rank, chunk = next(words), Chunk(*(next(words) for _ in Chunk._fields))
        count, values = next(words), list(words)
        op, number = chunk.op, chunk.round
        segment = worker.segment_at(op, reducer)
        assert (rank, (chunk, count)) == (worker.rank, worker.chunk(op, segment, segment.returned))
        elements = range(chunk.offset, chunk.offset + count)
        true = [
            sum(self.given[op, number, r][e] for r in self.ops[op].members if self.ops[op].is_pushed(r, e))
            for e in elements
        ]
        assert values == self.ops[op].answer(rank, elements, true)
        segment.returned += 1
        replays = number < worker.completed[op]
        if not replays:
            # Everybody has come to this round, so nobody needs the one before.
            worker.kept.pop((op, number - 1), None)
            worker.kept[op, number] = self.given[op, number, worker.rank]
        if any(segment.returned < len(segment.chunks) for segment in worker.segments[op]):
            return
        worker.completed[op] += not replays
        self.seen["round"] += not replays
        self.seen["round of a group"] += not replays and len(self.ops[op].members) < len(self.workers)
        worker.begin_round(op, number + 1, self.view, self.ops[op].total_count)

    # --- What workers do wrong.

    def culprit(self, random: Random) -> Worker:
        return random.choice([worker for worker in self.workers if worker.rank not in self.gone])

    def push_out_of_order(self, random: Random) -> None:
        """A chunk that was pushed already, or is not yet due."""
        worker, reducer, op = self.culprit(random), random.choice(self.living), random.randrange(OPS)
        if worker.rank not in self.ops[op].members:
            return
        segment = worker.segment_at(op, reducer)
        indices = [index for index in range(len(segment.chunks)) if index != segment.pushed]
        if self.gone or segment.pushed == 0 or not indices:
            return  # a round's first chunk defines where the shard begins
        self.push_wrongly(worker, segment, *worker.chunk(op, segment, random.choice(indices)))

    def push_after_the_last(self, random: Random) -> None:
        """A chunk that would be due, had the one before it not been the last."""
        places = [(worker, op) for worker in self.workers for op in range(OPS)]
        done = [
            (worker, op, segment)
            for worker, op in places
            for segment in worker.segments[op]
            if segment.pushed == len(segment.chunks) and segment.reducer not in self.dead
        ]
        if self.gone or not done:
            return
        worker, op, segment = random.choice(done)
        end = segment.chunks[-1][1]
        self.push_wrongly(worker, segment, Chunk(op, worker.running[op], end, random.randrange(2)), 1)
        self.seen["one more chunk"] += 1

    def push_wrongly(self, worker: Worker, segment: Segment, chunk: Chunk, count: int) -> None:
        reducer = segment.reducer
        if reducer in worker.begun:
            self.commit(worker, reducer)
        *frames, end = self.begin_chunk(worker, segment, chunk, count)
        assert end.startswith("error"), end
        self.seen["worker's error"] += 1
        frames += self.reducers("lose", reducer, worker.rank)[:-1] if not frames else []
        self.expect_fault(reducer, frames, {worker.rank}, optional=worker.rank)

    def join_another_group(self, random: Random) -> None:
        """It says of an op that it is one of other workers than the rest says, or than it is one of itself."""
        culprits = [worker for worker in self.workers if worker.rank not in self.gone]
        places = [(w, op) for w in culprits for op in range(OPS) if w.rank not in self.ops[op].members]
        if not places:
            return
        (worker, op), reducer = random.choice(places), random.choice(self.living)
        others = random.choice([self.ops[op].members, (worker.rank,)])
        kind, total = self.ops[op].kind, self.ops[op].total_count
        *frames, end = self.reducers("describe", reducer, worker.rank, op, 0, kind, total, *others)
        assert end.startswith("error"), end
        self.seen["another group"] += 1
        self.expect_fault(reducer, frames, set())

    def die(self, random: Random) -> None:
        """At any moment, also between the header and the payload of a chunk."""
        worker = self.culprit(random)
        self.seen["worker's death"] += 1
        for reducer in self.living:
            self.expect_fault(reducer, self.reducers("lose", reducer, worker.rank)[:-1], {worker.rank})

    def leave(self, random: Random) -> None:
        """In order. Whoever waits for this worker must be told."""
        worker = self.culprit(random)
        if worker.begun or len(self.gone) + 1 == len(self.workers):
            return
        self.gone.add(worker.rank)
        self.seen["worker leaves"] += 1
        for reducer in self.living:
            frames = self.reducers("leave", reducer, worker.rank)[:-1]
            if any(self.is_awaited(worker, reducer, op) for op in range(OPS)):
                self.expect_fault(reducer, frames, set())
            else:
                assert frames == []

    def is_awaited(self, worker: Worker, reducer: int, op: int) -> bool:
        if worker not in self.members(op):
            return False
        done = self.totals[reducer, op]
        pushes = [self.pushes[reducer, op, other.rank] for other in self.members(op)]
        return max(pushes) > done and self.pushes[reducer, op, worker.rank] == done

    def expect_fault(self, reducer: int, frames: list[str], dead: set[int], optional: int = -1) -> None:
        """Everybody who is still there is told; nothing else is sent."""
        told = {int(frame.split()[1]) for frame in frames if frame.startswith("fault")}
        assert len(told) == len(frames)
        there = set(range(len(self.workers))) - self.gone
        assert told - {optional} == there - dead
        self.over = True
        # From here on nobody can go on.
        for rank in there:
            assert self.reducers("begin", reducer, rank, 0, 0, 0, 1, 0, 1)[-1].startswith("error")


Event = Callable[[Job, Random], None]


def events(first: int, most: int, *kinds: Event) -> st.SearchStrategy[list[tuple[Event, int]]]:
    """So many, each with what its own choices come from."""
    return st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 1 << 32)), min_size=first, max_size=most)


SOME_GROUPS: list[set[int]] = [{0, 1}] * OPS
PEACE: list[tuple[Event, int]] = [(Job.go_on, seed) for seed in range(20)]


def test_any_interleaving_gives_what_the_model_gives(reducers: Reducers) -> None:
    seen: Counter[str] = Counter()

    # Nothing is to be had from making seeds smaller, and it would take minutes.
    @settings(
        max_examples=100,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
    )
    # What comes last is drawn so seldom that a run may be without it.
    @example(workers=4, view=1, groups=SOME_GROUPS, peace=PEACE, trouble=[(Job.push_after_the_last, 1)])
    @example(workers=4, view=1, groups=SOME_GROUPS, peace=PEACE, trouble=[(Job.join_another_group, 1)])
    @example(workers=4, view=1, groups=SOME_GROUPS, peace=PEACE, trouble=[(Job.die, 1)])
    @given(
        workers=st.integers(1, 4),
        view=st.integers(1, 3),
        peace=events(10, 20, Job.go_on, Job.go_on, Job.lose_reducer, Job.change_view),
        groups=st.lists(st.sets(st.integers(0, 3), max_size=3), min_size=OPS, max_size=OPS),
        trouble=events(
            1,
            3,
            *(Job.go_on, Job.push_out_of_order, Job.push_after_the_last, Job.die, Job.leave, Job.join_another_group),
        ),
    )
    def run(
        workers: int,
        view: int,
        groups: list[set[int]],
        peace: list[tuple[Event, int]],
        trouble: list[tuple[Event, int]],
    ) -> None:
        job = Job(reducers, workers, groups, view, seen)
        for happen, seed in peace + trouble:
            if not job.over:
                happen(job, Random(seed))

    run()
    kinds = ("round", "round of a group", "replay", "reducer's death", "worker's death", "one more chunk")
    assert not [kind for kind in (*kinds, "another group") if not seen[kind]]
