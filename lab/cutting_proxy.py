"""Stands in every TCP connection of its host and, once it gets SIGUSR1, ends them in the middle of frames.

    python -m lab.cutting_proxy --chance 0.3 --seed 7

The kernel sends it what the host's processes connect to and who connects to them (nftables, in the host's own network
namespace), so neither side knows of it. It prints "ready" when it does, and "cut" with the first frame that it cuts.
"""

import asyncio
import contextlib
import random
import signal
import socket
import struct
import subprocess
from dataclasses import dataclass, field

import tyro

# Of either side, before any frame; see xla_ffi/wire/handshake.h.
HANDSHAKE_BYTES = 8 + 4 + 32 + 32
HEADER_BYTES = 40
# The payload's length lies behind the magic number, the type and the flags; see encode() in xla_ffi/wire/frame.cc.
PAYLOAD_BYTES = struct.Struct("<4xI")
PORT = 999
# Marks our own connections, which go where they should.
MARK = 7
SO_ORIGINAL_DST = 80
RULES = f"""
table ip cutting {{
  chain incoming {{
    type nat hook prerouting priority -100;
    iifname "eth0" meta l4proto tcp redirect to :{PORT}
  }}
  chain outgoing {{
    type nat hook output priority -100;
    oifname "eth0" meta mark != {MARK} meta l4proto tcp redirect to :{PORT}
  }}
}}
"""


@dataclass
class Proxy:
    chance: float
    random: random.Random
    cutting: bool = False
    cut_count: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def start_cutting(self) -> None:
        self.cutting = True

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there: asyncio.StreamWriter | None = None
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            back, there = await connect(*original_destination(writer))
            tasks = [asyncio.create_task(self.forward(*way)) for way in ((reader, there), (back, writer))]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for end in (writer, there):
            if end is not None:
                end.close()

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until either end is closed, or a frame has been cut."""
        await self.pass_on(reader, writer, HANDSHAKE_BYTES)
        while True:
            header = await reader.readexactly(HEADER_BYTES)
            frame = header + await reader.readexactly(PAYLOAD_BYTES.unpack_from(header)[0])
            if self.cutting and self.random.random() < self.chance:
                writer.write(frame[: self.random.randrange(1, len(frame))])
                await writer.drain()
                self.cut_count += 1
                if self.cut_count == 1:
                    print("cut", flush=True)
                return
            writer.write(frame)
            await writer.drain()

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: int) -> None:
        while count > 0:
            piece = await reader.read(count)
            if not piece:
                raise asyncio.IncompleteReadError(piece, count)
            count -= len(piece)
            writer.write(piece)
            await writer.drain()


def original_destination(writer: asyncio.StreamWriter) -> tuple[str, int]:
    connection = writer.get_extra_info("socket")
    _, port, address = struct.unpack_from(">HH4s", connection.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, 16))
    return socket.inet_ntoa(address), port


async def connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    own = socket.socket()
    own.setblocking(False)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, MARK)
    try:
        await asyncio.get_running_loop().sock_connect(own, (host, port))
    except OSError:
        own.close()
        raise
    return await asyncio.open_connection(sock=own, limit=1 << 20)


async def run(proxy: Proxy) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, proxy.start_cutting)
    server = await asyncio.start_server(proxy.serve, "0.0.0.0", PORT, limit=1 << 20)
    subprocess.run(["nft", "-f", "-"], input=RULES, text=True, check=True)
    print("ready", flush=True)
    async with server:
        await server.serve_forever()


def main(chance: float = 0.3, seed: int = 0) -> None:
    """
    Args:
        chance: Of a frame to be cut.
        seed: Of which frames are cut, and where.
    """
    asyncio.run(run(Proxy(chance, random.Random(seed))))


if __name__ == "__main__":
    tyro.cli(main)
