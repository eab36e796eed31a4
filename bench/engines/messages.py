"""Messages from one worker to another, in several ways.

``python -m bench.engines.messages ENGINE FOLDER SIZES COUNT STREAM_BYTES`` is one of two workers, which meet with the
help of the folder. Each prints a line of JSON for every size.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import transfer

import jaxhetero
from jaxhetero._job.channels import Channels

_MEET_S = 60.0


class Engine(Protocol):
    """One way to send messages. The constructor waits until both workers have met."""

    def ping_pong(self, size_bytes: int, count: int) -> list[float]:
        """The seconds of so many ways there and back, on rank 0."""
        ...

    def close(self) -> None: ...


class Jaxhetero:
    """Native channels."""

    def __init__(self, rank: int, folder: Path) -> None:
        jaxhetero.initialize()
        self._channels, self._rank, self._peer = Channels(), rank, 1 - rank

    def ping_pong(self, size_bytes: int, count: int) -> list[float]:
        sent, into = np.ones(size_bytes, np.uint8), np.empty(size_bytes, np.uint8)

        def send() -> None:
            self._channels.post_send(self._peer, 0, [sent], 0, "a message")

        posted = [self._channels.post_receive(self._peer, 0, [into], 0, "a message")]

        def receive() -> None:
            self._channels.finish(posted.pop())
            posted.append(self._channels.post_receive(self._peer, 0, [into], 0, "a message"))

        times = _ping_pong(self._rank, count, send, receive)
        # The receive that is posted still.
        send()
        self._channels.finish(posted.pop())
        return times

    def stream(self, size_bytes: int, count: int) -> float:
        """Bytes per second of messages from rank 0 to rank 1, one behind the other; measured on rank 1."""
        buffers = [np.ones(size_bytes, np.uint8) for _ in range(2)]
        post = self._channels.post_receive if self._rank else self._channels.post_send
        posted = [post(self._peer, 1, [buffers[number % 2]], 0, "a stream") for number in range(2)]
        ends_s = []
        for number in itertools.count(2):
            self._channels.finish(posted.pop(0))
            ends_s.append(time.perf_counter())
            if number < count:
                posted.append(post(self._peer, 1, [buffers[number % 2]], 0, "a stream"))
            elif not posted:
                break
        return size_bytes * (len(ends_s) - 1) / (ends_s[-1] - ends_s[0])

    def close(self) -> None:
        jaxhetero.shutdown()


class Transfer:
    """``jax.experimental.transfer``: the receiver pulls."""

    def __init__(self, rank: int, folder: Path) -> None:
        self._rank = rank
        self._device = jax.devices()[0]
        host = os.environ["BENCH_HOST"]
        self._server = transfer.start_transfer_server(self._device.client, f"{host}:0", [f"{host}:0"])
        self._connection = self._server.connect(_exchange(folder, rank, self._server.address()))
        self._number = itertools.count()

    def ping_pong(self, size_bytes: int, count: int) -> list[float]:
        sharding = jax.sharding.SingleDeviceSharding(self._device)
        shape = jax.ShapeDtypeStruct((size_bytes,), jnp.uint8, sharding=sharding)
        array = jax.device_put(np.ones(size_bytes, np.uint8), self._device)

        def send() -> None:
            self._server.await_pull(next(self._number), [array])

        def receive() -> None:
            jax.block_until_ready(self._connection.pull(next(self._number), [shape]))

        return _ping_pong(self._rank, count, send, receive)

    def close(self) -> None: ...


class Gloo:
    """``jax.lax.ppermute`` over gloo, both ways at once: a call is one way."""

    def __init__(self, rank: int, folder: Path) -> None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(os.environ["JAXHETERO_COORDINATOR"], 2, rank)
        self._mesh = jax.make_mesh((2,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.P("workers")
        self._sharding = jax.sharding.NamedSharding(self._mesh, spec)
        self._permute = jax.jit(
            jax.shard_map(
                lambda x: jax.lax.ppermute(x, "workers", [(0, 1), (1, 0)]),
                mesh=self._mesh,
                in_specs=spec,
                out_specs=spec,
            )
        )

    def ping_pong(self, size_bytes: int, count: int) -> list[float]:
        array = jax.make_array_from_process_local_data(self._sharding, np.ones(size_bytes, np.uint8))

        def call() -> None:
            jax.block_until_ready(self._permute(array))

        return _ping_pong(0, count, call, call)

    def close(self) -> None:
        jax.distributed.shutdown()


ENGINES: dict[str, Callable[[int, Path], Engine]] = {"jaxhetero": Jaxhetero, "transfer": Transfer, "gloo": Gloo}


def _ping_pong(rank: int, count: int, send: Callable[[], None], receive: Callable[[], None]) -> list[float]:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        for step in (send, receive) if rank == 0 else (receive, send):
            step()
        times.append(time.perf_counter() - start)
    return times


def _exchange(folder: Path, rank: int, word: str) -> str:
    """The other worker's word."""
    part = folder / f"part-{rank}"
    part.write_text(word)
    part.rename(folder / f"word-{rank}")
    deadline = time.monotonic() + _MEET_S
    other = folder / f"word-{1 - rank}"
    while not other.exists():
        if time.monotonic() > deadline:
            raise TimeoutError("the other worker does not come")
        time.sleep(0.01)
    return other.read_text()


def main() -> None:
    name, folder, sizes, count, stream_bytes = sys.argv[1:]
    rank = int(os.environ["JAXHETERO_RANK"])
    engine = ENGINES[name](rank, Path(folder))
    for size_bytes in map(int, sizes.split(",")):
        engine.ping_pong(size_bytes, 3)
        row: dict[str, Any] = {"bytes": size_bytes, "ping_pong_s": engine.ping_pong(size_bytes, int(count))}
        if isinstance(engine, Jaxhetero) and int(stream_bytes) > 2 * size_bytes:
            row["stream_bytes_per_s"] = engine.stream(size_bytes, int(stream_bytes) // size_bytes)
        print(json.dumps(row), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
