"""How fast an all-reduce can be: the best possible time for given network interfaces, as the plan of a job has it."""

from __future__ import annotations

from collections.abc import Sequence

from jaxhetero.errors import ConfigError


def best_time_s(
    size_bytes: float,
    worker_rates: Sequence[float],
    reducer_rates: Sequence[float] = (),
    colocated_count: int | None = None,
) -> float:
    """The best possible time of one all-reduce, in seconds: no split of the bytes is faster.

    Every worker sends and receives its contribution once. Among ``n`` workers, a reducer with the share ``b`` of
    the bytes receives and sends ``n b`` of them. The best split makes the largest load over rate smallest. With ``n``
    workers and ``k <= n`` dedicated reducers of one rate ``B``, the time for ``S`` bytes is
    ``2n(n-1) / (n² + kn - 2k) · S/B`` (Jiang et al., OSDI 2020).

    Args:
      size_bytes: bytes of each worker's contribution, as sent.
      worker_rates: the rate of every worker's network interface, in bytes per second in each direction.
      reducer_rates: the same for every dedicated reducer.
      colocated_count: how many workers, the first ones, may reduce a share as well. Default: all of them.

    Returns:
      Seconds; 0 for a single worker.

    Does not block, and needs no ``jaxhetero.initialize()``.

    Raises:
      ConfigError: a rate is not positive, ``colocated_count`` is impossible, or nobody reduces.

    Example:
      A gradient of 1 GB, eight workers at 10 Gbit/s. With eight reducers the time is that of the bytes one way. Without
      reducers it is that of a ring:

      >>> rate = 10e9 / 8
      >>> jaxhetero.best_time_s(1e9, [rate] * 8, [rate] * 8)
      0.8
      >>> jaxhetero.best_time_s(1e9, [rate] * 8)
      1.4
    """
    if colocated_count is None:
        colocated_count = len(worker_rates)
    if not worker_rates or not 0 <= colocated_count <= len(worker_rates):
        raise ConfigError(f"colocated_count is {colocated_count}; there are {len(worker_rates)} workers")
    if not all(rate > 0 for rate in (*worker_rates, *reducer_rates)):
        raise ConfigError(f"rates are {[*worker_rates, *reducer_rates]}; every rate must be above 0 bytes per second")
    if len(worker_rates) > 1 and not reducer_rates and not colocated_count:
        raise ConfigError("nobody reduces: give reducer_rates, or colocated_count above 0")
    from jaxhetero import _native

    s_per_byte: float = _native.best_s_per_byte(list(worker_rates), list(reducer_rates), colocated_count)
    return size_bytes * s_per_byte
