"""`jaxhetero doctor`: finds out what would trouble a long job, before it runs.

The same command runs on every host. They meet where the job would meet, at the coordinator's address; whoever can
listen there leads. The leader asks each for what it is, compares clocks, and lets every pair send to each other at the
same time, as many pairs at once as there are with no process in two of them. All get the findings and show them.

This is a program of its own beside the core: JSON lines over TCP, behind the same proof of the job token.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxhetero.config import host_name, interface_addresses, parse_address
from jaxhetero.doctor.report import Findings, Pair, Patient, problems, show
from jaxhetero.errors import AuthenticationError, InternalError, JaxheteroError, ProtocolError, StartTimeout

_BLOCK = bytes(1 << 16)
_MAX_LINE_BYTES = 1 << 20
_RETRY_S = 0.2
_PINGS = 5
# For what takes a moment where nothing is wrong: a connection, a handshake, an answer.
_PATIENCE_S = 5.0
_HELLO = "jaxhetero doctor 1"


@dataclass(frozen=True)
class Visit:
    """What one process needs to know to take part."""

    coordinator: str
    token: str = field(repr=False)
    process_count: int
    """How many take part, workers and reducers together."""
    host: str = ""
    """The address to be reached at. Default: that of the interface that leads to the coordinator."""
    start_timeout_s: float = 120.0
    """How long to wait for everybody."""
    seconds: float = 0.5
    """How long each pair sends."""


def run_doctor(visit: Visit, console: Console) -> int:
    """Take part and show what was found; 0 when there is nothing to mend, else 1.

    Raises:
      StartTimeout: the coordinator's address does not answer.
      AuthenticationError: the coordinator has another token.
      ProtocolError: something else answers there.
    """
    findings = asyncio.run(_take_part(visit))
    show(findings, console)
    return 1 if problems(findings) else 0


async def _take_part(visit: Visit) -> Findings:
    leader = _Leader(visit)
    host, port = parse_address("coordinator", visit.coordinator)
    try:
        server = await asyncio.start_server(leader.greet, host, port, limit=_MAX_LINE_BYTES)
    except OSError as error:
        # The address is another host's, or another process of this host leads.
        if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            raise StartTimeout(f"cannot listen on {visit.coordinator}: {error.strerror}") from None
        return await _follow(visit)
    async with server:
        leading = asyncio.create_task(leader.lead())
        findings = await _follow(visit)
        await leading
        return findings


# What everybody does, the leader's own process as well.


class _Channel:
    """One message a line, over a connection whose two ends have proved that they know the token."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @property
    def peer(self) -> str:
        return str(self.writer.get_extra_info("peername")[0])

    async def send(self, **message: Any) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")
        await self.writer.drain()

    async def receive(self, patience_s: float = _PATIENCE_S) -> dict[str, Any]:
        async with asyncio.timeout(patience_s):
            line = await self.reader.readline()
        if not line:
            raise ConnectionResetError("it closed the connection")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("a line without a message")
        return message

    async def prove(self, token: str, *, serves: bool) -> None:
        """Both ends send a nonce, and then its proof that it knows the token; see ``prove`` in xla_ffi/wire/auth.h."""
        speaker, listener = ("server", "client") if serves else ("client", "server")
        nonces = {speaker: secrets.token_hex(32)}
        await self.send(hello=_HELLO, nonce=nonces[speaker])
        try:
            theirs = await self.receive()
            if theirs.get("hello") != _HELLO:
                raise ValueError("another greeting")
            nonces[listener] = str(theirs["nonce"])
        except (ValueError, KeyError, TypeError):
            raise ProtocolError(f"what is at {self.peer} is no jaxhetero doctor of this version") from None

        def proof(who: str) -> str:
            message = "".join((who, nonces["client"], nonces["server"]))
            return hmac.new(token.encode(), message.encode(), hashlib.sha256).hexdigest()

        await self.send(proof=proof(speaker))
        answer = await self.receive()
        if not hmac.compare_digest(str(answer.get("proof")), proof(listener)):
            raise AuthenticationError(
                f"the job token of {self.peer} differs from the one of {host_name()}; give both the same "
                "JAXHETERO_TOKEN or JAXHETERO_TOKEN_FILE"
            )


@contextlib.asynccontextmanager
async def _connected(host: str, port: int, token: str, source: str = "") -> AsyncIterator[_Channel]:
    local = (source, 0) if source else None
    async with asyncio.timeout(_PATIENCE_S):
        reader, writer = await asyncio.open_connection(host, port, limit=_MAX_LINE_BYTES, local_addr=local)
    try:
        channel = _Channel(reader, writer)
        await channel.prove(token, serves=False)
        yield channel
    finally:
        writer.close()


async def _follow(visit: Visit) -> Findings:
    """Do what the leader asks until it tells the findings."""
    host, port = parse_address("coordinator", visit.coordinator)
    async with contextlib.AsyncExitStack() as stack:
        channel = await _reach_leader(stack, visit, host, port)
        address = visit.host or str(channel.writer.get_extra_info("sockname")[0])
        receiver = _Receiver(visit.token)
        server = await asyncio.start_server(receiver.greet, address, 0, limit=_MAX_LINE_BYTES)
        await stack.enter_async_context(server)
        await channel.send(patient=asdict(_describe(address)), port=server.sockets[0].getsockname()[1])
        # The leader waits for everybody, and for others' measurements.
        patience_s = visit.start_timeout_s + visit.process_count * (visit.seconds + 2 * _PATIENCE_S) + _PATIENCE_S
        while True:
            try:
                order = await channel.receive(patience_s)
            except (OSError, TimeoutError) as error:
                raise InternalError(
                    f"{host_name()} heard no more of the doctor at {visit.coordinator}: {_reason(error)}"
                ) from None
            if "findings" in order:
                return _read_findings(order["findings"])
            if "time" in order:
                await channel.send(time=time.time())
            else:
                await channel.send(**await _measure(visit, address, order["address"], order["port"]))


async def _reach_leader(stack: contextlib.AsyncExitStack, visit: Visit, host: str, port: int) -> _Channel:
    deadline = time.monotonic() + visit.start_timeout_s
    while True:
        try:
            return await stack.enter_async_context(_connected(host, port, visit.token, visit.host))
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            if time.monotonic() > deadline:
                raise StartTimeout(
                    f"{host_name()} cannot reach the coordinator at {visit.coordinator} ({_reason(error)}); is "
                    "`jaxhetero doctor` running on that host, and is the address right?"
                ) from None
            await asyncio.sleep(_RETRY_S)


def _describe(address: str) -> Patient:
    import platform
    from importlib import metadata

    import psutil

    import jaxhetero

    stats = psutil.net_if_stats()
    # What containers and bridges have is no way to other hosts, whatever speed it claims.
    hardware = {path.parent.name for path in Path("/sys/class/net").glob("*/device")}
    interface = next((name for name, own in interface_addresses().items() if own == address), "")
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
    )


async def _measure(visit: Visit, own: str, address: str, port: int) -> dict[str, Any]:
    """Send to another process for a while; what arrived there, in bytes per second, or why nothing did."""
    try:
        async with _connected(address, port, visit.token, own) as channel:
            end = time.monotonic() + visit.seconds
            while time.monotonic() < end:
                channel.writer.write(_BLOCK)
                await asyncio.wait_for(channel.writer.drain(), visit.seconds + _PATIENCE_S)
            channel.writer.write_eof()
            return await channel.receive(visit.seconds + _PATIENCE_S)
    except (OSError, TimeoutError, JaxheteroError, ValueError) as error:
        return {"failure": f"{address}:{port}: {_reason(error)}"}


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__


class _Receiver:
    """Where others send to, so that the goodput to this process can be measured."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = _Channel(reader, writer)
        with contextlib.suppress(OSError, TimeoutError, JaxheteroError, ValueError):
            await channel.prove(self._token, serves=True)
            received_bytes, begin = 0, time.monotonic()
            while block := await reader.read(1 << 20):
                received_bytes += len(block)
            await channel.send(bytes_per_s=received_bytes / max(time.monotonic() - begin, 1e-9))
        writer.close()


# What one of them does beside that.


@dataclass
class _Guest:
    channel: _Channel
    patient: Patient
    port: int

    async def ask(self, patience_s: float, **question: Any) -> dict[str, Any]:
        """Its answer, or a failure in its name when it is gone."""
        try:
            await self.channel.send(**question)
            return await self.channel.receive(patience_s)
        except (OSError, TimeoutError, ValueError) as error:
            return {"failure": f"{self.patient.name} left the examination: {_reason(error)}"}


class _Leader:
    """Gathers everybody at the coordinator's address and conducts the examination."""

    def __init__(self, visit: Visit) -> None:
        self._visit = visit
        self._guests: list[_Guest] = []
        self._refusals: list[str] = []
        self._changed = asyncio.Event()
        self._over = asyncio.Event()

    async def greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = _Channel(reader, writer)
        try:
            await channel.prove(self._visit.token, serves=True)
            hello = await channel.receive()
            self._guests.append(_Guest(channel, Patient(**hello["patient"]), int(hello["port"])))
        except AuthenticationError as error:
            self._refusals.append(str(error))
        except (OSError, TimeoutError, JaxheteroError, ValueError, KeyError, TypeError):
            pass  # a stranger, or somebody who will come again
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
            patients = [guest.patient for guest in self._guests]
            findings = Findings(self._visit.process_count, patients, goodput, failures, self._refusals)
            words = [guest.channel.send(findings=_write_findings(findings)) for guest in self._guests]
            await asyncio.gather(*words, return_exceptions=True)  # to those who are still there
        finally:
            self._over.set()

    async def _gather(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._visit.start_timeout_s):
                # Who was refused will not come again.
                while len(self._guests) + len(self._refusals) < self._visit.process_count or not self._guests:
                    self._changed.clear()
                    await self._changed.wait()

    async def _compare_clocks(self) -> None:
        """The clock of each, as of the ping with the shortest way there and back."""
        for guest in self._guests:
            best = (float("inf"), 0.0)
            for _ in range(_PINGS):
                start = time.time()
                answer = await guest.ask(_PATIENCE_S, time=start)
                end = time.time()
                best = min(best, (end - start, float(answer.get("time", end)) - (start + end) / 2))
            guest.patient = replace(guest.patient, clock_s=best[1])

    async def _measure_pairs(self) -> tuple[dict[Pair, float], dict[Pair, str]]:
        goodput: dict[Pair, float] = {}
        failures: dict[Pair, str] = {}

        async def measure(source: int, target: int) -> None:
            guest, peer = self._guests[source], self._guests[target]
            patience_s = 2 * self._visit.seconds + 4 * _PATIENCE_S
            answer = await guest.ask(patience_s, address=peer.patient.address, port=peer.port)
            if "failure" in answer:
                failures[source, target] = str(answer["failure"])
            else:
                goodput[source, target] = float(answer["bytes_per_s"])

        for pairs in tournament(len(self._guests)):
            both_ways = [*pairs, *((target, source) for source, target in pairs)]
            await asyncio.gather(*(measure(source, target) for source, target in both_ways))
        return goodput, failures


def tournament(count: int) -> Iterator[list[Pair]]:
    """Every pair of ``count`` once, in rounds in which nobody plays twice: the circle method."""
    players: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        yield [(one, other) for one, other in pairs if one is not None and other is not None]
        players = [players[0], players[-1], *players[1:-1]]


def _write_findings(findings: Findings) -> dict[str, Any]:
    """As JSON has it, which knows no pairs as keys."""
    written = asdict(findings)
    for name in ("goodput", "failures"):
        written[name] = [[*pair, value] for pair, value in written[name].items()]
    return written


def _read_findings(written: dict[str, Any]) -> Findings:
    pairs = {name: {(a, b): value for a, b, value in written[name]} for name in ("goodput", "failures")}
    patients = [Patient(**patient) for patient in written["patients"]]
    return Findings(written["wanted_count"], patients, refusals=written["refusals"], **pairs)
