"""``jaxhetero status``: asks a running job who is there and how it is doing. Imports neither jax nor numpy."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from jaxhetero.errors import ConfigError, InternalError, from_status

# For how long the reducers' rounds may wait for a worker before it counts as late.
_LATE_S = 1.0
# Within this of the fastest, one is as fast for all that a plan can do.
_SLOW_PERCENT = 75
_JOB_FILE = "job.json"


@dataclass(frozen=True)
class ProcessStatus:
    """One worker or reducer. Rates are those between two questions.

    Example:
      >>> from jaxhetero.doctor.status import ProcessStatus
      >>> ProcessStatus("rank 3", "b", "10.0.0.5:4711", is_member=True, silent_s=7.5, answers=False).problem
      'rank 3 (b, 10.0.0.5:4711) does not answer; its last sign of life was 7.5 s ago'
    """

    name: str
    """``rank 3`` or ``reducer 1``."""
    host: str
    address: str
    """The address from which it is connected to the coordinator."""
    is_member: bool
    """Whether it takes part; else it has left, or waits."""
    answers: bool
    silent_s: float
    """Seconds since the coordinator has last heard of it."""
    is_candidate: bool = False
    """Whether it waits to be let into an elastic job."""
    view: int = 0
    round_count: int = 0
    rounds_per_s: float = 0.0
    sent_bytes_per_s: float = 0.0
    received_bytes_per_s: float = 0.0
    round: str = ""
    """Of a worker: the running round that has made no progress for longest."""
    waited_s: float = 0.0
    """Seconds since that round has made progress."""
    late_s: float = 0.0
    """Seconds for which the reducers' rounds have waited for this worker."""

    rate_percent: int = 0
    """Of a dedicated reducer: what its interface has carried in the latest rounds that were timed, in percent of the
    fastest one's; 0 where it is not known. Of a worker whose interface has become slow: the rate of all rounds, which
    wait for it, in percent of the best one so far; 0 where it has not."""

    @property
    def problem(self) -> str:
        """What is wrong with it, in words; empty if nothing is."""
        who = f"{self.name} ({self.host}, {self.address})"
        if self.is_member and not self.answers:
            return f"{who} does not answer; its last sign of life was {self.silent_s:.1f} s ago"
        return f"{who} is late: the others have waited for it for {self.late_s:.1f} s" if self.late_s > _LATE_S else ""

    @property
    def state(self) -> str:
        """A few words for a table."""
        if not self.is_member:
            return "waits to come in" if self.is_candidate else "has left"
        if not self.answers:
            return f"no answer for {self.silent_s:.1f} s"
        if self.late_s > _LATE_S:
            return f"late by {self.late_s:.1f} s"
        if self.waited_s > _LATE_S:
            return f"waits for {self.waited_s:.1f} s"
        if self.rate_percent > 0 and not self.name.startswith("reducer"):
            return f"is slow: rounds run at {self.rate_percent} %"
        return f"carries {self.rate_percent} % of the fastest" if 0 < self.rate_percent < _SLOW_PERCENT else "ok"


@dataclass(frozen=True)
class JobStatus:
    """A job, as its coordinator sees it."""

    job_id: str
    has_started: bool
    view: int
    """It counts the changes of the reducers, and in an elastic job those of the workers, from the time of the start."""
    worker_count: int
    """How many the job was started with; in an elastic job, how many take part now."""
    reducer_count: int
    """How many the job was started with; in an elastic job, without those inside workers that do not take part."""
    missing: str
    """The processes that it waits for: before the start, or where too few workers of an elastic job are left."""
    processes: list[ProcessStatus]
    most_workers: int = 0
    """In an elastic job, how many there may be."""

    def problems(self) -> list[str]:
        """What is wrong, in words."""
        return list(self._problems())

    def _problems(self) -> Iterator[str]:
        if self.missing:
            yield f"waiting for {self.missing}"
        yield from filter(None, (process.problem for process in self.processes))
        if self.has_started:
            reducers = sum(process.is_member and process.name.startswith("reducer") for process in self.processes)
            if reducers < self.reducer_count:
                yield f"{self.reducer_count - reducers} of {self.reducer_count} reducers are lost"


def read_status(
    coordinator: str, token: str, seconds: float = 1.0, patience_s: float = 3.0, encrypt: bool = False
) -> JobStatus:
    """Ask the coordinator of a job twice, for the rates.

    Blocks for ``seconds`` and the time of the answers: at once if every process answers, else a second for each of the
    two questions; for ``patience_s`` if rank 0, where the coordinator is, does not answer.

    Args:
      coordinator: ``host:port`` of the job.
      token: the job's secret.
      seconds: the time between the two questions.
      patience_s: how long to wait for the coordinator.
      encrypt: whether the job encrypts.

    Raises:
      AuthenticationError: the job has another token.
      VersionMismatch: the job is of another version, or ``encrypt`` is not what the job does.
      InternalError: nobody answers there, or rank 0 does not.

    Example:
      >>> import jaxhetero.doctor.status
      >>> jaxhetero.doctor.status.read_status("127.0.0.1:9", "secret")  # doctest: +ELLIPSIS
      Traceback (most recent call last):
          ...
      jaxhetero.errors.InternalError: no answer from the coordinator at 127.0.0.1:9, where rank 0 is: Connection refused
    """
    first = _visit(coordinator, token, encrypt, patience_s)
    start = time.monotonic()
    time.sleep(seconds)
    second = _visit(coordinator, token, encrypt, patience_s)
    return _compare(first, second, time.monotonic() - start)


def run_status(coordinator: str, token: str, encrypt: bool, console: Console | None) -> int:
    """Show the status of a job: tables on a console, or JSON on standard output.

    Returns:
      The exit code: 0 if there is no problem, else 1.

    Raises:
      JaxheteroError: see ``read_status``.
    """
    status = read_status(coordinator, token, encrypt=encrypt)
    if console is None:
        print(json.dumps(asdict(status) | {"problems": status.problems()}))
    else:
        _show(status, console)
    return 1 if status.problems() else 0


@contextlib.contextmanager
def job_file(folder: Path, coordinator: str, token: str, encrypt: bool) -> Iterator[None]:
    """How to ask a job, in its folder of logs, for ``status`` by the job's owner, while the job runs.

    Raises:
      ConfigError: the file cannot be written.
    """
    path = folder / _JOB_FILE
    part = path.with_suffix(".part")  # nobody finds it half written
    try:
        part.unlink(missing_ok=True)
        part.touch(mode=0o600, exist_ok=False)
        part.write_text(json.dumps({"coordinator": coordinator, "token": token, "encrypt": encrypt}), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def find_job_file(folder: Path | None) -> dict[str, Any]:
    """What ``job_file`` wrote of the job with this folder of logs, or of the latest one below ``jaxhetero-logs``.

    Empty if there is none.

    Raises:
      ConfigError: the file is another user's, or cannot be read.
    """
    folders = [folder] if folder is not None else sorted(Path("jaxhetero-logs").glob("*"))
    for path in reversed([of / _JOB_FILE for of in folders]):
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            continue  # there is no such job, or it has just ended
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {path}, which says where the job is: {error}") from None
    return {}


def _visit(coordinator: str, token: str, encrypt: bool, patience_s: float) -> dict[str, Any]:
    from jaxhetero import _native

    (code, message), job = _native.visit(coordinator, token, encrypt, round(1000 * patience_s))
    if job is None and code == "InternalError":
        raise InternalError(f"no answer from the coordinator at {coordinator}, where rank 0 is: {message}")
    if job is None:
        raise from_status(code, f"the coordinator at {coordinator}: {message}")
    return job


def _compare(first: dict[str, Any], second: dict[str, Any], seconds: float) -> JobStatus:
    late_s: dict[str, float] = {}
    for process in second["processes"]:
        for rank, waited_ms in (process["state"] or {}).get("late_workers", []):
            late_s[f"rank {rank}"] = max(late_s.get(f"rank {rank}", 0.0), waited_ms / 1000)
    # In an elastic job, one that waits to come in may have the rank of another.
    earlier = {(_name(process), process["address"]): process["state"] for process in first["processes"]}
    processes = []
    for process in second["processes"]:
        name, address, state = _name(process), process["address"], process["state"]
        late = late_s.get(name, 0.0) if process["is_member"] else 0.0
        status = ProcessStatus(
            name, process["host"], address, process["is_member"], state is not None, process["silent_ms"] / 1000,
            process["is_candidate"], late_s=late, rate_percent=process["rate_percent"],
            **_growth(earlier.get((name, address)), state, seconds),
        )  # fmt: skip
        processes.append(status)
    processes.sort(key=lambda process: (process.name.startswith("reducer"), int(process.name.split()[-1])))
    return JobStatus(
        f"{second['job_id']:016x}", second["has_started"], second["view"], second["worker_count"],
        second["reducer_count"], second["missing"], processes, second["most_workers"],
    )  # fmt: skip


def _name(process: dict[str, Any]) -> str:
    return f"rank {process['rank']}" if process["is_worker"] else f"reducer {process['number']}"


def _growth(before: dict[str, Any] | None, after: dict[str, Any] | None, seconds: float) -> dict[str, Any]:
    """The fields of ``ProcessStatus`` that come from a process's own answers."""
    if after is None:
        return {}
    found = {name: after[name] for name in ("view", "round_count", "round")} | {"waited_s": after["waited_ms"] / 1000}
    if before is not None:
        for name in ("round_count", "sent_bytes", "received_bytes"):
            found[f"{name.replace('round_count', 'rounds')}_per_s"] = max(0, after[name] - before[name]) / seconds
    return found


def _show(status: JobStatus, console: Console) -> None:
    table = Table("process", "host", "rounds", "rounds/s", "MB/s out", "MB/s in", "state", box=box.SIMPLE_HEAD)
    for process in status.processes:
        rates = (process.rounds_per_s, process.sent_bytes_per_s / 1e6, process.received_bytes_per_s / 1e6)
        shown = [str(process.round_count), *(f"{rate:.1f}" for rate in rates)] if process.answers else ["", "", "", ""]
        table.add_row(process.name, process.host, *shown, process.state, style="" if not process.problem else "red")
    console.print(table)
    begun = f"job {status.job_id}, view {status.view}" if status.has_started else "the job has not started"
    if status.has_started and status.most_workers:
        begun += f", {status.worker_count} workers of at most {status.most_workers}"
    console.print(f"{begun}: {'; '.join(status.problems()) or 'no problem'}", markup=False, highlight=False)
