"""`jaxhetero launch`: one job's workers and reducers on this machine, started, watched and ended together.

One thread runs everything: a selector over the children's pipes and over a socket that signals write to. The only
work done inside signal handlers is what must not wait for a slow terminal: noting when a child ended, and passing
signals on.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from jaxhetero._display import Display, LineSplitter, Sink
from jaxhetero._process import Guard, Process, signal_name
from jaxhetero.config import Config, read_environment, write_environment
from jaxhetero.errors import AddressInUse, ConfigError, ReducerLost, WorkerLost

_LOOPBACK = "127.0.0.1"
# Failures this close to the first one are looked at together: one process's end makes others fail within milliseconds.
_SETTLE_S = 0.3
# How long to wait for the cause when every failure so far only tells of another process's end.
_CAUSE_S = 2.0
_REDUCERS_END_S = 5.0
_STRAGGLERS_END_S = 1.0
_TICK_S = 0.05
_READ_BYTES = 1 << 16
# More than a pipe can hold (1 MiB unless privileged).
_DRAIN_BLOCKS = 32
# Whose progress bar a terminal shows in place.
_LIVE = "worker 0"
# What a process says when it fails because another one did, and the pattern that tells which.
_LOSSES = {WorkerLost.__name__: ("worker", r"rank (\d+)"), ReducerLost.__name__: ("reducer", r"reducer (\d+)")}


@dataclass(frozen=True)
class Job:
    """What to start. Settings that are None stay as the environment or their default has them."""

    command: Sequence[str]
    worker_count: int
    reducer_count: int = 0
    colocated_count: int | None = None
    coordinator_port: int = 0
    log_dir: Path | None = None
    start_timeout_ms: int | None = None
    timeout_ms: int | None = None
    stop_timeout_ms: int = 10_000
    """How long processes may take to end after they were told to, before they are killed."""

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError(
                "no command: give what each worker runs, as in `jaxhetero launch --workers 2 -- python x.py`"
            )
        if shutil.which(self.command[0]) is None:
            raise ConfigError(f"command not found, or not executable: {self.command[0]}")
        if not 0 <= self.coordinator_port <= 65535:
            raise ConfigError(f"coordinator_port is {self.coordinator_port}; it must be in 0..65535")
        if self.stop_timeout_ms < 0:
            raise ConfigError(f"stop_timeout_ms is {self.stop_timeout_ms}; it must be 0 or more")

    def settings(self, coordinator: str, token: str) -> dict[str, str | int]:
        """What every process of the job has in common, by the names of ``Config``."""
        settings: dict[str, str | int] = {
            "worker_count": self.worker_count,
            "reducer_count": self.reducer_count,
            "coordinator": coordinator,
            "token": token,
            "host": _LOOPBACK,
        }
        if self.colocated_count is not None:
            settings["colocated_count"] = self.colocated_count
        if self.start_timeout_ms is not None:
            settings["start_timeout_ms"] = self.start_timeout_ms
        if self.timeout_ms is not None:
            settings["timeout_ms"] = self.timeout_ms
        # Finds a bad setting, also one from the environment, once and before any process meets it.
        config: dict[str, Any] = dict(read_environment(write_environment(settings | {"rank": 0})))
        Config(**config)
        return settings


def launch(job: Job) -> int:
    """Run the job to its end; the exit code for this process."""
    with reserve_port(job.coordinator_port) as holder:
        coordinator = f"{_LOOPBACK}:{holder.getsockname()[1]}"
        settings = job.settings(coordinator, secrets.token_hex(32))
        log_dir = make_log_dir(job.log_dir)
        with _Launcher(job, settings, log_dir) as launcher:
            return launcher.run()


def reserve_port(port: int) -> socket.socket:
    """Hold a loopback port, or any free one for 0, until rank 0 listens on it.

    The socket is bound but never listens, and has SO_REUSEADDR, so a listener that has it as well can bind beside it;
    meanwhile the kernel gives the port to no outgoing connection and to no other launcher.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # For a given port SO_REUSEADDR must come first, to ignore what an earlier job left in TIME_WAIT. For any port
        # it must come second: the kernel may choose one that another launcher holds when both have it.
        if port:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((_LOOPBACK, port))
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError as error:
        holder.close()
        raise AddressInUse(f"cannot use {_LOOPBACK}:{port} for the coordinator: {error.strerror}") from None
    return holder


def make_log_dir(chosen: Path | None) -> Path:
    """The folder for the logs; by default a fresh one, named after the time, in ``jaxhetero-logs``."""
    try:
        if chosen is not None:
            chosen.mkdir(parents=True, exist_ok=True)
            return chosen
        base = Path("jaxhetero-logs") / time.strftime("%Y%m%d-%H%M%S")
        base.parent.mkdir(exist_ok=True)
        for name in (base.name, *(f"{base.name}-{number}" for number in range(2, 1000))):
            with contextlib.suppress(FileExistsError):
                base.with_name(name).mkdir()
                return base.with_name(name)
        raise ConfigError(f"{base.parent} has too many folders of this second; give --log-dir")
    except OSError as error:
        raise ConfigError(f"cannot make a folder for the logs: {error.filename}: {error.strerror}") from None


@dataclass
class _Pipe:
    """Our end of a child's standard output or standard error."""

    process: Process
    fd: int
    sink: Sink
    splitter: LineSplitter = field(default_factory=LineSplitter)

    @property
    def is_live(self) -> bool:
        """Whether its progress bar is the one that stays in place on a terminal."""
        return self.process.name == _LIVE


class _Launcher:
    """The processes of one job. A context manager: none of them outlives it."""

    def __init__(self, job: Job, settings: Mapping[str, str | int], log_dir: Path) -> None:
        self._job = job
        self._settings = settings
        self._log_dir = log_dir
        self._stop_s = job.stop_timeout_ms / 1000
        self._commands = {
            **{f"reducer {number}": _reducer_command() for number in range(job.reducer_count)},
            **{f"worker {rank}": list(job.command) for rank in range(job.worker_count)},
        }
        self._display = Display(list(self._commands))
        self._processes: list[Process] = []
        self._pipes: list[_Pipe] = []
        self._signals: list[int] = []
        self._exit_stack = contextlib.ExitStack()

    def __enter__(self) -> _Launcher:
        with contextlib.ExitStack() as stack:
            self._selector = stack.enter_context(selectors.DefaultSelector())
            stack.enter_context(self._handled_signals())
            self._guard = Guard()
            stack.callback(self._guard.close)
            stack.callback(self._end_everything)
            self._exit_stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exit_stack.close()

    def run(self) -> int:
        job = self._job
        self._display.message(
            f"{_count(job.worker_count, 'worker')}, {_count(job.reducer_count, 'reducer')}, "
            f"coordinator {self._settings['coordinator']}, logs in {self._log_dir}"
        )
        for name, command in self._commands.items():
            if self._signals:
                break
            self._start(name, command)
        self._run_until(lambda: bool(self._signals or self._failures() or self._workers_ended()))
        if self._signals:
            return self._end_after_signal()
        if self._failures():
            return self._end_after_failure()
        return self._end_after_success()

    # Starting

    def _start(self, name: str, command: list[str]) -> None:
        settings = dict(self._settings)
        kind, number = name.split()
        if kind == "worker":
            settings["rank"] = int(number)
        environment = write_environment(settings)
        # Python holds output back when it goes to a pipe; a job's progress should be seen as it happens.
        environment.setdefault("PYTHONUNBUFFERED", "1")
        # A process that crashes in native code says where.
        environment.setdefault("PYTHONFAULTHANDLER", "1")
        if name == _LIVE and self._display.err.is_terminal:
            # Lets rich, and what follows its convention, draw a progress bar though it writes to a pipe.
            environment.setdefault("TTY_COMPATIBLE", "1")
            environment["COLUMNS"] = str(self._display.columns_for(name))
        try:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,
                preexec_fn=self._guard.watch_this_process,  # Safe: this process has one thread.
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(f"cannot start {name}: {command[0]}: {getattr(error, 'strerror', error)}") from None
        process = self._adopt(name, popen)
        for stream, sink in ((popen.stdout, self._display.out), (popen.stderr, self._display.err)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            pipe = _Pipe(process, stream.fileno(), sink)
            self._pipes.append(pipe)
            self._selector.register(pipe.fd, selectors.EVENT_READ, pipe)

    def _adopt(self, name: str, popen: subprocess.Popen[bytes]) -> Process:
        try:
            process = Process(name, popen, self._log_dir / f"{name.replace(' ', '-')}.log", self._guard)
        except OSError as error:
            os.killpg(popen.pid, signal.SIGKILL)
            popen.communicate()
            raise ConfigError(f"cannot write the log {error.filename}: {error.strerror}") from None
        self._processes.append(process)
        # It may have ended, or a signal may have come, before it was on the list.
        process.reap()
        for number in self._signals:
            process.send(number)
        return process

    # Signals

    @contextlib.contextmanager
    def _handled_signals(self) -> Iterator[None]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.setblocking(False)
            self._selector.register(ours, selectors.EVENT_READ, ours)
            # A signal that was ignored when we started stays so: that is how nohup keeps a job alive.
            previous = {
                number: signal.signal(number, self._pass_on)
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
                if signal.getsignal(number) is not signal.SIG_IGN
            }
            previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, self._note_ends)
            wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
            try:
                yield
            finally:
                signal.set_wakeup_fd(wakeup)
                for number, handler in previous.items():
                    signal.signal(number, handler)

    def _note_ends(self, _number: int, _frame: FrameType | None) -> None:
        # Here, not in the loop: the order of ends must be right even while output waits for a slow terminal.
        for process in self._processes:
            process.reap()

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        again = number == signal.SIGINT and signal.SIGINT in self._signals
        self._signals.append(number)
        for process in self._processes:
            if again:
                process.send(signal.SIGKILL)
            elif process.is_worker or self._workers_ended():
                # Not to reducers: a worker that takes its leave in order, or saves its work first, still needs them.
                process.send(number)

    # The loop

    def _run_until(self, condition: Callable[[], bool], seconds: float = math.inf) -> bool:
        """Pass output on until ``condition`` holds or the time is up; tells whether it holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            # Without a deadline every condition changes by an event. With one it may be about processes that are not
            # our children, whose end nobody tells us.
            for key, _ in self._selector.select(None if seconds == math.inf else min(left, _TICK_S)):
                if isinstance(key.data, _Pipe):
                    self._read(key.data)
                else:
                    with contextlib.suppress(BlockingIOError):
                        key.data.recv(4096)
        return True

    def _read(self, pipe: _Pipe) -> bool:
        """Pass on what a pipe holds now, up to one block; tells whether it may hold more."""
        try:
            data = os.read(pipe.fd, _READ_BYTES)
        except BlockingIOError:
            return False
        trouble = pipe.process.log(data)
        if trouble:
            self._display.message(trouble)
        had_update = pipe.splitter.update() is not None
        lines = pipe.splitter.feed(data) if data else pipe.splitter.close()
        if pipe.is_live and had_update and (lines or not data):
            self._display.end_update(pipe.sink)
        self._display.lines(pipe.sink, pipe.process.name, lines)
        update = pipe.splitter.update()
        if update is not None:
            self._display.update(pipe.sink, pipe.process.name, update, live=pipe.is_live)
        if not data:
            self._selector.unregister(pipe.fd)
            self._pipes.remove(pipe)
        return bool(data)

    def _drain(self, process: Process) -> None:
        """Pass on what a process that has ended left in its pipes.

        Does not wait for their end, which may never come when something it started holds them open.
        """
        for pipe in [pipe for pipe in self._pipes if pipe.process is process]:
            for _ in range(_DRAIN_BLOCKS):
                if not self._read(pipe):
                    break

    def _failures(self) -> list[Process]:
        return [process for process in self._processes if process.failed()]

    def _workers_ended(self) -> bool:
        return all(process.ended_ns is not None for process in self._processes if process.is_worker)

    def _children_ended(self) -> bool:
        return all(process.ended_ns is not None for process in self._processes)

    # Three ways to end

    def _end_after_signal(self) -> int:
        number = self._signals[0]
        hint = "; Ctrl-C again kills them at once" if number == signal.SIGINT else ""
        self._display.message(f"got {signal_name(number)} and passed it on{hint}; waiting for the workers to end")
        deadline = time.monotonic() + self._stop_s
        self._run_until(self._workers_ended, self._stop_s)
        self._send_all(signal.SIGTERM)
        self._await_end(deadline)
        self._display.message(f"stopped by {signal_name(number)}; logs in {self._log_dir}")
        return 128 + number

    def _end_after_failure(self) -> int:
        culprit = self._find_culprit()
        running = sum(process.ended_ns is None for process in self._processes)
        if running:
            self._display.message(f"{culprit.describe_end()}; stopping {_count(running, 'other process', 'es')}")
        self._send_all(signal.SIGTERM)
        self._await_end(time.monotonic() + self._stop_s)
        lines = "".join(f"\n    {line}" for line in culprit.tail()) or " (it is empty)"
        self._display.message(f"{culprit.describe_end()}; last lines of its log {culprit.log_path}:{lines}")
        self._display.message(f"logs of all processes in {self._log_dir}")
        return culprit.code

    def _find_culprit(self) -> Process:
        """The process whose end made the others fail, as far as their ends and last words tell."""
        self._run_until(self._children_ended, _SETTLE_S)
        self._run_until(self._cause_is_known, _CAUSE_S)

        failures = self._failures()
        accused = set().union(*map(self._accused, failures))

        def order(process: Process) -> tuple[bool, bool, bool, int]:
            assert process.ended_ns is not None
            killed = process.popen.returncode < 0
            return not killed, bool(self._accused(process)), process.name not in accused, process.ended_ns

        return min(failures, key=order)

    def _cause_is_known(self) -> bool:
        stop_waiting = bool(self._signals) or self._children_ended()
        return stop_waiting or not all(map(self._accused, self._failures()))

    def _accused(self, process: Process) -> set[str]:
        """The other processes that it failed for, by its own last words; "?" for one that they do not name."""
        self._drain(process)
        accused = set()
        for line in process.tail():
            for word, (kind, pattern) in _LOSSES.items():
                _, found, rest = line.partition(word)
                if found:
                    number = re.search(pattern, rest)
                    accused.add(f"{kind} {number[1]}" if number else "?")
        # The survivors' words for an end may reach the one that ended before it is gone.
        return accused - {process.name}

    def _end_after_success(self) -> int:
        done = self._run_until(lambda: bool(self._signals) or self._children_ended(), _REDUCERS_END_S)
        if self._signals:
            return self._end_after_signal()
        failures = self._failures()
        if failures:
            return self._end_after_failure()
        if not done:
            late = [process.name for process in self._processes if process.ended_ns is None]
            self._display.message(
                f"every worker is done but {', '.join(late)} did not end within {_REDUCERS_END_S:.0f} s; stopping"
            )
            self._send_all(signal.SIGTERM)
            self._await_end(time.monotonic() + self._stop_s)
        return 0

    def _send_all(self, number: int) -> None:
        for process in self._processes:
            process.send(number)
            # Only a process that runs can see the signal.
            process.send(signal.SIGCONT)

    def _await_end(self, deadline: float) -> None:
        """Give processes that were told to end their time. What is left then is killed on leaving the context."""
        if not self._run_until(self._children_ended, deadline - time.monotonic()):
            late = [process.name for process in self._processes if process.ended_ns is None]
            self._display.message(f"{', '.join(late)} did not end within {self._stop_s:g} s; killing")

    def _end_everything(self) -> None:
        """Leave nothing behind: not a child, not a grandchild, not a byte of output."""
        for process in self._processes:
            process.send(signal.SIGKILL if process.ended_ns is None else signal.SIGTERM)
        groups = {process.popen.pid for process in self._processes if not process.group_gone}
        self._run_until(lambda: self._children_ended() and not _any_runs(groups), _STRAGGLERS_END_S)
        for process in self._processes:
            process.send(signal.SIGKILL)
        for process in self._processes:
            process.popen.wait()
            self._drain(process)
            process.close_log()
            for stream in (process.popen.stdout, process.popen.stderr):
                assert stream is not None
                stream.close()


def _any_runs(groups: set[int]) -> bool:
    """Whether any process of these groups still runs.

    Asking with signal 0 would count zombies, and some containers' first process never reaps the orphans it is given.
    """
    if not groups:
        return False
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (name) state parent group ..., where the name may hold anything, also parentheses.
            state, _, group = path.read_bytes().rpartition(b")")[2].split()[:3]
            if int(group) in groups and state not in b"ZX":
                return True
    return False


def _reducer_command() -> list[str]:
    return [sys.executable, "-m", "jaxhetero", "reducer"]


def _count(number: int, word: str, plural: str = "s") -> str:
    return f"{number} {word}{'' if number == 1 else plural}"
