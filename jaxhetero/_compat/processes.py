"""What ``jax.distributed`` knows of its processes."""

from __future__ import annotations

from jax._src import distributed


def distributed_place() -> tuple[int, int]:
    """The number of this process in ``jax.distributed``, and how many processes there are.

    Why: ``jax.process_count()`` asks the backend, which has to be made for it, and one that knows nothing of
    ``jax.distributed`` has one process. Since 0.10, until ``jax.distributed`` tells.
    """
    state = distributed.global_state
    return int(state.process_id or 0), int(state.num_processes or 1)


def distributed_coordinator() -> str:
    """``host:port`` of JAX's own coordination service, which process 0 runs.

    Why: ``jax.distributed`` has no public way to read the address that it was given or has found. Since 0.10, until
    ``jax.distributed`` has one.
    """
    return distributed.global_state.coordinator_address or ""


def distributed_publish(key: str, value: str) -> None:
    """Set a key that every process of ``jax.distributed`` can read.

    Why: the key-value store has no public interface. Since 0.10, until it has one.
    """
    client = distributed.global_state.client
    assert client is not None, "jax.distributed is not initialized"
    client.key_value_set(key, value)


def distributed_read(key: str, timeout_ms: int) -> str:
    """Wait for a key of ``distributed_publish``. Why and since: as there."""
    client = distributed.global_state.client
    assert client is not None, "jax.distributed is not initialized"
    return str(client.blocking_key_value_get(key, timeout_ms))
