"""One attempt at a job: its processes, from their start to their end. A restart is another attempt.

One thread runs everything: a selector over the children's pipes and over a socket that signals write to. Two things
must not wait for a slow terminal, so signal handlers do them: noting when a child ended, and passing signals on.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

from jaxhetero.config import Config, parse_elastic, read_environment, write_environment
from jaxhetero.errors import ConfigError
from jaxhetero.launch.culprit import USAGE_CODES, find_culprit, find_lasting, is_known
from jaxhetero.launch.guard import Guard
from jaxhetero.launch.pipes import LIVE, Pipe, Pipes
from jaxhetero.launch.process import COORDINATOR, Process, any_runs, signal_name
from jaxhetero.launch.reducer import LOST
from jaxhetero.launch.terminal import Display, show_count

# Failures this close to the first one are judged together: one process's end makes others fail within milliseconds.
_SETTLE_S = 0.3
_REDUCERS_END_S = 5.0
_STRAGGLERS_END_S = 1.0
_TICK_S = 0.05
# One that is killed again and again is.
_MOST_COORDINATORS = 20
# Before a lost worker of an elastic job is started again: twice as long each time.
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True)
class End:
    """How an attempt ended."""

    code: int
    failure: str = ""
    """Which process failed and how; empty after success, and after a signal to the launcher."""
    lasting: str = ""
    """The reason why another attempt would fail as well; empty if there is none."""


class Attempt:
    """The processes of one start of a job. A context manager: no process outlives it."""

    def __init__(
        self,
        commands: Mapping[str, Sequence[str]],
        settings: Mapping[str, str | int],
        own_settings: Mapping[str, Mapping[str, str | int]],
        log_dir: Path,
        stop_s: float,
        display: Display,
        most_comebacks: int = 0,
        failure_words: bytes = b"",
        place_count: int | None = None,
    ) -> None:
        """``commands`` and ``own_settings`` are by name, "worker 0" or "reducer 1"; all share ``settings``.

        Lost workers of an elastic job are started again, ``most_comebacks`` times in all. A process that writes a line
        with ``failure_words`` has failed, whatever its exit code. With ``place_count``, each worker has a
        host of its own, such a line names one that is gone, and no more workers run at a time than there are hosts.
        """
        self._commands = commands
        self._settings = settings
        self._own_settings = own_settings
        self._log_dir = log_dir
        self._stop_s = stop_s
        self._display = display
        given = read_environment(write_environment(settings))
        self._failover = bool(given.get("failover", Config.failover))
        elastic = str(given.get("elastic", ""))
        self._least_workers = parse_elastic(elastic)[0] if elastic else None
        """The fewest workers with which an elastic job goes on."""
        self._processes: list[Process] = []
        self._lost: list[Process] = []
        self._comebacks_left = most_comebacks
        self._failure_words = failure_words
        self._place_count = place_count
        self._comebacks: dict[str, float] = {}
        """Which lost workers start again, and when, by the monotonic clock."""
        self._joins_before: dict[Process, int] = {}
        """Of each worker that was started again: how often its rank had been let in before."""
        self._late: list[Process] = []
        """Workers that were started again and have not been let in before the job was over."""
        self._exit_stack = contextlib.ExitStack()
        self.signals: list[int] = []
        """The signals that the launcher has received, up to the end of the context."""

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._selector = stack.enter_context(selectors.DefaultSelector())
            self._pipes = Pipes(self._selector, self._display)
            stack.enter_context(self._handled_signals())
            self._guard = Guard()
            stack.callback(self._guard.close)
            stack.callback(self._end_everything)
            self._exit_stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exit_stack.close()

    def run(self) -> End:
        """Start all processes and wait until they have ended, or one of them has failed, or a signal comes."""
        for name, command in self._commands.items():
            if self.signals:
                break
            self._start(name, command)
        while not self._is_over():
            self._run_until(lambda: self._is_over() or bool(self._due()))
            if self._coordinator_is_done():
                self._comebacks.clear()  # Nobody would let them in.
            due = self._due().values()
            if due and not self._run_until(self._is_over, min(due) - time.monotonic()):
                self._start_again()
        if self.signals:
            return self._end_after_signal()
        if self._failures():
            return self._end_after_failure()
        return self._end_after_success()

    def _is_over(self) -> bool:
        if self._failure_words:
            for process in self._processes:
                if process.ended_ns is not None and process not in self._lost:
                    self._pipes.drain(process)
        if self._coordinator_is_done():
            self._end_late()
        self._note_losses("the workers may go on without it")
        return bool(self.signals or self._failures() or self._workers_ended())

    def _note_losses(self, what_it_means: str) -> None:
        for process in self._processes:
            if process in self._lost or not self._can_be_lost(process):
                continue
            self._lost.append(process)
            if process in self._late:
                continue
            goes_on = not (self._workers_ended() or self._coordinator_is_done() or self.signals)
            if process.is_coordinator and goes_on:
                what_next = "starting it again"
                self._comebacks[process.name] = time.monotonic()
            elif process.is_worker and goes_on and self._comebacks_left:
                self._comebacks_left -= 1
                pause_s = self._pause_s(process.name)
                when = f"in {pause_s:g} s" if self._has_place() else "when a host is free"
                what_next = f"the others go on, and it is started again {when}"
                self._comebacks[process.name] = time.monotonic() + pause_s
            else:
                what_next = what_it_means
            self._display.message(f"warning: {process.describe_end()}; {what_next}")

    def _pause_s(self, name: str) -> float:
        """Twice as long for each time that the worker was lost before."""
        losses = sum(lost.name == name for lost in self._lost)
        return min(_FIRST_PAUSE_S * 2.0 ** (losses - 1), _LONGEST_PAUSE_S)

    def _has_place(self) -> bool:
        """Whether a host is free for one more worker."""
        if self._place_count is None:
            return True
        gone = {process.failure for process in self._processes if process.failure}
        running = sum(process.is_worker and process.ended_ns is None for process in self._processes)
        return running < self._place_count - len(gone)

    def _due(self) -> dict[str, float]:
        """Of what is to start again, all that has a place."""
        if self._has_place():
            return self._comebacks
        return {name: instant for name, instant in self._comebacks.items() if name == COORDINATOR}

    def _start_again(self) -> None:
        for name in list(self._comebacks):
            if self._due().get(name, math.inf) <= time.monotonic():
                del self._comebacks[name]
                self._start(name, self._commands[name])
                if self._processes[-1].is_worker:
                    self._joins_before[self._processes[-1]] = self._join_count(name)

    def _join_count(self, name: str) -> int:
        return sum(process.joined_ranks.count(int(name.split()[1])) for process in self._processes)

    def _end_late(self) -> None:
        """End the workers that would find nobody: those that have been let in still have to end by themselves."""
        for process in self._processes:
            if process.is_coordinator:
                self._pipes.drain(process)
        for process, joins in self._joins_before.items():
            if process.ended_ns is None and process not in self._late and self._join_count(process.name) == joins:
                self._late.append(process)
                self._display.message(f"{process.name} has come back too late: the others have done their work")
                process.send(signal.SIGTERM)

    # Starting

    def _start(self, name: str, command: Sequence[str]) -> None:
        environment = write_environment({**self._settings, **self._own_settings[name]})
        # Python buffers output to a pipe; a job's progress should be seen as it happens.
        environment.setdefault("PYTHONUNBUFFERED", "1")
        # A process that crashes in native code says where.
        environment.setdefault("PYTHONFAULTHANDLER", "1")
        if name == LIVE and self._display.err.is_terminal:
            # With this, rich and other libraries of its convention draw a progress bar although they write to a pipe.
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
            self._pipes.add(process, stream.fileno(), sink)

    def _adopt(self, name: str, popen: subprocess.Popen[bytes]) -> Process:
        try:
            earlier = sum(process.name == name for process in self._processes)
            log_name = name.replace(" ", "-") + (f"-{earlier + 1}" if earlier else "")
            process = Process(name, popen, self._log_dir / f"{log_name}.log", self._guard, self._failure_words)
        except OSError as error:
            os.killpg(popen.pid, signal.SIGKILL)
            popen.communicate()
            raise ConfigError(f"cannot write the log {error.filename}: {error.strerror}") from None
        self._processes.append(process)
        # Before the process was on the list, it may have ended, or a signal may have been received.
        process.reap()
        for number in self.signals:
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
            # A signal that was ignored when we started stays ignored: nohup keeps a job alive that way.
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
        # Not in the loop: the order of ends must be right even while output waits for a slow terminal.
        for process in self._processes:
            process.reap()

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        again = number == signal.SIGINT and signal.SIGINT in self.signals
        self.signals.append(number)
        for process in self._processes:
            if again:
                process.send(signal.SIGKILL)
            elif process.is_worker or self._workers_ended():
                # Reducers get no signal yet: a worker that shuts down in order, or saves its work first, needs them.
                process.send(number)

    # The loop

    def _run_until(self, condition: Callable[[], bool], seconds: float = math.inf) -> bool:
        """Pass output on until ``condition`` holds or the time is up; return whether it holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            # Without a deadline an event comes with every change of a condition. With a deadline the condition may be
            # about grandchildren, and no event tells of their end: hence the tick.
            for key, _ in self._selector.select(None if seconds == math.inf else min(left, _TICK_S)):
                if isinstance(key.data, Pipe):
                    self._pipes.read(key.data)
                else:
                    with contextlib.suppress(BlockingIOError):
                        key.data.recv(4096)
        return True

    def _can_be_lost(self, process: Process) -> bool:
        """Whether the process is a reducer that was killed, or that was told that the workers go on without it.

        A reducer that exits with another error code by itself does end the job. In an elastic job it may also be a
        worker that has failed, if it is started again or enough are left, or the coordinator, if that was killed.
        """
        if process.ended_ns is None or process in self._lost or process in self._late:
            return process.ended_ns is not None
        if process.is_worker:
            failed = sum(other.failed() for other in self._processes if other.is_worker)
            left = sum(other.is_worker for other in self._processes) - failed
            is_wrong = process.code in USAGE_CODES  # it would be in all workers
            if self._least_workers is None or not process.failed() or is_wrong:
                return False
            return self._comebacks_left > 0 or left >= self._least_workers
        if process.is_coordinator:
            starts = sum(other.is_coordinator for other in self._processes)
            return process.code > 128 and starts <= _MOST_COORDINATORS
        return self._failover and (process.code > 128 or process.code == LOST)

    def _failures(self) -> list[Process]:
        return [process for process in self._processes if process.failed() and not self._can_be_lost(process)]

    def _dead(self) -> list[Process]:
        """The processes that have failed, after the last of their output was read."""
        failures = self._failures()
        for process in failures:
            self._pipes.drain(process)
        return failures

    def _workers_ended(self) -> bool:
        workers = [process for process in self._processes if process.is_worker and process not in self._late]
        return all(process.ended_ns is not None for process in workers)

    def _coordinator_is_done(self) -> bool:
        """Whether all workers of an elastic job have left it in order. Their programs may still run."""
        return any(process.is_coordinator and process.ended_ns and not process.failed() for process in self._processes)

    def _children_ended(self) -> bool:
        return all(process.ended_ns is not None for process in self._processes)

    # Three ways to end

    def _end_after_signal(self) -> End:
        number = self.signals[0]
        hint = "; Ctrl-C again kills them at once" if number == signal.SIGINT else ""
        self._display.message(f"got {signal_name(number)} and passed it on{hint}; waiting for the workers to end")
        deadline = time.monotonic() + self._stop_s
        self._run_until(self._workers_ended, self._stop_s)
        self._send_all(signal.SIGTERM)
        self._await_end(deadline)
        self._display.message(f"stopped by {signal_name(number)}; logs in {self._log_dir}")
        return End(128 + number)

    def _end_after_failure(self) -> End:
        self._run_until(self._children_ended, _SETTLE_S)
        # If every failure so far names another process's end as its cause, that process may be about to end.
        self._run_until(lambda: bool(self.signals) or self._children_ended() or is_known(self._dead()), self._stop_s)
        failures = self._dead()
        culprit, lasting = find_culprit(failures, self._lost), find_lasting(failures)
        if self._workers_ended() and not any(process.is_worker for process in failures):
            lasting = "every worker has done its work"
        running = sum(process.ended_ns is None for process in self._processes)
        if running:
            self._display.message(f"{culprit.describe_end()}; stopping {show_count(running, 'other process', 'es')}")
        self._send_all(signal.SIGTERM)
        self._await_end(time.monotonic() + self._stop_s)
        lines = "".join(f"\n    {line}" for line in culprit.tail()) or " (it is empty)"
        self._display.message(f"{culprit.describe_end()}; last lines of its log {culprit.log_path}:{lines}")
        self._display.message(f"logs of all processes in {self._log_dir}")
        return End(culprit.code, culprit.describe_end(), lasting)

    def _end_after_success(self) -> End:
        done = self._run_until(lambda: bool(self.signals) or self._children_ended(), _REDUCERS_END_S)
        self._note_losses("the workers have ended well without it")
        if self.signals:
            return self._end_after_signal()
        if self._failures():
            return self._end_after_failure()
        if not done:
            late = [process.name for process in self._processes if process.ended_ns is None]
            self._display.message(
                f"every worker is done but {', '.join(late)} did not end within {_REDUCERS_END_S:.0f} s; stopping"
            )
            self._send_all(signal.SIGTERM)
            self._await_end(time.monotonic() + self._stop_s)
        return End(0)

    def _send_all(self, number: int) -> None:
        for process in self._processes:
            process.send(number)
            # Only a process that runs can see the signal.
            process.send(signal.SIGCONT)

    def _await_end(self, deadline: float) -> None:
        """Wait for processes after a signal to end. Those that are left are killed when the context ends."""
        if not self._run_until(self._children_ended, deadline - time.monotonic()):
            late = [process.name for process in self._processes if process.ended_ns is None]
            self._display.message(f"{', '.join(late)} did not end within {self._stop_s:g} s; killing")

    def _end_everything(self) -> None:
        """End every child and grandchild, and pass on the last of their output."""
        for process in self._processes:
            process.send(signal.SIGKILL if process.ended_ns is None else signal.SIGTERM)
        groups = {process.popen.pid for process in self._processes if not process.group_gone}
        self._run_until(lambda: self._children_ended() and not any_runs(groups), _STRAGGLERS_END_S)
        for process in self._processes:
            process.send(signal.SIGKILL)
        for process in self._processes:
            process.popen.wait()
            self._pipes.drain(process)
            process.close_log()
            for stream in (process.popen.stdout, process.popen.stderr):
                assert stream is not None
                stream.close()
