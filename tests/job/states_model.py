"""What reducers keep of an optimizer in an elastic job, as a model. Random interleavings look for holes.

Workers run one op for ``STEPS`` rounds, each of which updates ``ELEMENTS`` elements that reducers share out. What an
element is, is the list of the participants of each of its updates: so a wrong sum, one that counts twice, or one of
another round is seen. Workers and reducers are killed together, and reducers join. What the coordinator does is one
step here; ``elastic_model.py`` has that part. Messages on one wire keep their order, and a process that dies loses any
number of those that it has sent last. Members leave their connections with a view, but what they have sent may still
come in until the reducer has heard of the next one.

The model does what ``xla_ffi/reducer/strand.h``, ``reducer/partners.h`` and ``reducer/state_op.h`` say. Each of
``BREAKS`` is a protocol without one of its rules: the checks must find it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.job.elastic_model import BrokenError, insist

STEPS = 4
ELEMENTS = 3
MANY_EVENTS = 20_000

Name = tuple[str, int]
Value = tuple[tuple[Name, ...], ...]  # of each update, who has taken part

BREAKS = {
    "no_undo": "a round that begins anew is applied to what it has come to before",
    "done_is_done": "a round that begins anew changes nothing where it has been applied",
    "give_at_once": "a worker is given a round when it is here, not when all hold it",
    "answer_at_once": "a reducer answers before its partner has what it answers",
    "late_frames": "a partner takes what was sent in an earlier view",
    "late_replies": "a reply to what was sent in an earlier view counts",
    "copied_when_sent": "a copy under way when the view changes counts as there",
    "copy_what_is": "a copy does not have what was before the latest update",
}


@dataclass(frozen=True)
class View:
    number: int
    members: tuple[Name, ...]
    reducers: tuple[Name, ...]
    owners: tuple[Name, ...]  # of each element
    partners: tuple[Name | None, ...]  # who backs it up
    given: int  # complete rounds


@dataclass
class Element:
    round: int = -1  # of the latest update
    value: Value = ()
    earlier: Value = ()


@dataclass
class Process:
    job: Job
    name: Name

    def send(self, receiver: Name, *message: Any) -> None:
        self.job.queues.setdefault((self.name, receiver), deque()).append(message)


@dataclass
class Worker(Process):
    view: View
    given: int = 0
    results: dict[int, Value] = field(default_factory=dict)

    def enter(self, view: View) -> None:
        self.view, self.results = view, {}
        if self.given < view.given:
            self.given = view.given
        for reducer in view.reducers:
            self.send(reducer, "join", view)
        self.push()

    def push(self) -> None:
        for element in range(ELEMENTS) if self.given < STEPS else ():
            self.send(self.view.owners[element], "push", self.view.number, self.given, element)

    def on_result(self, _sender: Name, view: int, round_: int, element: int, value: Value) -> None:
        if view != self.view.number:
            return
        insist(round_ == self.given, f"{self.name} gets round {round_}, and is in round {self.given}")
        self.results[element] = value
        if not self.holds():
            return
        if self.job.broken == "give_at_once":
            return self.give()
        self.send(self.view.owners[0], "held", view, round_)

    def holds(self) -> bool:
        return len(self.results) == ELEMENTS

    def on_safe(self, _sender: Name, view: int, round_: int) -> None:
        if view == self.view.number and round_ == self.given:
            self.give()

    def give(self) -> None:
        self.job.note(self)
        self.given += 1
        self.results = {}
        self.push()


@dataclass
class Reducer(Process):
    view: View
    kept: dict[int, Element] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.copied: set[tuple[int, Name]] = set()  # elements that a partner has, or gets before all else
        self.copying: tuple[int, Name] | None = None
        self.announced: dict[Name, int] = {}  # by partner, the view that it has replied to
        self.partner_views: dict[Name, int] = {}  # of those that this one backs up
        self.begin()

    def begin(self) -> None:
        self.pieces: dict[tuple[int, int], set[Name]] = {}
        self.waiting: dict[tuple[int, int, Name], Value] = {}  # answers that wait for a partner
        self.holders: dict[int, set[Name]] = {}
        self.has_plan = False

    def enter(self, view: View) -> None:
        if view.number > self.view.number:
            self.view = view
            self.begin()

    def on_join(self, _sender: Name, view: View) -> None:
        self.enter(view)
        if view.number != self.view.number or self.has_plan:
            return
        self.has_plan = True
        if self.copying is not None and self.job.broken != "copied_when_sent":
            self.copied.discard(self.copying)
        self.copying = None
        self.copied &= {(e, p) for e, p in enumerate(view.partners) if p is not None and view.owners[e] == self.name}
        for partner in view.reducers:
            self.send(partner, "partner", view)
        self.copy_next()

    def partner_of(self, element: int) -> Name | None:
        partner = self.view.partners[element] if self.view.owners[element] == self.name else None
        return partner if partner is not None and (element, partner) in self.copied else None

    def copy_next(self) -> None:
        for element, partner in enumerate(self.view.partners):
            lacks = partner is not None and self.view.owners[element] == self.name and element in self.kept
            if self.copying is not None or not self.has_plan or not lacks or (element, partner) in self.copied:
                continue
            assert partner is not None
            own, self.copying = self.kept[element], (element, partner)
            earlier = own.value if self.job.broken == "copy_what_is" else own.earlier
            self.copied.add(self.copying)
            self.send(partner, "copy", self.view.number, element, Element(own.round, own.value, earlier))

    # --- Workers.

    def on_push(self, sender: Name, view: int, round_: int, element: int) -> None:
        if view != self.view.number:
            return
        pieces = self.pieces.setdefault((round_, element), set())
        pieces.add(sender)
        if pieces != set(self.view.members):
            return
        participants = tuple(sorted(pieces))
        insist(element in self.kept, f"{self.name} has nothing of element {element}")
        self.apply(round_, element, participants)
        value = self.kept[element].value
        partner = self.partner_of(element)
        if partner is not None:
            self.send(partner, "backup", view, round_, element, participants)
        if partner is None or self.job.broken == "answer_at_once":
            return self.answer(round_, element, value)
        self.waiting[round_, element, partner] = value

    def apply(self, round_: int, element: int, participants: tuple[Name, ...]) -> None:
        own = self.kept[element]
        if own.round == round_:
            if self.job.broken == "done_is_done":
                return
            if self.job.broken != "no_undo":
                own.value = own.earlier
        else:
            insist(own.round == round_ - 1, f"{self.name} has element {element} of round {own.round}, not {round_ - 1}")
            own.earlier = own.value
        own.round, own.value = round_, (*own.value, participants)

    def answer(self, round_: int, element: int, value: Value) -> None:
        for member in self.view.members:
            self.send(member, "result", self.view.number, round_, element, value)

    def on_held(self, sender: Name, view: int, round_: int) -> None:
        if view != self.view.number:
            return
        holders = self.holders.setdefault(round_, set())
        holders.add(sender)
        if holders == set(self.view.members):
            for member in self.view.members:
                self.send(member, "safe", view, round_)

    # --- Partners.

    def on_partner(self, sender: Name, view: View) -> None:
        self.enter(view)
        self.partner_views[sender] = view.number
        self.send(sender, "announced", view.number)

    def on_announced(self, sender: Name, view: int) -> None:
        self.announced[sender] = view

    def takes(self, sender: Name) -> bool:
        return self.partner_views.get(sender, 0) == self.view.number or self.job.broken == "late_frames"

    def on_backup(self, sender: Name, _view: int, round_: int, element: int, participants: tuple[Name, ...]) -> None:
        if self.takes(sender):
            insist(element in self.kept, f"{self.name} backs up element {element}, which it has not")
            self.apply(round_, element, participants)
            self.send(sender, "backed_up", round_, element)

    def on_copy(self, sender: Name, _view: int, element: int, copy: Element) -> None:
        if self.takes(sender):
            self.kept[element] = Element(copy.round, copy.value, copy.earlier)
            self.send(sender, "copied")

    def counts(self, sender: Name) -> bool:
        return self.announced.get(sender, 0) == self.view.number or self.job.broken == "late_replies"

    def on_backed_up(self, sender: Name, round_: int, element: int) -> None:
        value = self.waiting.pop((round_, element, sender), None) if self.counts(sender) else None
        if value is not None:
            self.answer(round_, element, value)

    def on_copied(self, sender: Name) -> None:
        if self.counts(sender):
            self.copying = None
            self.copy_next()


class Job:
    """One schedule: what happens follows from the seed."""

    def __init__(self, seed: int, broken: str = "") -> None:
        self.chance = chance = random.Random(seed)
        self.broken = broken
        self.queues: dict[tuple[Name, Name], deque[tuple[Any, ...]]] = {}
        self.results: dict[int, tuple[Value, ...]] = {}
        members = tuple(("worker", rank) for rank in range(chance.choice((2, 3, 4))))
        reducers = tuple(("reducer", number) for number in range(chance.choice((2, 3))))
        owners = tuple(chance.choice(reducers) for _ in range(ELEMENTS))
        self.view = View(0, members, reducers, owners, self.partners(owners, reducers), 0)
        self.processes: dict[Name, Any] = {name: Reducer(self, name, self.view) for name in reducers}
        for element in range(ELEMENTS):
            for name in (owners[element], self.view.partners[element]):
                if name is not None:
                    self.processes[name].kept[element] = Element()
            partner = self.view.partners[element]
            if partner is not None:
                self.processes[owners[element]].copied.add((element, partner))
        self.processes |= {name: Worker(self, name, self.view) for name in members}
        for name in reducers:
            self.processes[name].has_plan = True
        for name in members:
            self.processes[name].push()
        self.faults = [chance.choice(("worker", "reducer", "both", "join")) for _ in range(chance.randint(1, 5))]
        self.pace = chance.choice((0.01, 0.03, 0.1))

    def partners(self, owners: tuple[Name, ...], reducers: tuple[Name, ...]) -> tuple[Name | None, ...]:
        """The next one in a ring."""
        if len(reducers) == 1:
            return (None,) * ELEMENTS
        return tuple(reducers[(reducers.index(owner) + 1) % len(reducers)] for owner in owners)

    def run(self) -> None:
        for _ in range(MANY_EVENTS):
            if self.faults and self.chance.random() < self.pace:
                self.fault(self.faults.pop())
            if not self.queues:
                if self.faults:
                    continue
                return self.check_end()
            sender, receiver = ends = self.chance.choice(list(self.queues))
            message = self.queues[ends].popleft()
            if not self.queues[ends]:
                del self.queues[ends]
            if receiver in self.processes:
                getattr(self.processes[receiver], "on_" + message[0])(sender, *message[1:])
        raise BrokenError("it does not come to an end")

    # --- Faults.

    def of_kind(self, kind: str) -> list[Any]:
        return [process for name, process in self.processes.items() if name[0] == kind]

    def is_backed_up(self) -> bool:
        """Whether any reducer may be lost."""
        view = self.view
        return len(view.reducers) > 1 and all(
            owner in self.processes
            and partner in self.processes
            and self.processes[owner].has_plan
            and self.processes[owner].view.number == view.number
            and self.processes[owner].copying is None
            and (element, partner) in self.processes[owner].copied
            for element, (owner, partner) in enumerate(zip(view.owners, view.partners, strict=True))
        )

    def kill(self, name: Name) -> None:
        del self.processes[name]
        for ends in list(self.queues):
            if ends[1] == name:
                del self.queues[ends]
            elif ends[0] == name:
                for _ in range(self.chance.randrange(len(self.queues[ends]) + 1)):
                    self.queues[ends].pop()
                if not self.queues[ends]:
                    del self.queues[ends]

    def fault(self, kind: str) -> None:
        view = self.view
        if kind in ("worker", "both") and len(view.members) > 1:
            self.kill(self.chance.choice(view.members))
        if kind in ("reducer", "both") and self.is_backed_up():
            self.kill(self.chance.choice(view.reducers))
        reducers = tuple(name for name in view.reducers if name in self.processes)
        if kind == "join":
            name = ("reducer", 10 + len(self.faults))  # nobody has had it
            self.processes[name] = Reducer(self, name, view)
            reducers = (*reducers, name)
        self.change(tuple(name for name in view.members if name in self.processes), reducers)

    def change(self, members: tuple[Name, ...], reducers: tuple[Name, ...]) -> None:
        """What the coordinator does with the members' reports."""
        workers = self.of_kind("worker")
        least = min(worker.given for worker in workers)
        holders = [worker.given > least or worker.holds() for worker in workers]
        insist(max(worker.given for worker in workers) <= least + 1, "some were given two rounds more than others")
        complete = all(holders)
        insist(complete or all(worker.given == least for worker in workers), "some were given what others do not hold")
        for worker in workers:
            if complete and worker.given == least:
                self.note(worker)
        view = self.view
        owners = tuple(
            owner if owner in self.processes or partner is None else partner
            for owner, partner in zip(view.owners, view.partners, strict=True)
        )
        partners = self.partners(owners, reducers)
        self.view = View(view.number + 1, members, reducers, owners, partners, least + complete)
        for ends in [ends for ends in self.queues if ends[1][0] == "worker"]:
            del self.queues[ends]  # they have left their connections
        for worker in workers:
            worker.enter(self.view)

    # --- What is promised.

    def note(self, worker: Worker) -> None:
        results = tuple(worker.results[element] for element in range(ELEMENTS))
        insist(len(set(results)) == 1, f"round {worker.given}: elements have counted others: {results}")
        insist(len(results[0]) == worker.given + 1, f"round {worker.given} has seen {len(results[0])} updates")
        same = self.results.setdefault(worker.given, results)
        insist(same == results, f"round {worker.given}: {worker.name} has other weights: {results} and {same}")
        before = self.results.get(worker.given - 1)
        insist(before is None or results[0][:-1] == before[0], f"round {worker.given} does not follow from the last")

    def check_end(self) -> None:
        for worker in self.of_kind("worker"):
            insist(worker.given == STEPS, f"{worker.name} is stuck in round {worker.given}")
        for element, (owner, partner) in enumerate(zip(self.view.owners, self.view.partners, strict=True)):
            own = self.processes[owner].kept[element]
            if partner is not None and (element, partner) in self.processes[owner].copied:
                theirs = self.processes[partner].kept[element]
                insist(theirs.value == own.value, f"the backup of element {element} is {theirs.value}, not {own.value}")


def first_break(broken: str, schedules: Iterable[int]) -> tuple[int, str] | None:
    """The first seed whose schedule breaks a promise, and which; None if none does."""
    for seed in schedules:
        try:
            Job(seed, broken).run()
        except BrokenError as error:
            return seed, str(error)
    return None
