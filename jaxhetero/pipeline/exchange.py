"""What goes from stages on this worker to stages on others, and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from numpy.typing import NDArray

from jaxhetero._collectives.moved import as_words, word_type

if TYPE_CHECKING:
    from jaxhetero._job.channels import Channels
    from jaxhetero._native import Transfer

# How many messages of a route may be on their way to a worker before it needs the first of them.
_POSTED_AHEAD = 3
_ALIGNMENT = 64


@dataclass(frozen=True)
class Route:
    """The messages of one kind: from one stage to another, or from one worker to another.

    Attributes:
      number: unlike that of any other route of the job.
      peer: the rank at the other end.
      shapes: of the arrays in each message.
      text: what a message has, for people.
    """

    number: int
    peer: int
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    text: str


@dataclass(frozen=True)
class Message:
    """One message of a route: a number that both ends compare, and what it is, for people."""

    tag: int
    text: str


@dataclass(frozen=True)
class _Posted:
    transfer: Transfer
    arrays: tuple[NDArray[Any], ...]


class Inbox:
    """The messages of one route that come in."""

    def __init__(self, channels: Channels, route: Route, messages: Sequence[Message]) -> None:
        """``messages``: those of a step, in their order."""
        self._channels = channels
        self._route = route
        self._messages = messages
        self._words = [word_type(shape) for shape in route.shapes]
        self._posted: deque[_Posted] = deque()
        self._next = 0

    def begin_step(self) -> None:
        """Let the first messages come."""
        self._next = 0
        for _ in range(_POSTED_AHEAD):
            self._post()

    def take(self) -> list[jax.Array]:
        """The next message. Blocks until it is there."""
        posted = self._posted.popleft()
        self._channels.finish(posted.transfer)
        self._post()
        arrays = (jax.device_put(array, may_alias=True) for array in posted.arrays)
        return [back(array) for (_, back), array in zip(self._words, arrays, strict=True)]

    def _post(self) -> None:
        if self._next == len(self._messages):
            return
        arrays = tuple(_aligned(shape) for shape, _ in self._words)
        buffers = [array.reshape(-1).view(np.uint8) for array in arrays]
        message = self._messages[self._next]
        text = f"{self._route.text}, {message.text}"
        transfer = self._channels.post_receive(self._route.peer, self._route.number, buffers, message.tag, text)
        self._posted.append(_Posted(transfer, arrays))
        self._next += 1


def _aligned(shape: jax.ShapeDtypeStruct) -> NDArray[Any]:
    """Memory that JAX takes as it is."""
    dtype = np.dtype(shape.dtype)
    count = int(np.prod(shape.shape)) * dtype.itemsize
    memory = np.empty(count + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    aligned: NDArray[Any] = memory[begin : begin + count].view(dtype).reshape(shape.shape)
    return aligned


class Outbox:
    """Sends messages in the order in which they are given, once their arrays have been computed, on its own thread.

    No program of the compute thread may wait for the network: XLA runs the programs of one thread one after the other.
    """

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._thread = ThreadPoolExecutor(1, "jaxhetero-outbox")
        self._posts: list[Future[Transfer]] = []

    def send(self, route: Route, message: Message, arrays: Sequence[jax.Array]) -> None:
        """Send a message. Does not block."""
        self._posts.append(self._thread.submit(self._post, route, message, arrays))

    def finish_step(self) -> None:
        """Wait until everything has been sent; raises what went wrong."""
        posts, self._posts = self._posts, []
        for post in posts:
            self._channels.finish(post.result())

    def _post(self, route: Route, message: Message, arrays: Sequence[jax.Array]) -> Transfer:
        words = [jax.device_get(as_words(array)[0]) for array in arrays]
        buffers = [array.reshape(-1).view(np.uint8) for array in words]
        text = f"{route.text}, {message.text}"
        return self._channels.post_send(route.peer, route.number, buffers, message.tag, text)
