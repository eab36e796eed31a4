"""Messages from worker to worker, such as the activations of a pipeline.

A channel leads from one worker to another and has a number, below 2**31. Its messages are matched by their order: what
the one posts to send goes into what the other posts to receive. A message goes only when its receiver has posted memory
for it, so no memory is taken on the way, and a message that nobody waits for yet holds no other one up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxhetero._job import world
from jaxhetero.errors import ConfigError, from_status

if TYPE_CHECKING:
    from jaxhetero._native import Transfer

# How long native code may keep a Ctrl-C waiting.
_POLL_MS = 100


class Channels:
    """This worker's ends of its channels. Any thread may post and wait.

    ``buffers`` are contiguous objects with the buffer protocol, such as arrays, and may be empty. They are neither
    copied nor given back before their transfer is done: do not change what is being sent. Both workers give the same
    ``tag``, 64 bits that say what the message is, and the same number of bytes. ``text`` says it to people who read an
    error: "activations of stage 2, microbatch 5".

    Whatever goes wrong ends the job, on every worker. ``wait()`` of each open transfer then tells why: the peer was
    lost, has made no progress for ``timeout_ms``, or posted another message (``MismatchError``). The time counts from
    when somebody waits for a transfer, or when it has begun to move: it may be posted long before it is needed.

    Raises:
      NotInitializedError: before ``initialize()``.
      ConfigError: this world has one worker.
    """

    def __init__(self) -> None:
        communicator = world.current()._communicator
        if communicator is None:
            raise ConfigError("channels lead to other workers, and this world has one")
        self._communicator = communicator
        self._open: set[Transfer] = set()

    def post_send(self, peer: int, channel: int, buffers: Sequence[Any], tag: int, text: str) -> Transfer:
        """Send a message to the worker of rank ``peer``. Does not block.

        Done once all of it is on its way, so that the buffers may change; not once it has arrived.
        """
        return self._hold(self._communicator.post_send(peer, channel, list(buffers), tag, text))

    def post_receive(self, peer: int, channel: int, buffers: Sequence[Any], tag: int, text: str) -> Transfer:
        """Receive a message of the worker of rank ``peer``. Does not block. Done once it is in the buffers."""
        return self._hold(self._communicator.post_receive(peer, channel, list(buffers), tag, text))

    def finish(self, transfer: Transfer) -> None:
        """Block until the transfer is done, without the GIL.

        Raises:
          JaxheteroError: it failed, and with it the job.
        """
        while (status := transfer.wait(_POLL_MS)) is None:
            pass
        self._open.discard(transfer)
        if status[0] != "ok":
            raise from_status(*status)

    def _hold(self, transfer: Transfer) -> Transfer:
        """A transfer that is dropped before it is done would lose its buffers."""
        self._open.difference_update([other for other in tuple(self._open) if other.done()])
        self._open.add(transfer)
        return transfer
