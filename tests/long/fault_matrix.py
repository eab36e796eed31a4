"""Every fault at every kind of process in every phase of a job: what the others saw, and when.

    python -m tests.long.fault_matrix --faults down slow --json-file cells.json

Each cell is a job of its own in the lab: three workers and two reducers, a host of 200 Mbit/s each. All rounds sum
known integers in float32 and are compared bit by bit.

How a phase is hit. The window is larger than a shard, so in the round that is held until the last rank comes, all the
others push everything and then wait; when it has come, the totals flow back.

  idle      all have finished a round, none has begun the next
  push      rank 2 has not come to the round; the strike falls where a seeded part of the contribution has been sent
  return    rank 2 has come last; the strike falls where a seeded part of the total has been received
  start     rank 2 does not enrol until the strike, which falls 0.2 to 0.8 s after all others have begun to
  shutdown  rank 2 has not come to the last round, all others have, and have called shutdown(); then within 0.3 s
"""

from __future__ import annotations

import itertools
import json
import random
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import tyro

from jaxhetero.launch.reducer import LOST
from lab import clock_jump
from lab.netlab import Lab
from tests.support.cluster import ROOT, program_path

Fault = Literal["kill", "stop", "down", "slow", "frames", "reset", "clock"]
Role = Literal["worker", "reducer", "coordinator"]
Phase = Literal["idle", "push", "return", "start", "shutdown"]

FAULTS: dict[Fault, str] = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP",
    "down": "link down",
    "slow": "link at 1 % of its rate",
    "frames": "30 % of frames cut",
    "reset": "connections reset",
    "clock": "clock an hour ahead",
}
# Rank 0's host has the coordinator.
VICTIMS: dict[Role, str] = {"worker": "worker 1", "reducer": "reducer 0", "coordinator": "worker 0"}
PHASES: list[Phase] = ["idle", "push", "return", "start", "shutdown"]

WORKERS, REDUCERS = 3, 2
RATE, SLOW_RATE = "200mbit", "2mbit"
TIMEOUT_S, START_TIMEOUT_S = 5, 12
# How long a slow link stays so, and how long everybody stays idle.
LONGER_THAN_TIMEOUT_S = 1.6 * TIMEOUT_S
# After that something hangs: the longest chain of deadlines, and room for a busy machine.
PATIENCE_S = START_TIMEOUT_S + 4 * TIMEOUT_S + 20
BUCKET_COUNT = 2 << 20
CHUNK_BYTES = 64 << 10

GOES_ON = "goes on"


@dataclass(frozen=True)
class Cell:
    fault: Fault
    role: Role
    phase: Phase
    elastic: bool = False
    """With a coordinator on a host of its own."""

    def __str__(self) -> str:
        return f"{self.fault}/{self.role}/{self.phase}{'/elastic' if self.elastic else ''}"

    @property
    def victim(self) -> str:
        return "coordinator 0" if self.elastic and self.role == "coordinator" else VICTIMS[self.role]

    @property
    def has_to_come_back(self) -> bool:
        """Whether nobody can leave an elastic job without it: rounds go on."""
        return self.elastic and self.role == "coordinator" and self.fault in ("kill", "stop", "down")

    @property
    def expected(self) -> set[str]:
        """The ways in which a worker that survives may end."""
        if self.fault in ("slow", "clock") or self.elastic:
            return {GOES_ON}
        if self.phase == "start":
            # Before it is a member, a process tries again, and somebody else may come in its place.
            lost = {"worker": {"WorkerLost"}, "reducer": {"ReducerLost", GOES_ON}, "coordinator": {"WorkerLost"}}
            return {"StartTimeout", *lost[self.role], *([GOES_ON] if self.fault in ("frames", "reset") else [])}
        if self.role == "reducer":
            return {GOES_ON}
        # Who ends a worker's connections may take the reducers from it, one by one.
        return {"WorkerLost", "ReducerLost"} if self.fault == "frames" and self.role == "worker" else {"WorkerLost"}


@dataclass
class Saw:
    """How one process took it."""

    who: str
    kind: str
    why: str
    after_s: float | None
    """Until the exception, or the end of the next round; none where nothing was to be noticed."""


@dataclass
class Result:
    cell: Cell
    saw: list[Saw]
    problems: list[str]
    seed: int
    logs: dict[str, str] = field(default_factory=dict)


class Job:
    """The processes of one cell, and what they have said."""

    def __init__(self, lab: Lab, folder: Path, cell: Cell, library: Path) -> None:
        self.lab = lab
        self.folder = folder
        self.cell = cell
        self.ended: dict[str, float] = {}
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self._library = library
        coordinator = lab["c0" if cell.elastic else "w0"]
        port = coordinator.free_port()
        self._settings = {
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "error",
            "JAX_PLATFORMS": "cpu",
            "JAXHETERO_COORDINATOR": f"{coordinator.address}:{port}",
            "JAXHETERO_TOKEN": secrets.token_hex(16),
            "JAXHETERO_WORKER_COUNT": str(WORKERS),
            "JAXHETERO_REDUCER_COUNT": str(REDUCERS),
            "JAXHETERO_START_TIMEOUT_MS": str(1000 * START_TIMEOUT_S),
            "JAXHETERO_TIMEOUT_MS": str(1000 * TIMEOUT_S),
            "JAXHETERO_CHUNK_BYTES": str(CHUNK_BYTES),
            # How far a push is, is told by its bytes.
            "JAXHETERO_COMPRESS": "never",
            # More than any shard: their sizes follow the rates that were measured.
            "JAXHETERO_WINDOW_CHUNKS": str(4 * BUCKET_COUNT // CHUNK_BYTES),
        }
        if cell.elastic:
            self._settings |= {"JAXHETERO_ELASTIC": f"2:{WORKERS}", "JAXHETERO_LOST_AFTER_MS": str(800 * TIMEOUT_S)}

    def start(self) -> None:
        if self.cell.fault == "frames":
            self._start("proxy", self._host(self.cell.victim), ["-m", "lab.cutting_proxy", "--seed", "1"])
            self.wait_until("the proxy", lambda: "ready" in self.text("proxy", "out"))
        if self.cell.elastic:
            self.start_coordinator("coordinator 0")
        program = [str(program_path("faults.py")), self.cell.phase, str(self.folder), str(BUCKET_COUNT)]
        for rank in range(WORKERS):
            self._start(f"worker {rank}", f"w{rank}", program, JAXHETERO_RANK=str(rank))
        # How long an import takes is not to count as part of the start.
        self.wait_for_all("loaded")
        for index in range(REDUCERS):
            self._start(f"reducer {index}", f"r{index}", ["-m", "jaxhetero", "reducer"])
        self.let("begin")

    def start_coordinator(self, name: str) -> None:
        self._start(name, "c0", ["-m", "jaxhetero", "coordinator"])

    def _host(self, name: str) -> str:
        kind, number = name.split()
        return kind[0] + number

    def _start(self, name: str, host: str, command: list[str], **settings: str) -> None:
        env = {**self._settings, "JAXHETERO_HOST": self.lab[host].address, **settings}
        if self.cell.fault == "clock" and name == self.cell.victim:
            env |= clock_jump.environment(self._library, self.folder / "jump")
        with self._log(name, "out").open("w") as output, self._log(name, "err").open("w") as errors:
            command = [sys.executable, *command]
            self.processes[name] = self.lab[host].start(command, env=env, stdout=output, stderr=errors)

    def _log(self, name: str, kind: str) -> Path:
        return self.folder / f"{name}.{kind}"

    def text(self, name: str, kind: str) -> str:
        return self._log(name, kind).read_text()

    def events(self, rank: int) -> list[dict[str, Any]]:
        text = self.text(f"worker {rank}", "out")
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def has_said(self, rank: int, event: str) -> bool:
        return any(found["event"] == event for found in self.events(rank))

    def moved(self, rank: int, way: str) -> float:
        return max((event[way] for event in self.events(rank) if event["event"] == "moved"), default=0)

    def let(self, name: str) -> None:
        (self.folder / name).touch()

    def wait_until(self, what: str, condition: Callable[[], bool], timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.note_ends()
            if time.monotonic() > deadline or self.ended:
                logs = "\n".join(self.text(name, "err")[-500:] for name in self.processes)
                raise RuntimeError(f"{self.cell}: {what} did not come; ended: {list(self.ended)}\n{logs}")
            time.sleep(0.005)

    def wait_for_all(self, event: str) -> None:
        self.wait_until(event, lambda: all(self.has_said(rank, event) for rank in range(WORKERS)))

    def note_ends(self) -> None:
        for name, process in self.processes.items():
            if name not in self.ended and process.poll() is not None:
                self.ended[name] = time.monotonic()

    def wait_for_ends(self, names: Sequence[str], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not set(names) <= self.ended.keys() and time.monotonic() < deadline:
            self.note_ends()
            time.sleep(0.01)

    def strike(self) -> float:
        """When it struck."""
        victim, host = self.processes[self.cell.victim], self.lab[self._host(self.cell.victim)]
        at = time.monotonic()
        if self.cell.fault == "kill":
            victim.send_signal(signal.SIGKILL)
        elif self.cell.fault == "stop":
            victim.send_signal(signal.SIGSTOP)
        elif self.cell.fault == "down":
            host.cut()
        elif self.cell.fault == "slow":
            host.slow(SLOW_RATE)
        elif self.cell.fault == "frames":
            self.processes["proxy"].send_signal(signal.SIGUSR1)
        elif self.cell.fault == "reset":
            host.run(["ss", "--kill", "--tcp", "state", "established"])
        else:
            self.let("jump")
        return at

    def undo(self) -> None:
        if self.cell.fault == "stop":
            self.processes[self.cell.victim].send_signal(signal.SIGCONT)
        elif self.cell.fault in ("slow", "down"):
            self.lab[self._host(self.cell.victim)].restore()
        elif self.cell.fault == "kill":  # as whoever supervises it does
            self.start_coordinator("coordinator 1")


@contextmanager
def _job(cell: Cell) -> Iterator[Job]:
    rates = {f"w{rank}": RATE for rank in range(WORKERS)} | {f"r{index}": RATE for index in range(REDUCERS)}
    rates |= {"c0": RATE} if cell.elastic else {}
    with TemporaryDirectory() as folder, Lab(rates) as lab:
        library = clock_jump.build(Path(folder)) if cell.fault == "clock" else Path()
        yield Job(lab, Path(folder), cell, library)


def run_cell(cell: Cell, seed: int = 0) -> Result:
    chance = random.Random(f"{cell} {seed}")
    with _job(cell) as job:
        try:
            job.start()
            _reach(job, chance)
        except RuntimeError as error:
            return Result(cell, [], [str(error)], seed)
        struck = job.strike()
        _go_on(job, struck)
        survivors = [name for name in job.processes if name != "proxy"]
        # One that is cut off from an elastic job looks for its coordinator for minutes.
        is_away = cell.elastic and cell.fault == "down" and cell.role == "worker"
        if is_away or cell.fault in ("kill", "stop"):
            survivors.remove(cell.victim)
        job.wait_for_ends(survivors, struck + PATIENCE_S - time.monotonic())
        if cell.fault == "stop":
            if not cell.has_to_come_back:
                job.undo()
            job.wait_for_ends([cell.victim], PATIENCE_S)
            survivors.append(cell.victim)
        saw = [_saw(job, name, struck) for name in survivors]
        logs = {f"{name}.{kind}": job.text(name, kind)[-3000:] for name in job.processes for kind in ("out", "err")}
        return Result(cell, saw, _problems(job, saw), seed, logs)


def _reach(job: Job, chance: random.Random) -> None:
    """Until the job is where the fault is to strike."""
    phase, part = job.cell.phase, chance.uniform(0.2, 0.8)
    watched = 0 if job.cell.role == "coordinator" else 1
    if phase == "start":
        job.wait_for_all("starting")
        time.sleep(chance.uniform(0.2, 0.8))
        return
    job.wait_for_all("running")
    if phase == "idle":
        time.sleep(chance.uniform(0.1, 0.4))
    elif phase == "push":
        job.wait_until("the push", lambda: job.moved(watched, "sent") >= part)
    elif phase == "shutdown":
        job.wait_until("the shutdown", lambda: all(job.has_said(rank, "leaving") for rank in range(WORKERS - 1)))
        time.sleep(chance.uniform(0, 0.3))
    else:
        job.wait_until("the whole push", lambda: all(job.moved(rank, "sent") >= 1 for rank in range(WORKERS - 1)))
        job.let("come")
        job.wait_until("the return", lambda: job.moved(watched, "received") >= part)


def _go_on(job: Job, struck: float) -> None:
    """Lets the rest of the job come to where the fault has struck, and takes a slow link back."""
    job.let("come")
    workers = [name for name in job.processes if name.startswith("worker")]
    if job.cell.fault == "slow" or job.cell.phase == "idle":
        job.wait_for_ends(workers, struck + LONGER_THAN_TIMEOUT_S - time.monotonic())
    if job.cell.fault == "slow" or job.cell.has_to_come_back:
        time.sleep(1)
        job.undo()
    job.let("work")


def _saw(job: Job, name: str, struck: float) -> Saw:
    shown = f"rank {name.split()[1]}" if name.startswith("worker") else name
    if name.startswith("coordinator") and name in job.ended and (code := job.processes[name].returncode) == 0:
        return Saw(shown, GOES_ON, "", None)
    if name not in job.ended:
        has_ended = name.startswith("worker") and job.has_said(int(name.split()[1]), "end")
        return Saw(shown, "hangs", "after its last word" if has_ended else "", None)
    if name.startswith("reducer"):
        code, after_s = job.processes[name].returncode, round(job.ended[name] - struck, 1)
        said = re.findall(r"^jaxhetero: (\w+): (.*)", job.text(name, "err"), re.MULTILINE)
        if code == 0:
            return Saw(shown, GOES_ON, "", None)
        if code == LOST:
            said = [("ReducerLost", job.text(name, "err").rpartition("WARNING ")[2].strip())]
        return Saw(shown, *said[-1], after_s) if said else Saw(shown, f"exit code {code}", "", after_s)
    events = job.events(int(name.split()[1]))
    end = next((event for event in events if event["event"] == "end"), None)
    if end is None:
        return Saw(shown, f"exit code {job.processes[name].returncode}", "", round(job.ended[name] - struck, 1))
    next_round = next((event for event in events if event["event"] == "round" and event["at"] > struck), end)
    at = next_round["at"] if end["kind"] == GOES_ON else end["at"]
    unnoticed = end["kind"] == GOES_ON and job.cell.phase in ("idle", "start")
    return Saw(shown, end["kind"], end["message"], None if unnoticed else round(at - struck, 1))


def _problems(job: Job, saw: list[Saw]) -> list[str]:
    """What breaks the promise."""
    cell, problems = job.cell, []
    cut_off = cell.fault in ("stop", "down", "frames", "reset")
    for one in saw:
        is_victim = one.who == cell.victim.replace("worker", "rank")
        if one.kind == "hangs" or one.kind.startswith("exit code") or one.kind == "InternalError":
            problems.append(f"{one.who}: {one.kind} {one.why}")
        elif one.who.startswith("rank") and not (is_victim and cut_off) and one.kind not in cell.expected:
            problems.append(f"{one.who}: {one.kind}, not {' or '.join(sorted(cell.expected))}: {one.why}")
        if one.who == "rank 0" and cell.fault == "down" and cell.phase != "start" and is_victim:
            problems += [] if "was cut off" in one.why else [f"rank 0 takes the others for lost: {one.why}"]
    for rank in range(WORKERS):
        for event in job.events(rank):
            if event.get("wrong"):
                problems.append(f"rank {rank}: a wrong sum")
            if event["event"] == "end" and cell.fault == "clock" and cell.victim == f"worker {rank}":
                problems += [] if abs(event["jump_s"] - 3600) <= 1 else ["the clock did not jump"]
    if cell.fault == "frames" and "cut" not in job.text("proxy", "out"):
        problems.append("no frame was cut")
    return problems


# What a connection that ends looks like depends on what was on its way.
_ENDED = r"it closed the connection|Connection reset by peer|Software caused connection abort|Broken pipe"
_ASIDE = r"(; running| for \d+ ms in|; last completed|; is rank 0|; the job goes on|no sign of life).*"


def _short(why: str) -> str:
    """The reason without what differs from run to run."""
    text = re.sub(_ENDED, "its connection ended", why)
    text = re.sub(_ASIDE, lambda found: "no sign of life" if found[1].startswith("no") else "", text)
    text = re.sub(r"\(host (\w+), [\d.:]+\)", r"(\1)", text)
    return re.sub(r":\d{4,5}\b|\(host (\w+)\)", lambda found: f"({found[1]})" if found[1] else "", text)[:160]


def _groups(saw: list[Saw]) -> dict[str, list[Saw]]:
    """Those who saw the same, together, by what it was."""
    groups: dict[str, list[Saw]] = {}
    for one in saw:
        text = "goes on, same bits" if one.kind == GOES_ON else f"`{one.kind}` {_short(one.why)}".strip()
        groups.setdefault(text, []).append(one)
    return groups


def _who(group: list[Saw]) -> str:
    names: dict[str, list[str]] = {}
    for name in sorted({one.who for one in group}):
        names.setdefault(name.split()[0], []).append(name.split()[1])
    return ", ".join(f"{kind}{'s' if len(which) > 1 else ''} {', '.join(which)}" for kind, which in names.items())


def _times(group: list[Saw]) -> str:
    times = [one.after_s for one in group if one.after_s is not None]
    if not times:
        return ""
    least, most = min(times), max(times)
    return f" ({least:.1f} s)" if most - least < 0.1 else f" ({least:.1f} to {most:.1f} s)"


def markdown(results: list[Result]) -> str:
    """A line for the phases of a fault at one place that ended in the same way."""
    lines = ["| what | at | when | what the others saw, and after how long |", "|---|---|---|---|"]
    same: dict[tuple[object, ...], list[Result]] = {}
    for result in results:
        seen = {(text, _who(group)) for text, group in _groups(result.saw).items()}
        same.setdefault((result.cell.fault, result.cell.role, *sorted(seen), *result.problems), []).append(result)
    for alike in same.values():
        cell = alike[0].cell
        groups = _groups([one for result in alike for one in result.saw])
        seen = "; ".join(f"{_who(group)}: {text}{_times(group)}" for text, group in groups.items())
        bad = "".join(f" **{problem.splitlines()[0]}**" for problem in alike[0].problems)
        when = ", ".join(result.cell.phase for result in alike)
        lines.append(f"| {FAULTS[cell.fault]} | {cell.role} | {when} | {seen}{bad} |")
    return "\n".join(lines)


def _read(file: Path) -> list[Result]:
    entries = json.loads(file.read_text())
    return [
        Result(**{**entry, "cell": Cell(**entry["cell"]), "saw": [Saw(**one) for one in entry["saw"]]})
        for entry in entries
    ]


def cells(
    faults: Sequence[str] = (), roles: Sequence[str] = (), phases: Sequence[str] = (), elastic: bool = False
) -> list[Cell]:
    """Of an elastic job, those in which a process or a host is gone once it has started."""
    every = itertools.product(FAULTS, VICTIMS, PHASES)
    wanted: list[set[str]] = [{*(faults or FAULTS)}, {*(roles or VICTIMS)}, {*(phases or PHASES)}]
    if elastic:
        wanted = [wanted[0] & {"kill", "stop", "down"}, wanted[1], wanted[2] - {"start"}]
    found = (cell for cell in every if all(part in some for part, some in zip(cell, wanted, strict=True)))
    return [Cell(*cell, elastic=elastic) for cell in found]


def main(
    faults: tuple[Fault, ...] = (),
    roles: tuple[Role, ...] = (),
    phases: tuple[Phase, ...] = (),
    elastic: bool = False,
    seed: int = 0,
    at_once: int = 2,
    json_file: Path | None = None,
    show: tuple[Path, ...] = (),
) -> None:
    """
    Args:
        faults: Only these.
        roles: Only at these.
        phases: Only in these.
        elastic: In elastic jobs.
        seed: Of the instants.
        at_once: How many cells to run at the same time.
        json_file: Where to write everything that was seen, with the ends of the logs.
        show: Runs nothing, and prints the table of these files; of a cell that is in several, the last counts.
    """
    if show:
        print(markdown(list({result.cell: result for file in show for result in _read(file)}.values())))
        return
    begin = time.monotonic()

    def run(cell: Cell) -> Result:
        result = run_cell(cell, seed)
        shown = "; ".join(result.problems) or "as promised"
        print(f"{time.monotonic() - begin:.0f} s  {cell}: {shown}", file=sys.stderr, flush=True)
        return result

    with ThreadPoolExecutor(at_once) as pool:
        results = list(pool.map(run, cells(faults, roles, phases, elastic)))
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(result) for result in results], indent=1))
    print(markdown(results))
    bad = [str(result.cell) for result in results if result.problems]
    print(f"{len(results)} cells in {time.monotonic() - begin:.0f} s; not as promised: {', '.join(bad) or 'none'}")
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    tyro.cli(main)
