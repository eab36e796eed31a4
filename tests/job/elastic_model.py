"""The protocol of elastic jobs as a model: no sockets, no clock, one process. Random interleavings look for holes.

Workers run one program of ``STEPS`` steps. A step passes a gate, and then has three rounds at once: two large ones of
two parts each, and a small one. What a worker contributes depends on all totals before, so that a wrong one is seen.
Workers are killed, lost by mistake, leave and join; reducers are killed, some of them inside workers; the coordinator
is killed and started again, knowing nothing. Messages on one wire keep their order, and a process that dies loses any
number of those that it has sent last.

The model does what ``xla_ffi/membership/elastic_coordinator.h``, ``worker/held_rounds.h`` and ``reducer/holders.h``
say. Each of ``BREAKS`` is a protocol without one of its rules: the checks must find it, else they would prove nothing.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

STEPS = 3
PARTS = {"a": (0, 1), "b": (0, 1), "small": (0,)}  # of each op
MANY_EVENTS = 20_000

Name = tuple[str, int, int]  # the kind, the rank or number, and which holder of it
Total = tuple[tuple[Any, ...], ...]  # the contributions, in rank order

FAULTS = ("kill", "kill", "suspect", "reducer", "join", "join", "leave", "coordinator")


@dataclass(frozen=True)
class Break:
    """A rule that is left out, the faults among which that is seen, and the seed from which it is seen soon."""

    what: str
    faults: tuple[str, ...]
    first_seed: int = 0


BREAKS = {
    "give_at_once": Break("a large total is given when it is here, not when all hold it", ("kill",)),
    "give_by_part": Break("a round is given when one of its parts is safe", ("kill",)),
    "hold_by_part": Break("a worker reports that it holds a round when it holds one part of it", ("kill",)),
    "begin_all_anew": Break("a change of view commits no round", ("kill",)),
    "commit_if_any": Break("a round is committed as soon as one survivor holds it", ("kill",)),
    "keep_held": Break("parts that are held count in the next view, though the round begins anew", ("kill",)),
    "no_copy": Break("no copy of a small total is reported", ("kill",)),
    "open_gate": Break("the gate stays open while the view changes", ("kill",)),
    "late_frames": Break("reducers take frames of an earlier view", ("suspect",)),
    "sum_who_came": Break("a reducer sums once all that have joined so far have pushed", ("kill",)),
    "numbers_again": Break("a coordinator that was started again counts on from the newest view of the members",
                           ("coordinator", "suspect", "kill")),
    "any_view": Break("a coordinator that was started again takes the view of whoever returns first",
                      ("suspect", "suspect", "coordinator", "coordinator"), 700),
    "take_back": Break("a coordinator that was started again takes back whom the newest view has dropped",
                       ("suspect", "suspect", "coordinator", "coordinator")),
    "deal_too_soon": Break("data is dealt to new members from the gate that the last one comes to", ("kill",)),
    "go_early": Break("the others go on before a joiner has its state",
                      ("join", "join", "join", "kill", "reducer"), 1000),
    "state_in_change": Break("a joiner takes its state while the view changes, and says so in the earlier one alone",
                             ("join", "join", "join", "kill", "kill", "kill", "kill"), 400),
    "no_counts": Break("a joiner is not told how many rounds there have been", ("join",)),
    "wait_for_candidate": Break("a coordinator that was started again waits for a member that had not heard that it is",
                                ("join", "join", "coordinator"), 700),
}  # fmt: skip


class BrokenError(AssertionError):
    """A promise of the protocol is not kept."""


def insist(kept: bool, why: str) -> None:
    if not kept:
        raise BrokenError(why)


@dataclass(frozen=True)
class View:
    number: int
    members: tuple[Name, ...]
    reducers: tuple[Name, ...]
    joining: tuple[Name, ...] = ()  # members without state
    commits: tuple[tuple[str, int, Total | None], ...] = ()
    deals: tuple[tuple[int, tuple[Name, ...]], ...] = ()  # from this gate on, data is dealt to these
    counts: tuple[tuple[str, int], ...] = ()  # rounds given, for those who join


@dataclass
class Round:
    number: int
    chunks: dict[tuple[int, Name], Total] = field(default_factory=dict)  # by part and reducer
    safe: set[int] = field(default_factory=set)

    def held(self, part: int, reducers: Iterable[Name]) -> bool:
        return all((part, reducer) in self.chunks for reducer in reducers)


class Wires:
    """Messages under way, by sender and receiver."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.queues: dict[tuple[Name, Name], deque[tuple[Any, ...]]] = {}

    def send(self, sender: Name, receiver: Name, *message: Any) -> None:
        self.queues.setdefault((sender, receiver), deque()).append(message)

    def take(self) -> tuple[Name, Name, tuple[Any, ...]] | None:
        if not self.queues:
            return None
        ends = self.chance.choice(list(self.queues))
        message = self.queues[ends].popleft()
        if not self.queues[ends]:
            del self.queues[ends]
        return (*ends, message)

    def cut(self, dead: Name, coordinator: Name) -> None:
        """What was sent last is lost, and the coordinator hears that the connection has closed."""
        for sender, receiver in list(self.queues):
            if receiver == dead:
                del self.queues[sender, receiver]
            elif sender == dead:
                queue = self.queues[sender, receiver]
                for _ in range(self.chance.randrange(len(queue) + 1)):
                    queue.pop()
                if not queue:
                    del self.queues[sender, receiver]
        if dead != coordinator:
            self.send(dead, coordinator, "closed")


class Process:
    def __init__(self, job: Job, name: Name) -> None:
        self.job, self.name = job, name
        self.broken = job.broken

    def send(self, receiver: Name, *message: Any) -> None:
        self.job.wires.send(self.name, receiver, *message)

    def receive(self, sender: Name, message: tuple[Any, ...]) -> None:
        getattr(self, "on_" + message[0])(sender, *message[1:])


class Reducer(Process):
    """Knows what the members say in their joins, and nothing from one view to the next."""

    def __init__(self, job: Job, name: Name) -> None:
        super().__init__(job, name)
        self.view, self.members = -1, ()
        self.began()

    def began(self) -> None:
        self.joined: set[Name] = set()
        self.pieces: dict[Any, dict[Name, Any]] = {}
        self.summed: set[Any] = set()
        self.holders: dict[Any, set[Name]] = {}

    def on_join(self, sender: Name, view: int, members: tuple[Name, ...]) -> None:
        if view > self.view:
            self.view, self.members = view, members
            self.began()
        if view == self.view:
            self.joined.add(sender)

    def is_of_view(self, view: int) -> bool:
        return view == self.view or (self.broken == "late_frames" and view < self.view)

    def on_push(self, sender: Name, view: int, key: Any, piece: Any) -> None:
        if not self.is_of_view(view):
            return
        pieces = self.pieces.setdefault(key, {})
        pieces[sender] = piece
        wanted = self.joined if self.broken == "sum_who_came" else set(self.members)
        if key in self.summed or not pieces.keys() >= wanted:
            return
        self.summed.add(key)
        for member in self.members:
            self.send(member, "result", self.view, key, tuple(pieces[each] for each in sorted(pieces)))

    def on_held(self, sender: Name, view: int, key: Any) -> None:
        if not self.is_of_view(view):
            return
        holders = self.holders.setdefault(key, set())
        holders.add(sender)
        if holders >= set(self.members):
            for member in self.members:
                self.send(member, "safe", self.view, key)

    def on_return(self, coordinator: Name) -> None:
        self.send(coordinator, "return", None, self.view)


class Worker(Process):
    def __init__(self, job: Job, name: Name, view: View | None) -> None:
        super().__init__(job, name)
        self.view = view
        self.heard = view.number if view else -1
        self.halted = view is None
        self.has_state = view is not None
        self.state, self.step = 0, 0
        self.gate = 0  # the next one
        self.gate_end: int | None = None  # the first that it may not pass
        self.dealt: dict[int, Any] = {}
        self.given = dict.fromkeys(PARTS, 0)
        self.totals: dict[str, Total] = {}
        self.copy: Total | None = None  # of the latest small total
        self.rounds: dict[str, Round] = {}
        self.meeting: Any = None
        self.meets_at: int | None = None
        self.early: Any = None
        self.wants_to_leave = False
        self.out = False
        if view:
            for reducer in view.reducers:
                self.send(reducer, "join", view.number, view.members)

    # --- The program.

    def choices(self) -> list[str]:
        if self.out or not self.has_state:
            return []
        may_pass = self.gate < STEPS and self.gate <= self.step + 1
        may_pass = may_pass and (self.gate_end is None or self.gate < self.gate_end)
        begins = [op for op in PARTS if op not in self.rounds and self.given[op] == self.step < self.gate]
        return begins + ["gate"] * may_pass

    def act(self, choice: str) -> None:
        if choice == "gate":
            assert self.view is not None
            self.dealt[self.gate] = [members for since, members in self.view.deals if since <= self.gate][-1]
            self.gate += 1
            self.meet()
        else:
            self.rounds[choice] = Round(self.given[choice])
            if not self.halted:
                self.push(choice)

    def reducers_of(self, op: str) -> tuple[Name, ...]:
        assert self.view is not None
        return self.view.reducers[:1] if op == "small" else self.view.reducers

    def push(self, op: str) -> None:
        assert self.view is not None
        number = self.rounds[op].number
        piece = (self.name, op, number, self.state, self.dealt[self.step])
        for part in PARTS[op]:
            for reducer in self.reducers_of(op):
                self.send(reducer, "push", self.view.number, (op, number, part), piece)

    def running(self, view: int, key: tuple[str, int, int]) -> Round | None:
        """The round of this view that the key names, if it runs here."""
        round_ = self.rounds.get(key[0])
        if self.view is None or view != self.view.number or self.halted or self.out or round_ is None:
            return None
        return round_ if round_.number == key[1] else None

    def on_result(self, sender: Name, view: int, key: tuple[str, int, int], total: Total) -> None:
        round_, (op, _, part) = self.running(view, key), key
        if round_ is None:
            return
        round_.chunks[part, sender] = total
        if not round_.held(part, self.reducers_of(op)):
            return
        if op == "small" or (self.broken == "give_at_once" and self.holds(op)):
            return self.give(op)
        home = self.reducers_of(op)[part % len(self.reducers_of(op))]
        self.send(home, "held", view, key)

    def on_safe(self, _sender: Name, view: int, key: tuple[str, int, int]) -> None:
        round_, (op, _, part) = self.running(view, key), key
        if round_ is None:
            return
        round_.safe.add(part)
        if len(round_.safe) == len(PARTS[op]) or (self.broken == "give_by_part" and self.holds(op)):
            self.give(op)

    def holds(self, op: str, enough: Any = all) -> bool:
        round_ = self.rounds.get(op)
        return round_ is not None and enough(round_.held(part, self.reducers_of(op)) for part in PARTS[op])

    def give(self, op: str, total: Total | None = None) -> None:
        round_ = self.rounds.pop(op)
        if total is None:
            totals = set(round_.chunks.values())
            insist(len(totals) == 1, f"{op}{round_.number} at {self.name}: its chunks have counted others: {totals}")
            total = totals.pop()
        self.job.note_total(self, op, round_.number, total)
        self.given[op] += 1
        self.totals[op] = total
        self.copy = total if op == "small" else self.copy
        if all(count > self.step for count in self.given.values()):
            self.state = hash((self.state, *(self.totals[op] for op in PARTS)))
            self.step += 1
            self.job.note_state(self)
            self.meet()

    # --- What the coordinator says.

    def on_halt(self, coordinator: Name, number: int) -> None:
        if coordinator != self.job.coordinator.name or self.out:
            return
        self.heard = max(self.heard, number)
        self.halted = True
        self.meeting = self.meets_at = None
        if self.broken != "open_gate":
            self.gate_end = self.gate
        enough = any if self.broken == "hold_by_part" else all
        ops = {
            op: (
                self.given[op],
                self.holds(op, enough),
                self.copy if op == "small" and self.broken != "no_copy" else None,
            )
            for op in PARTS
        }
        self.send(coordinator, "report", number, (ops, self.gate, self.has_state, self.view))

    def on_view(self, coordinator: Name, view: View) -> None:
        if coordinator != self.job.coordinator.name or self.out or view.number < self.heard:
            return
        self.view, self.heard, self.halted = view, view.number, False
        self.settle(view)
        for reducer in view.reducers:
            self.send(reducer, "join", view.number, view.members)
        for op in self.rounds:
            self.push(op)
        self.gate_end = self.gate if view.joining and self.broken != "go_early" else None
        if not self.has_state:
            counts = dict.fromkeys(PARTS, 0) if self.broken == "no_counts" else dict(view.counts)
            self.given, self.step = counts, counts["a"]
            self.gate = self.gate_end = self.step  # a step has one round of each op
            if self.early is not None:
                self.on_state(*self.early)
        for joiner in view.joining if self.has_state and self.name not in view.joining else ():
            self.send(joiner, "state", view.number, self.step, self.state)
        self.wants_to_leave and self.send(coordinator, "leave")

    def settle(self, view: View) -> None:
        for op, number, total in view.commits:
            if self.given[op] != number or not self.has_state:
                continue
            insist(op in self.rounds, f"{self.name} is told to complete {op}{number}, which it has not begun")
            insist(total is not None or self.holds(op), f"{self.name} is told to complete {op}{number}, and lacks it")
            self.give(op, total)
        if self.broken != "keep_held":
            self.rounds = {op: Round(round_.number) for op, round_ in self.rounds.items()}

    def on_state(self, sender: Name, view: int, step: int, state: int) -> None:
        if self.has_state or self.out:
            return
        if self.halted and self.view is not None and view <= self.view.number and self.broken != "state_in_change":
            return  # it may have said that it has none, and then all give it again
        if self.view is None or view > self.view.number:
            self.early = (sender, view, step, state)
            return
        if view != self.view.number:
            return
        insist(step == self.step, f"{self.name} joins in step {self.step}, and gets the state of step {step}")
        self.state, self.has_state = state, True
        self.job.note_state(self)
        self.send(self.job.coordinator.name, "ready", view)

    def on_meet(self, coordinator: Name, meeting: Any, at: int | None) -> None:
        if coordinator != self.job.coordinator.name or self.out or self.halted:
            return
        if at is None:
            self.meeting, self.gate_end = meeting, self.gate
            self.send(coordinator, "gate", meeting, self.gate)
        elif meeting == self.meeting:
            self.meets_at = self.gate_end = at
        self.meet()

    def meet(self) -> None:
        """It stands at the gate of the meeting, and all its rounds are over."""
        if self.meeting is not None and self.gate == self.step == self.meets_at and not self.halted:
            self.send(self.job.coordinator.name, "met", self.meeting)
            self.meets_at = None

    def on_go(self, coordinator: Name, view: int) -> None:
        if self.view is None or coordinator != self.job.coordinator.name or self.halted or view != self.view.number:
            return
        self.gate_end = self.meeting = self.meets_at = None

    def on_out(self, coordinator: Name) -> None:
        self.out = self.out or coordinator == self.job.coordinator.name

    def on_return(self, coordinator: Name) -> None:
        """The coordinator was started again."""
        self.send(coordinator, *(("register",) if self.view is None else ("return", self.view, self.heard)))
        self.wants_to_leave and self.send(coordinator, "leave")


class Coordinator(Process):
    def __init__(self, job: Job, name: Name, view: View | None) -> None:
        super().__init__(job, name)
        self.view = view
        self.number = view.number if view else 0 if job.broken == "numbers_again" else 1000 * name[2]
        self.phase = "started" if view else "gathering"
        self.returned: dict[Name, View | None] = {}
        self.lost: set[Name] = set()
        self.reports: dict[Name, Any] = {}
        self.candidates: list[Name] = []
        self.leavers: set[Name] = set()
        self.meeting: dict[str, Any] | None = None
        self.meeting_count = 0
        self.has_met = False

    def receive(self, sender: Name, message: tuple[Any, ...]) -> None:
        if sender not in self.lost:
            super().receive(sender, message)

    # --- Changes.

    def lose(self, name: Name) -> None:
        """A process that is dead, or taken for dead, and the reducer inside it."""
        self.lost.add(name)
        self.send(name, "out")
        if name in self.candidates:
            self.candidates.remove(name)
        if self.phase == "gathering":
            return self.resume()
        assert self.view is not None
        if name in self.view.members or name in self.view.reducers:
            self.change()

    def on_closed(self, sender: Name) -> None:
        self.lose(sender)

    def here(self, names: Iterable[Name]) -> tuple[Name, ...]:
        return tuple(sorted(name for name in names if name not in self.lost))

    def change(self) -> None:
        assert self.view is not None
        view = self.view
        self.view = View(view.number, self.here(view.members), self.here(view.reducers), self.here(view.joining),
                         deals=view.deals)  # fmt: skip
        self.meeting, self.has_met = None, False
        able = set(self.view.members) - set(self.view.joining)
        self.phase = "changing" if able and self.view.reducers else "ended"
        self.number += 1
        self.reports = {}
        for member in self.view.members:
            self.send(member, "halt", self.number)

    def on_report(self, sender: Name, number: int, report: Any) -> None:
        assert self.view is not None
        if self.phase != "changing" or number != self.number:
            return
        self.reports[sender] = report
        if not self.reports.keys() >= set(self.view.members):
            return
        able = [report for report in self.reports.values() if report[2]]
        if not able:
            self.phase = "ended"
            return
        members = set(self.view.members)
        joining = {name for name, report in self.reports.items() if not report[2]}
        commits = tuple(self.decide([ops for ops, _, _, _ in able]))
        if self.has_met:
            joining |= set(self.candidates)
            members -= self.leavers if self.leavers < members else set()
            self.candidates = []
        members |= joining
        self.tell(tuple(sorted(members)), tuple(sorted(joining)), commits, able)

    def decide(self, reported: list[dict[str, Any]]) -> Iterable[tuple[str, int, Total | None]]:
        """What membership/commits.cc decides: the rounds that are complete, with the totals of small ones."""
        for op in PARTS:
            least = min(ops[op][0] for ops in reported)
            most = max(ops[op][0] for ops in reported)
            holders = [ops[op][0] > least or ops[op][1] for ops in reported]
            copies = [ops[op][2] for ops in reported if ops[op][0] > least and ops[op][2] is not None]
            insist(most <= least + 1, f"{op}: some were given {most} rounds, and others {least}")
            if self.broken == "begin_all_anew":
                continue
            if most > least and copies:
                yield op, least, copies[0]
            elif all(holders) or (any(holders) and self.broken == "commit_if_any"):
                yield op, least, None
            else:
                insist(most == least, f"{op}{least} was given to some, and others do not hold it")

    def tell(self, members: Any, joining: Any, commits: Any, able: list[Any]) -> None:
        assert self.view is not None
        gates = {gate for _, gate, _, _ in able}
        deals = max((view for _, _, _, view in able), key=lambda view: view.number).deals
        if deals[-1][1] != members:
            since = min(gates) if self.broken == "deal_too_soon" else max(gates)
            deals = (*(deal for deal in deals if deal[0] < since), (since, members))
        counts = {op: max(ops[op][0] for ops, _, _, _ in able) for op in PARTS}
        insist(not joining or len(gates) == 1, f"some wait for {joining}, and others have gone on: {gates}")
        gone = set(self.view.members) - set(members)
        self.view = View(self.number, members, self.view.reducers, joining, commits, deals, tuple(counts.items()))
        self.phase, self.meeting, self.has_met = "started", None, False
        for member in members:
            self.send(member, "view", self.view)
        for name in sorted(gone):
            self.send(name, "out")
        self.consider_meeting()

    # --- Meetings.

    def on_register(self, sender: Name) -> None:
        self.candidates.append(sender)
        self.resume() if self.phase == "gathering" else self.consider_meeting()

    def on_leave(self, sender: Name) -> None:
        self.leavers.add(sender)
        self.consider_meeting()

    def consider_meeting(self) -> None:
        if self.phase != "started" or self.meeting is not None or self.view is None or self.view.joining:
            return
        if self.candidates or len(self.leavers & set(self.view.members)) in range(1, len(self.view.members)):
            self.meeting_count += 1
            self.meeting = {"name": (self.name, self.meeting_count), "gates": {}, "met": set()}
            self.tell_meeting(None)

    def tell_meeting(self, at: int | None) -> None:
        assert self.view is not None
        assert self.meeting is not None
        for member in self.view.members:
            self.send(member, "meet", self.meeting["name"], at)

    def on_gate(self, sender: Name, meeting: Any, gate: int) -> None:
        if self.meeting is None or self.view is None or meeting != self.meeting["name"] or self.phase != "started":
            return
        self.meeting["gates"][sender] = gate
        if not self.meeting["gates"].keys() >= set(self.view.members):
            return
        at = max(self.meeting["gates"].values())
        if at < STEPS:
            return self.tell_meeting(at)
        self.candidates, self.leavers, self.meeting = [], set(), None  # too late
        self.tell_go()

    def on_met(self, sender: Name, meeting: Any) -> None:
        if self.meeting is None or self.view is None or meeting != self.meeting["name"]:
            return
        self.meeting["met"].add(sender)
        if self.meeting["met"] >= set(self.view.members):
            self.change()
            self.has_met = True

    def on_ready(self, sender: Name, view: int) -> None:
        if self.view is None or self.phase != "started" or view != self.view.number:
            return
        joining = tuple(name for name in self.view.joining if name != sender)
        self.view = View(self.view.number, self.view.members, self.view.reducers, joining, deals=self.view.deals)
        if not joining:
            self.tell_go()
            self.consider_meeting()

    def tell_go(self) -> None:
        assert self.view is not None
        for member in self.view.members:
            self.send(member, "go", self.view.number)

    # --- Coming back without memory.

    def on_return(self, sender: Name, view: View | None, heard: int) -> None:
        if self.phase != "gathering":
            assert self.view is not None
            if sender not in self.view.members and sender not in self.view.reducers:
                self.send(sender, "out")
            return
        if self.broken != "numbers_again":
            self.number = max(self.number, heard)
        self.returned[sender] = view
        self.resume()

    def resume(self) -> None:
        views = [view for name, view in self.returned.items() if view is not None and name not in self.lost]
        if not views:
            return
        newest = views[0] if self.broken == "any_view" else max(views, key=lambda view: view.number)
        members = set(newest.members)
        if self.broken != "wait_for_candidate":
            members -= set(self.candidates)
        if self.broken == "take_back":
            members |= {name for name, view in self.returned.items() if view is not None}
        if not self.returned.keys() >= set(self.here((*members, *newest.reducers))):
            return
        for name in sorted(self.returned.keys() - members - set(newest.reducers)):
            self.lost.add(name)
            self.send(name, "out")
        self.number = max(self.number, newest.number)
        self.view = View(newest.number, tuple(sorted(members)), newest.reducers, newest.joining, deals=newest.deals)
        self.change()


class Job:
    """One schedule: what happens follows from the seed."""

    def __init__(self, seed: int, broken: str = "") -> None:
        self.chance = chance = random.Random(seed)
        self.broken = broken
        self.wires = Wires(chance)
        self.totals: dict[tuple[str, int], dict[Name, Total]] = {}
        self.states: dict[int, dict[Name, int]] = {}
        workers, reducers = chance.choice([(2, 1), (2, 2), (3, 1), (3, 2), (4, 2)])
        members = tuple(("worker", rank, 0) for rank in range(workers))
        view = View(0, members, tuple(("reducer", number, 0) for number in range(reducers)), deals=((0, members),))
        self.inside = dict(zip(view.members, view.reducers, strict=False)) if chance.random() < 0.4 else {}
        self.coordinator = Coordinator(self, ("coordinator", 0, 0), view)
        self.processes: dict[Name, Any] = {name: Reducer(self, name) for name in view.reducers}
        self.processes |= {name: Worker(self, name, view) for name in view.members}
        self.processes[self.coordinator.name] = self.coordinator
        self.faults = list(BREAKS[broken].faults if broken else chance.sample(FAULTS, chance.randint(1, len(FAULTS))))
        chance.shuffle(self.faults)
        self.pace = chance.choice((0.01, 0.03, 0.1, 0.3))

    def workers(self) -> list[Worker]:
        return [each for each in self.processes.values() if isinstance(each, Worker) and not each.out]

    def members(self) -> list[Worker]:
        view = self.coordinator.view
        return [worker for worker in self.workers() if view and worker.name in view.members and worker.has_state]

    def run(self) -> None:
        for _ in range(MANY_EVENTS):
            if not self.happen():
                return self.check_end()
        raise BrokenError("it does not come to an end")

    def happen(self) -> bool:
        """One thing; False if nothing is left."""
        if self.faults and self.chance.random() < self.pace:
            getattr(self, "fault_" + self.faults.pop())()
        actions = [(worker, choice) for worker in self.workers() for choice in worker.choices()]
        if actions and (not self.wires.queues or self.chance.random() < 0.2):
            worker, choice = self.chance.choice(actions)
            worker.act(choice)
            return True
        taken = self.wires.take()
        if taken is None:
            return False
        sender, receiver, message = taken
        if receiver in self.processes:
            self.processes[receiver].receive(sender, message)
        return True

    # --- Faults.

    def kill(self, name: Name) -> None:
        del self.processes[name]
        self.wires.cut(name, self.coordinator.name)
        if name in self.inside and self.inside[name] in self.processes:
            self.kill(self.inside[name])

    def reducers(self) -> list[Name]:
        return [name for name in self.processes if name[0] == "reducer"]

    def victims(self) -> list[Name]:
        """Members of which each may be lost, with the reducer inside it, so that the job goes on."""
        members = [worker.name for worker in self.members()] if len(self.members()) > 1 else []
        return [name for name in members if self.reducers() != [self.inside.get(name)]]

    def fault_kill(self) -> None:
        if victims := self.victims():
            self.kill(self.chance.choice(victims))

    def fault_suspect(self) -> None:
        """It is alive, and the coordinator calls it lost."""
        if victims := [name for name in self.victims() if name not in self.inside]:
            self.coordinator.lose(self.chance.choice(victims))

    def fault_reducer(self) -> None:
        alone = [name for name in self.reducers() if name not in self.inside.values()]
        if alone and len(self.reducers()) > 1:
            self.kill(self.chance.choice(alone))

    def fault_join(self) -> None:
        taken = {worker.name[1] for worker in self.workers()}
        rank = min(set(range(9)) - taken)
        name = ("worker", rank, 1 + sum(each[:2] == ("worker", rank) for each in self.processes) + len(self.faults))
        self.processes[name] = Worker(self, name, None)
        self.processes[name].send(self.coordinator.name, "register")

    def fault_leave(self) -> None:
        if leavers := [name for name in self.victims() if name not in self.inside]:
            worker = self.processes[self.chance.choice(leavers)]
            worker.wants_to_leave = True
            worker.send(self.coordinator.name, "leave")

    def fault_coordinator(self) -> None:
        old = self.coordinator
        del self.processes[old.name]
        self.wires.cut(old.name, old.name)
        self.coordinator = Coordinator(self, ("coordinator", 0, old.name[2] + 1), None)
        here = {
            process.name: process for process in (*self.workers(), *map(self.processes.__getitem__, self.reducers()))
        }
        for process in here.values():
            process.on_return(self.coordinator.name)
        known = {
            name for worker in self.workers() if worker.view for name in worker.view.members + worker.view.reducers
        }
        for name in sorted(known - here.keys()):  # it waits for them for a while
            self.wires.send(name, self.coordinator.name, "closed")
        self.processes[self.coordinator.name] = self.coordinator

    # --- What is promised.

    def note_total(self, worker: Worker, op: str, number: int, total: Total) -> None:
        names = [piece[0] for piece in total]
        insist(names == sorted(set(names)), f"{op}{number}: not in rank order, or counted twice: {names}")
        insist({piece[1:3] for piece in total} == {(op, number)}, f"{op}{number}: pieces of another round: {total}")
        insist(len({piece[3] for piece in total}) == 1, f"{op}{number}: contributions of different states: {total}")
        insist(len({piece[4] for piece in total}) == 1, f"{op}{number}: data that was dealt differently: {total}")
        insist(worker.name in names, f"{op}{number}: {worker.name} is not counted in what it gets: {names}")
        of_workers = self.totals.setdefault((op, number), {})
        of_workers[worker.name] = total
        # A small total may differ at one that is lost: see check_end().
        insist(op == "small" or len(set(of_workers.values())) == 1, f"{op}{number}: different totals: {of_workers}")

    def note_state(self, worker: Worker) -> None:
        self.states.setdefault(worker.step, {})[worker.name] = worker.state

    def check_end(self) -> None:
        """Nothing happens any more: all members are through, and have gone the same way."""
        if self.coordinator.phase == "ended":
            return
        view, able = self.coordinator.view, {worker.name for worker in self.members()}
        insist(view is not None, "the coordinator waits for members for ever")
        for worker in self.workers():
            if worker.name in able:
                insist(worker.step == STEPS, f"{worker.name} is stuck at gate {worker.gate} in step {worker.step}")
        for what in (self.states, self.totals):
            for when, of_workers in what.items():  # type: ignore[attr-defined]
                different = {value for name, value in of_workers.items() if name in able}
                insist(len(different) <= 1, f"{when}: different for members: {of_workers}")


def first_break(broken: str, schedules: Iterable[int]) -> tuple[int, str] | None:
    """The first seed whose schedule breaks a promise, and which; None if none does."""
    for seed in schedules:
        try:
            Job(seed, broken).run()
        except BrokenError as error:
            return seed, str(error)
    return None
