from __future__ import annotations

import contextlib
import functools
import operator
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from lab.netlab import _cleanup
from lab.netlab._network import Network
from lab.netlab.counters import Counters
from lab.netlab.errors import LabError
from lab.netlab.rate import Rate

_Stream = int | IO[bytes] | IO[str] | None


class Host:
    """One host of a lab. Its processes see ``name`` as the host name."""

    def __init__(self, lab: str, name: str, rate: Rate | None, network: Network) -> None:
        self.name = name
        self.rate = rate
        self.address = network.address(name)
        self._lab = lab
        self._network = network
        self._processes: list[subprocess.Popen[str]] = []

    def start(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: _Stream = subprocess.DEVNULL,
        stdout: _Stream = None,
        stderr: _Stream = None,
    ) -> subprocess.Popen[str]:
        """Start a process. The end of the lab kills it. ``env`` is added to the environment of this process."""
        popen = subprocess.Popen(
            self.command(command),
            env={**os.environ, **(env or {}), _cleanup.MARK: f"{self._lab}/{self.name}"},
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            # Ctrl-C must reach only the owner, which then ends the lab.
            start_new_session=True,
        )
        self._processes.append(popen)
        return popen

    def run(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout_s: float = 60.0,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a process to its end and return its output. With ``check`` a failure raises ``LabError``.

        Raises:
          LabError: the process runs for longer than ``timeout_s``, or failed and ``check`` is True.
        """
        popen = self.start(command, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        shown = f"{self.name}: `{' '.join(map(str, command))}`"
        with popen:
            try:
                output, errors = popen.communicate(timeout=timeout_s)
            except BaseException as error:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(popen.pid, signal.SIGKILL)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise LabError(f"{shown} still runs after {timeout_s:g} s") from None
                raise
        if check and popen.returncode != 0:
            raise LabError(f"{shown} ended with {popen.returncode}: {errors.strip()[-2000:]}")
        return subprocess.CompletedProcess(popen.args, popen.returncode, output, errors)

    def command(self, command: Sequence[str | Path]) -> list[str]:
        """The command that runs ``command`` on this host, for programs that start others themselves."""
        return self._network.command(self.name, [str(word) for word in command])

    def stop(self) -> None:
        """Kill every process on the host, as a power failure would."""
        _cleanup.kill(self._lab, self.name)
        self._reap()

    def _reap(self) -> None:
        for popen in self._processes:
            popen.wait()
        self._processes.clear()

    def cut(self) -> None:
        """Pull the cable: all packets to and from the host are lost, and no process gets an error."""
        self._network.cut(self.name)

    def slow(self, rate: str, nic: int | None = None) -> None:
        """Give another rate to all interfaces of the host, or to ``eth0``, ``eth1``, ... as ``nic`` says."""
        self._network.set_rate(self.name, Rate.parse(rate), nic)

    def restore(self) -> None:
        """Undo ``cut`` and ``slow``."""
        self._network.connect(self.name)
        self._network.set_rate(self.name, self.rate)

    def counters(self) -> Counters:
        """Of all interfaces together."""
        return functools.reduce(operator.add, self.nic_counters())

    def nic_counters(self) -> list[Counters]:
        """Of eth0, eth1, and so on."""
        return self._network.counters()[self.name]

    def free_port(self) -> int:
        """A port on which nothing listens."""
        return self._network.free_port(self.name)
