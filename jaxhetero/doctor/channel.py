"""Messages between the processes of an examination: JSON lines over TCP, after both ends have proved the job token."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import secrets
from collections.abc import AsyncIterator
from typing import Any

from jaxhetero.config import host_name
from jaxhetero.errors import AuthenticationError, ProtocolError

MAX_LINE_BYTES = 1 << 20
# How long a connection, a handshake or an answer may take. Each is a matter of milliseconds on a healthy network.
PATIENCE_S = 5.0
_HELLO = "jaxhetero doctor 1"


class Channel:
    """A connection that carries one message a line."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @property
    def peer(self) -> str:
        """The address of the other end."""
        return str(self.writer.get_extra_info("peername")[0])

    async def send(self, **message: Any) -> None:
        """Send one message."""
        self.writer.write(json.dumps(message).encode() + b"\n")
        await self.writer.drain()

    async def receive(self, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        """Wait for the next message."""
        async with asyncio.timeout(patience_s):
            line = await self.reader.readline()
        if not line:
            raise ConnectionResetError("it closed the connection")
        try:
            message = json.loads(line)
        except RecursionError:
            raise ValueError("a line of too many brackets") from None
        if not isinstance(message, dict):
            raise ValueError("a line without a message")
        return message

    async def prove(self, token: str, *, serves: bool) -> None:
        """Prove to the other end that this end knows the token, and check its proof; see xla_ffi/wire/auth.h.

        Each end sends a nonce, and then its proof, an HMAC of both nonces.
        """
        speaker, listener = ("server", "client") if serves else ("client", "server")
        nonces = {speaker: secrets.token_hex(32)}

        def proof(who: str) -> str:
            message = "".join((who, nonces["client"], nonces["server"]))
            return hmac.new(token.encode(), message.encode(), hashlib.sha256).hexdigest()

        await self.send(hello=_HELLO, nonce=nonces[speaker])
        try:
            theirs = await self.receive()
            if theirs.get("hello") != _HELLO:
                raise ValueError("another greeting")
            nonces[listener] = str(theirs["nonce"])
            await self.send(proof=proof(speaker))
            said = str((await self.receive())["proof"])
        except (ValueError, KeyError):
            raise ProtocolError(f"what is at {self.peer} is no jaxhetero doctor of this version") from None
        if not hmac.compare_digest(said.encode(errors="replace"), proof(listener).encode()):
            raise AuthenticationError(
                f"the job token of {self.peer} differs from the one of {host_name()}; give both the same "
                "JAXHETERO_TOKEN or JAXHETERO_TOKEN_FILE"
            )


@contextlib.asynccontextmanager
async def connected(host: str, port: int, token: str, source: str = "") -> AsyncIterator[Channel]:
    """A channel to another process, from the address ``source`` if given, after both ends have proved the token."""
    local = (source, 0) if source else None
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(host, port, limit=MAX_LINE_BYTES, local_addr=local)
    try:
        channel = Channel(reader, writer)
        await channel.prove(token, serves=False)
        yield channel
    finally:
        writer.close()


def describe_error(error: Exception) -> str:
    """What went wrong with a connection, for people."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
