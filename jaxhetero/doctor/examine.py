"""``jaxhetero doctor``: finds problems of hosts and network before a long job runs.

The same command runs on every host. The processes meet at the coordinator's address, as the job would. The process that
can listen there leads, and all processes follow, the leader's own as well. The leader asks each process to describe
itself, compares clocks, and has the processes send to each other in pairs. Pairs without a process in common send at
the same time. Then one pair sends over a fabric, if two processes have one. All processes get the findings and show
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from jaxhetero._job.lookup import await_name
from jaxhetero.config import format_address, host_name, interface_addresses, parse_address
from jaxhetero.doctor.channel import MAX_LINE_BYTES, PATIENCE_S, Channel, connected, describe_error
from jaxhetero.doctor.report import SLOW, FabricTrial, Findings, Pair, Patient, problems, show
from jaxhetero.errors import AuthenticationError, InternalError, JaxheteroError, StartTimeout

if TYPE_CHECKING:
    from jaxhetero._native import TrialServer

_BLOCK = bytes(1 << 16)
_RETRY_S = 0.2
_PINGS = 5


@dataclass(frozen=True)
class Visit:
    """The settings of one process that takes part.

    Example:
      >>> from jaxhetero.doctor import Visit
      >>> Visit(coordinator="10.0.0.1:7700", token="secret", process_count=12)
      Visit(coordinator='10.0.0.1:7700', process_count=12, host='', start_timeout_s=120.0, seconds=0.5)
    """

    coordinator: str
    """``host:port``, where the processes meet."""
    token: str = field(repr=False)
    """The job's secret. Never printed."""
    process_count: int
    """How many processes take part, workers and reducers together."""
    host: str = ""
    """The address of this process. Default: the address of the interface that leads to the coordinator."""
    start_timeout_s: float = 120.0
    """How long to wait for all processes."""
    seconds: float = 0.5
    """How long each pair sends."""
    everyone_shows: bool = field(default=True, repr=False)
    """Whether all processes show the findings, or only the one at the coordinator's address."""


def run_doctor(visit: Visit, console: Console) -> int:
    """Take part in an examination and show the findings.

    Blocks until all processes were examined, or ``visit.start_timeout_s`` has passed and those that came were.

    Args:
      visit: the settings of this process.
      console: where to show the findings.

    Returns:
      The exit code: 0 if there is nothing to mend, else 1.

    Raises:
      StartTimeout: the coordinator's address does not answer.
      AuthenticationError: the coordinator has another token.
      ProtocolError: another program answers at the coordinator's address.

    Example:
      An examination of this host alone:

      >>> import io, socket
      >>> from rich.console import Console
      >>> from jaxhetero.doctor import Visit, run_doctor
      >>> with socket.create_server(("127.0.0.1", 0)) as server:          # a free port
      ...     coordinator = f"127.0.0.1:{server.getsockname()[1]}"
      >>> output = io.StringIO()
      >>> run_doctor(Visit(coordinator, "secret", process_count=1), Console(file=output))
      0
      >>> output.getvalue().splitlines()[-1]
      'nothing to mend'
    """
    await_name(visit.coordinator, visit.start_timeout_s)
    findings, leads = asyncio.run(_take_part(visit))
    if leads or visit.everyone_shows:
        show(findings, console)
    return 1 if problems(findings) else 0


async def _take_part(visit: Visit) -> tuple[Findings, bool]:
    """The findings, and whether this process leads."""
    leader = _Leader(visit)
    host, port = parse_address("coordinator", visit.coordinator)
    try:
        server = await asyncio.start_server(leader.greet, host, port, limit=MAX_LINE_BYTES)
    except OSError as error:
        # The address belongs to another host, which Python 3.13 tells without a number, or another process of this
        # host leads.
        if error.errno not in (None, errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            raise StartTimeout(f"cannot listen on {visit.coordinator}: {error.strerror}") from None
        return await _follow(visit), False
    async with server:
        leading = asyncio.create_task(leader.lead())
        findings = await _follow(visit)
        await leading
        return findings, True


# --- Every process: follow the leader.


async def _follow(visit: Visit) -> Findings:
    """Answer the leader's questions until it sends the findings."""
    host, port = parse_address("coordinator", visit.coordinator)
    async with contextlib.AsyncExitStack() as stack:
        channel = await _reach_leader(stack, visit, host, port)
        address = visit.host or str(channel.writer.get_extra_info("sockname")[0])
        receiver = _Receiver(visit.token)
        server = await asyncio.start_server(receiver.greet, address, 0, limit=MAX_LINE_BYTES)
        await stack.enter_async_context(server)
        patient = _describe(address)
        trials = _serve_trials(patient, visit.token)
        await channel.send(
            patient=asdict(patient),
            port=server.sockets[0].getsockname()[1],
            trial_port=trials.port() if trials is not None else 0,
        )
        # The leader waits for all processes, and for the measurements of other pairs, some of them twice.
        measure_s = 2 * visit.process_count * (visit.seconds + 2 * PATIENCE_S) + _trial_patience_s(visit)
        patience_s = visit.start_timeout_s + measure_s + PATIENCE_S
        while True:
            try:
                order = await channel.receive(patience_s)
            except (OSError, TimeoutError) as error:
                raise InternalError(
                    f"{host_name()} heard no more of the doctor at {visit.coordinator}: {describe_error(error)}"
                ) from None
            if "findings" in order:
                return _read_findings(order["findings"])
            if "time" in order:
                await channel.send(time=time.time())
            elif "trial_port" in order:
                await channel.send(
                    **await asyncio.to_thread(_try_fabric, visit, address, order["address"], order["trial_port"])
                )
            else:
                await channel.send(**await _measure(visit, address, order["address"], order["port"]))


async def _reach_leader(stack: contextlib.AsyncExitStack, visit: Visit, host: str, port: int) -> Channel:
    deadline = time.monotonic() + visit.start_timeout_s
    while True:
        try:
            return await stack.enter_async_context(connected(host, port, visit.token, visit.host))
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            if time.monotonic() > deadline:
                raise StartTimeout(
                    f"{host_name()} cannot reach the coordinator at {visit.coordinator} ({describe_error(error)}); is "
                    "`jaxhetero doctor` running on that host, and is the address right?"
                ) from None
            await asyncio.sleep(_RETRY_S)


def _describe(address: str) -> Patient:
    import platform
    from importlib import metadata

    import psutil

    import jaxhetero

    stats = psutil.net_if_stats()
    # Interfaces of containers and bridges claim speeds too, but no cable leads from them to other hosts.
    hardware = {path.parent.name for path in Path("/sys/class/net").glob("*/device")}
    interface = next((name for name, own in interface_addresses(":" in address).items() if own == address), "")
    fabric, fabric_problem = _fabric()
    return Patient(
        host=host_name(),
        address=address,
        versions={
            "jaxhetero": jaxhetero.__version__,
            "jax": metadata.version("jax"),
            "python": platform.python_version(),
        },
        interface=interface,
        speeds_mbit={
            name: stat.speed for name, stat in stats.items() if name in hardware and stat.isup and stat.speed > 0
        },
        mtu=stats[interface].mtu if interface else 0,
        fabric=fabric,
        fabric_problem=fabric_problem,
    )


def _fabric() -> tuple[str, str]:
    """The devices that a job would use which asks for a fabric, or why it could not."""
    from jaxhetero._native import find_fabrics

    wanted = _wanted_fabric()
    (kind, text), devices = find_fabrics(wanted)
    if kind == "ok" and not devices and wanted != "auto":
        text = f"there is no device of the provider {wanted}"
    return ", ".join(f"{provider} on {domain}" for provider, domain in devices), text


def _wanted_fabric() -> str:
    setting = os.environ.get("JAXHETERO_FABRIC", "off")
    return "auto" if setting == "off" else setting


def _serve_trials(patient: Patient, token: str) -> TrialServer | None:
    """What receives over a fabric; nothing where this host has none, or cannot listen."""
    from jaxhetero._native import serve_trial

    return serve_trial(patient.address, token)[1] if patient.fabric else None


def _trial_patience_s(visit: Visit) -> float:
    """How long a trial may take: it runs twice, and each run may wait for connections and for the last answer."""
    return 2 * (visit.seconds + 2 * PATIENCE_S)


def _try_fabric(visit: Visit, own: str, address: str, port: int) -> dict[str, Any]:
    """Send to another process over a fabric, and then over the socket below it; or the failure."""
    from jaxhetero._native import run_trial

    found: dict[str, Any] = {}
    for fabric, name in ((_wanted_fabric(), "bytes_per_s"), ("off", "socket_bytes_per_s")):
        (kind, text), provider, bytes_per_s = run_trial(
            own, address, port, visit.token, fabric, round(1000 * visit.seconds), round(1000 * PATIENCE_S)
        )
        if kind != "ok":
            return {"failure": text}
        found |= {name: bytes_per_s} | ({"provider": provider} if provider else {})
    return found


async def _measure(visit: Visit, own: str, address: str, port: int) -> dict[str, Any]:
    """Send to another process for a while; return the bytes per second that arrived there, or a failure."""
    try:
        async with connected(address, port, visit.token, own) as channel:
            end = time.monotonic() + visit.seconds
            while time.monotonic() < end:
                channel.writer.write(_BLOCK)
                await asyncio.wait_for(channel.writer.drain(), visit.seconds + PATIENCE_S)
            channel.writer.write_eof()
            return await channel.receive(visit.seconds + PATIENCE_S)
    except (OSError, TimeoutError, JaxheteroError, ValueError) as error:
        return {"failure": f"{format_address(address, port)}: {describe_error(error)}"}


class _Receiver:
    """Receives from other processes and tells them how many bytes per second have arrived."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer)
        with contextlib.suppress(OSError, TimeoutError, JaxheteroError, ValueError):
            await channel.prove(self._token, serves=True)
            received_bytes, begin = 0, time.monotonic()
            while block := await reader.read(1 << 20):
                received_bytes += len(block)
            await channel.send(bytes_per_s=received_bytes / max(time.monotonic() - begin, 1e-9))
        writer.close()


# --- One process: lead.


@dataclass
class _Follower:
    channel: Channel
    patient: Patient
    port: int
    trial_port: int
    """Where it receives over a fabric; 0 where it has none."""

    async def ask(self, patience_s: float, **question: Any) -> dict[str, Any]:
        """The follower's answer to a question, or a failure if the follower is gone."""
        try:
            await self.channel.send(**question)
            return await self.channel.receive(patience_s)
        except (OSError, TimeoutError, ValueError) as error:
            return {"failure": f"{self.patient.name} left the examination: {describe_error(error)}"}


class _Leader:
    """Gathers the followers at the coordinator's address and examines them."""

    def __init__(self, visit: Visit) -> None:
        self._visit = visit
        self._followers: list[_Follower] = []
        self._refusals: list[str] = []
        self._changed = asyncio.Event()
        self._over = asyncio.Event()

    async def greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer)
        try:
            await channel.prove(self._visit.token, serves=True)
            hello = await channel.receive()
            patient = Patient(**hello["patient"])
            self._followers.append(_Follower(channel, patient, int(hello["port"]), int(hello["trial_port"])))
        except AuthenticationError as error:
            self._refusals.append(str(error))
        except (OSError, TimeoutError, JaxheteroError, ValueError, KeyError, TypeError):
            pass  # a stranger, or a process that will try again
        else:
            self._changed.set()
            await self._over.wait()
        self._changed.set()
        writer.close()

    async def lead(self) -> None:
        try:
            await self._gather()
            await self._compare_clocks()
            goodput, failures = await self._measure_pairs()
            patients = [follower.patient for follower in self._followers]
            trial = await self._try_fabric()
            findings = Findings(self._visit.process_count, patients, goodput, failures, self._refusals, trial)
            messages = [follower.channel.send(findings=_write_findings(findings)) for follower in self._followers]
            await asyncio.gather(*messages, return_exceptions=True)  # a follower that is gone is no error
        finally:
            self._over.set()

    async def _gather(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._visit.start_timeout_s):
                # A refused process does not try again.
                while len(self._followers) + len(self._refusals) < self._visit.process_count or not self._followers:
                    self._changed.clear()
                    await self._changed.wait()

    async def _compare_clocks(self) -> None:
        """Set how far each follower's clock is ahead, by the ping with the shortest round trip."""
        for follower in self._followers:
            best = (float("inf"), 0.0)
            for _ in range(_PINGS):
                start = time.time()
                answer = await follower.ask(PATIENCE_S, time=start)
                end = time.time()
                best = min(best, (end - start, float(answer.get("time", end)) - (start + end) / 2))
            follower.patient = replace(follower.patient, clock_s=best[1])

    async def _measure_pairs(self) -> tuple[dict[Pair, float], dict[Pair, str]]:
        goodput: dict[Pair, float] = {}
        failures: dict[Pair, str] = {}

        async def measure(source: int, target: int) -> None:
            follower, peer = self._followers[source], self._followers[target]
            patience_s = 2 * self._visit.seconds + 4 * PATIENCE_S
            answer = await follower.ask(patience_s, address=peer.patient.address, port=peer.port)
            if "failure" in answer:
                failures[source, target] = str(answer["failure"])
            else:
                goodput[source, target] = max(float(answer["bytes_per_s"]), goodput.get((source, target), 0.0))

        async def measure_both_ways(pairs: list[Pair]) -> None:
            both_ways = [*pairs, *((target, source) for source, target in pairs)]
            await asyncio.gather(*(measure(source, target) for source, target in both_ways))

        for pairs in tournament(len(self._followers)):
            await measure_both_ways(pairs)
        # Alone, a pair is not slow because other processes have kept its processors busy.
        for pair in slowest_pairs(goodput, len(self._followers)):
            await measure_both_ways([pair])
        return goodput, failures

    async def _try_fabric(self) -> FabricTrial | None:
        hosts = {index: each.patient.host for index, each in enumerate(self._followers) if each.trial_port}
        pair = fabric_pair(hosts)
        if pair is None:
            return None
        source, target = pair
        peer = self._followers[target]
        answer = await self._followers[source].ask(
            _trial_patience_s(self._visit), address=peer.patient.address, trial_port=peer.trial_port
        )
        return FabricTrial(source, target, **answer)


def fabric_pair(hosts: dict[int, str]) -> Pair | None:
    """Which two of the processes with a fabric try it, by their hosts: those of two hosts, where there are two."""
    return min(combinations(hosts, 2), key=lambda pair: hosts[pair[0]] == hosts[pair[1]], default=None)


def slowest_pairs(goodput: dict[Pair, float], count: int) -> list[Pair]:
    """At most ``count`` pairs that are slow in one direction, the slowest first."""
    typical = statistics.median(goodput.values()) if goodput else 0.0
    slow = sorted((rate, min(pair), max(pair)) for pair, rate in goodput.items() if rate < SLOW * typical)
    return list(dict.fromkeys((one, other) for _, one, other in slow))[:count]


def tournament(count: int) -> Iterator[list[Pair]]:
    """Every pair of ``count`` players once, in rounds in which no player is in two pairs: the circle method."""
    players: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        yield [(one, other) for one, other in pairs if one is not None and other is not None]
        players = [players[0], players[-1], *players[1:-1]]


def _write_findings(findings: Findings) -> dict[str, Any]:
    """The findings for JSON, which has no pairs as keys."""
    written = asdict(findings)
    for name in ("goodput", "failures"):
        written[name] = [[*pair, value] for pair, value in written[name].items()]
    return written


def _read_findings(written: dict[str, Any]) -> Findings:
    pairs = {name: {(a, b): value for a, b, value in written[name]} for name in ("goodput", "failures")}
    patients = [Patient(**patient) for patient in written["patients"]]
    trial = FabricTrial(**written["trial"]) if written["trial"] else None
    return Findings(written["wanted_count"], patients, refusals=written["refusals"], trial=trial, **pairs)
