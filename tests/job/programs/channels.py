"""Messages between workers, as the first argument says; see tests/job/test_channels.py."""

import gc
import hashlib
import json
import os
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jaxhetero
from jaxhetero._job.channels import Channels

MODE = sys.argv[1]
VICTIM = 1
CHANNEL_COUNT = 4
MESSAGE_COUNT = 3
LARGE_BYTES = 4 << 20


def message(source: int, target: int, channel: int, number: int) -> list[np.ndarray]:
    """Several leaves, the sizes of which depend on the channel."""
    rng = np.random.default_rng([source, target, channel, number])
    count = [0, 1, 1000, 400_000][channel]
    half = rng.standard_normal(count, np.float32).astype(ml_dtypes.bfloat16)
    return [rng.standard_normal((count, 2), np.float32), np.empty(0, np.int8), half]


def exchange() -> Any:
    """Every worker sends to every other over several channels at once; a digest of all that came."""
    channels, rank = Channels(), jaxhetero.rank()
    peers = [peer for peer in range(jaxhetero.size()) if peer != rank]
    places = [
        (peer, channel, number) for number in range(MESSAGE_COUNT) for channel in range(CHANNEL_COUNT) for peer in peers
    ]
    transfers, results = [], {}
    for peer, channel, number in places:
        sent = message(rank, peer, channel, number)
        into = [np.empty_like(leaf) for leaf in message(peer, rank, channel, number)]
        results[peer, channel, number] = into
        text = f"message {number}"
        posts = [
            lambda: channels.post_send(peer, channel, sent, number, text),  # noqa: B023
            lambda: channels.post_receive(peer, channel, into, number, text),  # noqa: B023
        ]
        transfers += [post() for post in (posts if (peer + channel) % 2 else reversed(posts))]
    for transfer in transfers:
        channels.finish(transfer)
    digest = hashlib.sha256()
    for (peer, channel, number), leaves in results.items():
        for leaf, expected in zip(leaves, message(peer, rank, channel, number), strict=True):
            assert np.array_equal(leaf.view(np.uint8), expected.view(np.uint8))
            digest.update(leaf.tobytes())
    # A peer may say that it has moved to shared memory after all its messages.
    deadline = time.monotonic() + 10
    most = 1 + 2 * len(peers) if os.environ.get("JAXHETERO_SHARED_MEMORY") != "0" else 0
    while (metrics := jaxhetero.metrics()).shared_connection_count < most and time.monotonic() < deadline:
        time.sleep(0.01)
    return {
        "digest": digest.hexdigest(),
        "shared": metrics.shared_connection_count,
        "sent": metrics.channel_sent_bytes,
        "received": metrics.channel_received_bytes,
        "expected": sum(leaf.nbytes for place in places for leaf in message(rank, *place)),
    }


def late() -> Any:
    """Rank 0 sends what rank 1 awaits later, and awaits what rank 1 sends later: nothing else is held up."""
    channels, peer = Channels(), 1 - jaxhetero.rank()
    large, into = np.arange(LARGE_BYTES, dtype=np.uint8), np.zeros(LARGE_BYTES, np.uint8)
    if jaxhetero.rank() == 0:
        unasked = channels.post_send(peer, 0, [large], 0, "what is asked for late")
        unsent = channels.post_receive(peer, 1, [into], 0, "what is sent late")
        channels.finish(channels.post_send(peer, 2, [b"now"], 0, "a word"))
        assert not unasked.done()
        assert not unsent.done()
        channels.finish(channels.post_send(peer, 2, [b"now"], 1, "another word"))
        channels.finish(unasked)
        channels.finish(unsent)
    else:
        word = bytearray(3)
        for tag in range(2):
            channels.finish(channels.post_receive(peer, 2, [word], tag, "a word"))
        assert word == b"now"
        channels.finish(channels.post_send(peer, 1, [large], 0, "what is sent late"))
        channels.finish(channels.post_receive(peer, 0, [into], 0, "what is asked for late"))
    assert jaxhetero.rank() == 1 or np.array_equal(into, large)
    assert jaxhetero.rank() == 0 or np.array_equal(into, large)
    return True


def memory() -> Any:
    """Buffers are held until their transfer is done, also if the program drops it, and no longer."""
    channels, peer = Channels(), 1 - jaxhetero.rank()
    go = channels.post_receive(peer, 9, [bytearray(1)], 0, "go")
    if jaxhetero.rank() == 0:
        buffer = bytearray(range(200))
        sent = channels.post_send(peer, 0, [buffer], 0, "held")
        channels.post_send(peer, 1, [np.full(100_000, 7.0)], 0, "dropped")
        gc.collect()
        np.full(100_000, 8.0)  # in the memory of the other, if that is free
        try:
            buffer.append(1)
        except BufferError:
            pass
        else:
            raise AssertionError("the buffer is not held")
        channels.finish(channels.post_send(peer, 9, [b"g"], 0, "go"))
        channels.finish(sent)
        buffer.append(1)
        channels.finish(go)
    else:
        channels.finish(go)
        word, numbers = bytearray(200), np.zeros(100_000)
        channels.finish(channels.post_receive(peer, 0, [word], 0, "held"))
        channels.finish(channels.post_receive(peer, 1, [numbers], 0, "dropped"))
        channels.finish(channels.post_send(peer, 9, [b"g"], 0, "go"))
        assert word == bytes(range(200))
        assert (numbers == 7.0).all()
    return True


def refused() -> Any:
    """Buffers that cannot be what they should be; messages that differ."""
    channels, peer = Channels(), 1 - jaxhetero.rank()
    kinds = []
    for buffers in ([np.zeros((4, 4))[:, 0]], [b"read only"], [object()], [np.zeros(3), b"read only"]):
        try:
            channels.post_receive(peer, 0, buffers, 0, "x")
        except (BufferError, TypeError, ValueError) as error:
            kinds.append(type(error).__name__)
    print(json.dumps(kinds), flush=True)
    if jaxhetero.rank() == 0:
        channels.finish(channels.post_send(peer, 3, [b"1234"], 0, "activations of stage 0"))
    channels.finish(channels.post_receive(peer, 3, [bytearray(5)], 0, "activations of stage 1"))


def until_lost(way: str) -> Any:
    """Rank 1 sends, receives or does nothing until it is lost; the others have messages to or from it all the while."""
    channels, rank = Channels(), jaxhetero.rank()
    buffer = np.zeros(LARGE_BYTES, np.uint8)
    others = [peer for peer in range(jaxhetero.size()) if peer != VICTIM]
    number = 0
    while True:
        text = f"activations of microbatch {number}"
        if rank == VICTIM and way != "idle":
            post = channels.post_send if way == "sends" else channels.post_receive
            transfers = [post(peer, 0, [buffer if way == "sends" else buffer.copy()], number, text) for peer in others]
        elif way == "receives":
            transfers = [channels.post_send(VICTIM, 0, [buffer], number, text)]
        elif rank != VICTIM:
            transfers = [channels.post_receive(VICTIM, 0, [buffer], number, text)]
        if number == 3 or way == "idle":
            print("running", flush=True)
        if rank == VICTIM and way == "idle":
            threading.Event().wait()
        for transfer in transfers:
            channels.finish(transfer)
        number += 1


def beside_reducers() -> Any:
    """Sums and messages until a reducer was lost, and a few more; all as they should be."""
    channels, rank, peer = Channels(), jaxhetero.rank(), 1 - jaxhetero.rank()
    psum = jax.jit(jaxhetero.psum)
    after = 0
    number = 0
    while after < 5:
        sent, into = message(rank, peer, 3, number), message(rank, peer, 3, 0)
        received = channels.post_receive(peer, 0, into, number, "activations")
        transfer = channels.post_send(peer, 0, sent, number, "activations")
        lost = jaxhetero.metrics().view_count > 0
        total, both_lost = psum((jnp.ones(200_000), jnp.float32(lost)))
        channels.finish(transfer)
        channels.finish(received)
        assert (np.asarray(total) == 2).all()
        expected = message(peer, rank, 3, number)
        assert all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in zip(into, expected, strict=True))
        after += float(both_lost) == 2
        number += 1
        if number == 3:
            print("running", flush=True)
    return True


def main() -> None:
    jaxhetero.initialize()
    ways = {"exchange": exchange, "late": late, "memory": memory, "refused": refused, "beside": beside_reducers}
    result = ways[MODE]() if MODE in ways else until_lost(MODE)
    jaxhetero.shutdown()
    print(json.dumps(result))


main()
