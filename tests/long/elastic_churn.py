"""A trainer whose workers die and come back all the time: what that costs, and that it changes no bit.

    python -m tests.long.elastic_churn churn   # 8 workers, one of them killed every 20 s, 20 epochs
    python -m tests.long.elastic_churn bits    # on 1, 2, 3, 4, 5 and 8 workers, and over two histories of losses

Workers keep what they compile in a folder, so that one that comes back need not compile.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from tests.support.cluster import ROOT, program_path

_LINE = re.compile(r"counted step (\d+) among (\d+) rank (\d+) process (\d+) at (\S+)")
_AGAIN = re.compile(r"again step (\d+) ")
_POLL_S = 0.05
_ENOUGH = 10  # steps for a median


@dataclass(frozen=True)
class Counted:
    """A step that counts, as one worker tells it."""

    step: int
    member_count: int
    rank: int
    process: int
    at_s: float


@dataclass
class Run:
    """A training that runs, or has run."""

    folder: Path
    launcher: subprocess.Popen[bytes]
    kills: list[tuple[int, int]] = field(default_factory=list)
    """The rank that was killed, and the step of that time."""
    done_again: set[int] = field(default_factory=set)
    """The steps in which a worker was lost, so that they did not count."""
    _killed: set[int] = field(default_factory=set)
    _read: dict[Path, int] = field(default_factory=dict)
    _lines: list[Counted] = field(default_factory=list)

    def counted(self) -> list[Counted]:
        """All that the workers have told so far."""
        for log in sorted(self.folder.glob("logs/worker-*.log")):
            with log.open("rb") as file:
                file.seek(self._read.get(log, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[log] = self._read.get(log, 0) + len(whole)
            told = whole.decode(errors="replace")
            self.done_again.update(int(found[1]) for found in _AGAIN.finditer(told))
            for found in _LINE.finditer(told):
                step, size, rank, process = map(int, found.groups()[:4])
                self._lines.append(Counted(step, size, rank, process, float(found[5])))
        return self._lines

    def live(self) -> dict[int, int]:
        """The process of each rank that takes part in the newest step, and runs."""
        newest = self.newest()
        recent = {each.rank: each.process for each in self._lines if each.step >= newest - 1}
        return {
            rank: process
            for rank, process in recent.items()
            if process not in self._killed and Path(f"/proc/{process}").exists()
        }

    def kill(self, rank: int, process: int) -> None:
        os.kill(process, signal.SIGKILL)
        self._killed.add(process)
        self.kills.append((rank, self.newest()))

    def newest(self) -> int:
        """The last step that has counted, or -1."""
        return max((each.step for each in self.counted()), default=-1)

    def member_counts(self) -> list[int]:
        """Among how many the steps were dealt, one number for all steps in a row with the same."""
        by_step = {each.step: each.member_count for each in self.counted()}
        sizes = [by_step[step] for step in sorted(by_step)]
        return [size for number, size in enumerate(sizes) if number == 0 or sizes[number - 1] != size]

    def goes_on(self, seconds: float) -> bool:
        """Wait that long; whether the training goes on."""
        deadline = time.monotonic() + seconds
        return self.wait_until(lambda: time.monotonic() >= deadline)

    def wait_until(self, condition: Callable[[], object]) -> bool:
        """Whether it has come true before the training ended."""
        while self.launcher.poll() is None:
            if condition():
                return True
            time.sleep(_POLL_S)
        return False

    def finish(self) -> dict[str, Any]:
        """The result that the trainer has written."""
        code = self.launcher.wait()
        assert code == 0, (self.folder / "output").read_text()[-4000:]
        found: dict[str, Any] = json.loads((self.folder / "run" / "result.json").read_text())
        return found


@contextmanager
def training(
    folder: Path, cache: Path, arguments: Sequence[str], *, workers: int, reducers: int, elastic: str = ""
) -> Iterator[Run]:
    """Start one; no process outlives the context."""
    folder.mkdir(parents=True)
    counts = ["--workers", str(workers), "--reducers", str(reducers), "--log-dir", str(folder / "logs")]
    launch = [sys.executable, "-m", "jaxhetero", "launch", *counts, *(["--elastic", elastic] if elastic else [])]
    program = [sys.executable, str(program_path("elastic_resnet.py")), *arguments, "--output", str(folder / "run")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAXHETERO_")}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(cache)}
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    with (folder / "output").open("wb") as output:
        launcher = subprocess.Popen(
            [*launch, "--start-timeout-ms", "600000", "--", *program], env=environment, stdout=output, stderr=output
        )
    try:
        yield Run(folder, launcher)
    finally:
        launcher.terminate()
        launcher.wait()


def check_steps(run: Run, result: dict[str, Any]) -> None:
    """No process counts a step twice or leaves one out, and together they count all of them."""
    assert result["is_complete"]
    by_process: dict[int, list[int]] = {}
    for each in run.counted():
        by_process.setdefault(each.process, []).append(each.step)
    for steps in by_process.values():
        assert steps == list(range(steps[0], steps[-1] + 1)), f"a process has counted the steps {steps}"
    assert {step for steps in by_process.values() for step in steps} == set(range(len(result["losses"])))


def goodput(run: Run, steps_per_epoch: int) -> dict[str, Any]:
    """What share of the time the steps would have taken, had each been as fast as the median of its like.

    Its like are the steps among as many workers, in front of which nobody has come or gone. So goodput says what losses
    and joins have cost, and whatever else has held steps up on this machine, but not that fewer workers are slower.
    ``lost_at_changes`` is the share of the time that steps took longer in which somebody was lost, or in front of which
    somebody came or went. Steps behind an evaluation are left out.
    """
    ends: dict[int, tuple[float, int]] = {}
    for each in run.counted():
        ends[each.step] = min(ends.get(each.step, (each.at_s, each.member_count)), (each.at_s, each.member_count))
    even: dict[int, list[float]] = {}
    steps: list[tuple[float, int, bool]] = []
    for step in sorted(ends):
        if step % steps_per_epoch:
            (before_s, before_size), (at_s, size) = ends[step - 1], ends[step]
            is_even = before_size == size and step not in run.done_again
            steps.append((at_s - before_s, size, is_even))
            if is_even:
                even.setdefault(size, []).append(at_s - before_s)
    overall_s = statistics.median(time_s for times_s in even.values() for time_s in times_s)
    usual = {size: statistics.median(times_s) for size, times_s in sorted(even.items()) if len(times_s) >= _ENOUGH}
    taken_s = sum(time_s for time_s, _, _ in steps)
    lost_s = sum(max(0.0, time_s - usual.get(size, overall_s)) for time_s, size, is_even in steps if not is_even)
    return {
        "goodput": round(sum(usual.get(size, overall_s) for _, size, _ in steps) / taken_s, 4),
        "lost_at_changes": round(lost_s / taken_s, 4),
        "train_s": round(taken_s, 1),
        "mean_member_count": round(sum(time_s * size for time_s, size, _ in steps) / taken_s, 2),
        "step_ms_by_member_count": {size: round(1000 * time_s, 1) for size, time_s in usual.items()},
        "slowest_steps_ms": [round(1000 * time_s) for time_s, _, _ in sorted(steps, reverse=True)[:5]],
    }


def churn(
    workers: int = 8,
    least: int = 2,
    reducers: int = 2,
    kill_every_s: float = 20,
    epochs: int = 20,
    microbatches: int = 10,
    preset: str = "mnist",
    folder: Path | None = None,
) -> dict[str, Any]:
    """Kill one worker after the other while they train, and compare with one worker that nothing happens to.

    Args:
      workers: how many there are.
      least: with fewer the job does not go on; none is killed then.
      reducers: how many.
      kill_every_s: how often.
      epochs: of the training.
      microbatches: in which the workers share out a step.
      preset: of models.resnet.
      folder: where logs and results are kept, a new one. Default: nowhere.
    """
    arguments = ["--preset", preset, "--epochs", str(epochs), "--microbatches", str(microbatches)]
    counts: dict[str, Any] = {"workers": workers, "reducers": reducers, "elastic": f"{least}:{workers}"}
    with tempfile.TemporaryDirectory() as name:
        top = folder or Path(name)
        with training(top / "churn", top / "cache", arguments, **counts) as run:
            turn = 0
            run.wait_until(run.counted)
            while run.goes_on(kill_every_s):
                live = run.live()
                if len(live) > least:
                    rank = min(live, key=lambda rank: (rank - turn) % workers)
                    run.kill(rank, live[rank])
                    turn = rank + 1
            result = run.finish()
        check_steps(run, result)
        found = {
            "test_accuracy": result["evaluations"][-1]["test_accuracy"],
            "kills": len(run.kills),
            "comebacks": len({each.process for each in run.counted()}) - workers,
            "steps": len(result["losses"]),
            "steps_done_again": len(run.done_again),
            "examples_an_epoch": len(result["losses"]) // epochs * result["settings"]["global_batch"],
            **goodput(run, len(result["losses"]) // epochs),
            "digest": result["weights_digest"],
        }
        with training(top / "alone", top / "cache", arguments, workers=1, reducers=0) as alone:
            found["digest_of_one_worker"] = alone.finish()["weights_digest"]
    assert found["digest"] == found["digest_of_one_worker"], found
    return found


def bits(
    counts: tuple[int, ...] = (1, 2, 3, 4, 5, 8),
    histories: tuple[str, ...] = ("5 100", "20 60 150"),
    workers: int = 4,
    epochs: int = 40,
    microbatches: int = 10,
    preset: str = "mnist-smoke",
) -> dict[str, str]:
    """The hash of the final weights, on several numbers of workers and over several histories of deaths and joins.

    Args:
      counts: numbers of workers to which nothing happens.
      histories: for each, the steps at which a worker is killed, each time another one. Each comes back before the next
        one is killed.
      workers: how many there are in the histories, at the start.
      epochs: of the training.
      microbatches: in which the workers share out a step.
      preset: of models.resnet.
    """
    arguments = ["--preset", preset, "--epochs", str(epochs), "--microbatches", str(microbatches)]
    arguments += ["--evaluate-every", str(epochs)]
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        for count in counts:
            with training(top / f"{count}", top / "cache", arguments, workers=count, reducers=1) as run:
                found[f"{count} workers"] = run.finish()["weights_digest"]
            print(found, file=sys.stderr, flush=True)
        for number, history in enumerate(histories):
            folder = top / f"history {number}"
            with training(folder, top / "cache", arguments, workers=workers, reducers=1, elastic=f"2:{workers}") as run:
                for victim, step in enumerate(map(int, history.split())):
                    if run.wait_until(lambda step=step: run.newest() >= step and len(run.live()) == workers):  # type: ignore[misc]
                        rank = (number + victim) % workers
                        run.kill(rank, run.live()[rank])
                result = run.finish()
            check_steps(run, result)
            name_of_run = f"killed (rank, step): {run.kills}; members: {run.member_counts()}"
            found[name_of_run] = result["weights_digest"]
            print(found, file=sys.stderr, flush=True)
    assert len(set(found.values())) == 1, found
    return found


if __name__ == "__main__":
    print(json.dumps(tyro.extras.subcommand_cli_from_dict({"churn": churn, "bits": bits})))
