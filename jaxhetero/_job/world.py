"""Who takes part, and this process's place in it."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from jaxhetero._job.cores import memory_nodes, worker_strands
from jaxhetero._job.lookup import await_name
from jaxhetero._job.settings import make_config, refuse_several_processes
from jaxhetero.config import Config, cuda_stand_in, rail_addresses
from jaxhetero.errors import ConfigError, JaxheteroError, NotInitializedError, from_status
from jaxhetero.watching.exporter import Exporter
from jaxhetero.watching.native_log import EventPump, logger
from jaxhetero.watching.rounds_file import RoundsFile
from jaxhetero.watching.watched import watch_reducer, watch_worker

if TYPE_CHECKING:
    from jaxhetero._native import Communicator, ReducerServer, Status

# How long native code may keep a Ctrl-C waiting.
_POLL_MS = 100
_GLANCE_S = 0.002


@dataclass(frozen=True)
class World:
    """One worker's part in a running job."""

    config: Config
    _communicator: Communicator | None = None
    _reducer: ReducerServer | None = None
    _pumps: tuple[EventPump, ...] = ()
    _watching: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def rank(self) -> int:
        """This worker's number, 0 to ``size - 1``."""
        return self.config.rank

    @property
    def size(self) -> int:
        """How many workers take part; in an elastic job, now."""
        return len(self.members) if self.is_elastic else self.config.worker_count

    @property
    def capacity(self) -> int:
        """How many workers there can be at most: what programs are compiled for."""
        return self.config.capacity

    @property
    def is_elastic(self) -> bool:
        """Whether workers may be lost without an end of the job."""
        return self.config.elastic != ""

    @property
    def members(self) -> list[int]:
        """The ranks that take part now."""
        found = self._communicator.members() if self._communicator is not None and self.is_elastic else []
        return found or list(range(self.config.worker_count))

    @property
    def is_alone(self) -> bool:
        """One worker and no reducer: a sum is the value itself, and nothing touches the network."""
        return self._communicator is None


@dataclass
class _Current:
    world: World | None = None
    parent: Config | None = None
    """In a forked child, the settings of the worker that it was forked from."""
    lock: threading.RLock = field(default_factory=threading.RLock)


_current = _Current()


def initialize(
    *,
    rank: int | None = None,
    worker_count: int | None = None,
    alone: bool | None = None,
    reducer_count: int | None = None,
    colocated_count: int | None = None,
    coordinator: str | None = None,
    token: str | None = None,
    host: str | None = None,
    interface: str | None = None,
    start_timeout_ms: int | None = None,
    timeout_ms: int | None = None,
    chunk_bytes: int | None = None,
    window_chunks: int | None = None,
    checksum: bool | None = None,
    failover: bool | None = None,
    measure_rates: bool | None = None,
    strands: int | None = None,
    elastic: str | None = None,
    lost_after_ms: int | None = None,
    rejoin_timeout_ms: int | None = None,
    compress: str | None = None,
    shared_memory: bool | None = None,
    fabric: str | None = None,
    encrypt: bool | None = None,
    metrics_port: int | None = None,
    timeline_file: str | None = None,
    restart_count: int | None = None,
    pinned_bytes: int | None = None,
    cuda_driver: str | None = None,
) -> None:
    """Join the job: connect to the coordinator and the reducers, and make the collectives usable.

    Every argument is a field of ``jaxhetero.config.Config``, which has its unit and its default. One that is not given,
    or is None, comes from the environment (``JAXHETERO_RANK``, ...), which ``jaxhetero launch`` sets. Then Slurm, MPI,
    an indexed Job of Kubernetes, Kubeflow Trainer or torchrun is asked for what it tells of rank, counts, coordinator
    and restarts; and ``jax.distributed``, if that is initialized. What is still open has the default. Without any of
    them, the world has this worker alone; in a process that a launcher has started as one of several, that is an error.

    Args:
      rank, worker_count: this worker's number, from 0, and how many workers take part.
      alone: a world of this worker alone is meant, whatever has started the process.
      reducer_count, colocated_count: how many dedicated reducers there are, and in how many workers a reducer runs.
      coordinator, token: the ``host:port`` where all processes meet, and the secret that all of them know.
      host, interface: the address, or the network interface, at which others reach this process.
      start_timeout_ms, timeout_ms: how long the start, and a round without progress, may take, in milliseconds.
      chunk_bytes, window_chunks: the unit of pipelining, and how many of them are under way to one reducer.
      checksum, failover, measure_rates, shared_memory: whether frames have checksums, a reducer may be lost, links are
        measured at the start, and processes of one host share memory.
      compress: whether floats go to other hosts in a shorter code, with the same bits.
      fabric: whether bytes go over EFA or InfiniBand.
      encrypt: whether what goes over sockets is encrypted.
      strands: how many cores each process uses to move and to sum bytes.
      elastic, lost_after_ms, rejoin_timeout_ms: whether the job goes on without workers that are lost, after how long
        a silence a process is, and how long too few wait for more, in milliseconds.
      metrics_port, timeline_file: where others find the counts and the rounds of this worker.
      restart_count: how often the job has been started anew.
      pinned_bytes, cuda_driver: for GPUs.

    Blocks until every worker and reducer has joined, without holding the GIL. Logs every few seconds who is missing.

    Raises:
      ConfigError: a setting is wrong, this process would be alone without having asked for it, or it has joined a job
        already.
      StartTimeout: a worker or reducer is still missing after ``start_timeout_ms``.
      AddressInUse: another process has the port of the coordinator, or of the metrics.
      AuthenticationError, VersionMismatch: see ``jaxhetero.errors``.

    Example:
      A world of one needs no reducer. Every worker of a job passes its own rank, or is started by `jaxhetero launch`:

      >>> jaxhetero.shutdown()
      >>> jaxhetero.initialize(alone=True)
      >>> jaxhetero.size()
      1
    """
    settings = {name: value for name, value in locals().items() if value is not None}
    with _current.lock, contextlib.ExitStack() as held:
        if _current.world is not None:
            raise ConfigError("jaxhetero is initialized already; call jaxhetero.shutdown() first to start anew")
        config = make_config(settings, held)
        # Not by the first program with a collective: JAX would compile that program again at its second call, because
        # of settings in the modules of JAX that are imported with it (pallas, which jax.extend imports; seen in 0.12).
        importlib.import_module("jaxhetero._compat")
        if config.elastic:
            refuse_several_processes()
        if config.worker_count == 1 and config.reducer_count == 0:
            _current.world = World(config)
            return
        _current.world = _start(config)
        atexit.register(_shutdown_at_exit)


def shutdown() -> None:
    """Finish all rounds, disconnect from the reducers, and free everything. Does nothing if not initialized.

    Blocks until the programs that this thread has launched have run. Then blocks until no worker has a round running;
    if any collective was one of a group, until all workers shut down. Fails a round that makes no progress for
    ``timeout_ms``. A worker with a co-located reducer then waits until the other workers, who need that reducer, have
    left: for up to ``start_timeout_ms``. Runs by itself when the process ends.

    Raises:
      JaxheteroError: the job had failed, or a round could not be finished.

    Example:
      A process may join a job again after it has left one:

      >>> jaxhetero.shutdown()
      >>> jaxhetero.initialize(rank=0, worker_count=1)
    """
    with _current.lock:
        world, _current.world = _current.world, None
        if world is None or world._communicator is None:
            return
        atexit.unregister(_shutdown_at_exit)
        _stop(world)


def _shutdown_at_exit() -> None:
    """``shutdown`` where nobody can catch what it raises, and the user's own traceback should stay the last word."""
    world = _current.world
    if world is not None and world.is_elastic and getattr(sys, "last_value", None) is not None:
        # The program has failed, and the other workers need not wait for it.
        _current.world = None
        _abandon(world)
        return
    try:
        shutdown()
    except JaxheteroError as error:
        logger.info("shutdown at exit: %s", error)


def _leave_to_parent() -> None:
    """In a forked child: it has no part in its parent's job, and a thread that only the parent has may hold the lock.

    The native core closes the child's copies of all connections by itself.
    """
    _current.lock = threading.RLock()
    atexit.unregister(_shutdown_at_exit)
    if _current.world is not None and not _current.world.is_alone:
        from jaxhetero._job import ffi

        ffi.leave_clients()
        _current.parent, _current.world = _current.world.config, None


os.register_at_fork(after_in_child=_leave_to_parent)


def current() -> World:
    """The initialized world; raises ``NotInitializedError`` if there is none."""
    if _current.world is not None:
        return _current.world
    if _current.parent is not None:
        raise NotInitializedError(
            f"process {os.getpid()} was forked from the worker of rank {_current.parent.rank} and takes no part in its "
            "job; only rank(), size() and restart_count() answer here, so let the worker itself do the rest"
        )
    raise NotInitializedError("call jaxhetero.initialize() before using a collective")


def _settings() -> Config:
    """Those of the initialized world, or in a forked child without one those of its parent's."""
    return current().config if _current.world is not None or _current.parent is None else _current.parent


def rank() -> int:
    """This worker's number, from 0 to ``size() - 1``. Does not block. In a forked child, that of its parent.

    Raises:
      NotInitializedError: before ``initialize()``.

    Example:
      >>> jaxhetero.rank()
      0
    """
    return _settings().rank


def size() -> int:
    """The number of workers in the job; in an elastic job, now. Does not block. In a forked child, as in its parent.

    Raises:
      NotInitializedError: before ``initialize()``.
      ConfigError: in an elastic job, while a program is traced: the number would be part of the program for ever.

    Example:
      >>> rows = range(64)[jaxhetero.rank() :: jaxhetero.size()]  # this worker's rows of a batch of 64
      >>> len(rows)
      64
    """
    if _current.world is None or not _current.world.is_elastic:
        return _settings().worker_count
    from jaxhetero import _compat

    if _compat.is_tracing():
        raise ConfigError(
            "size() is called while a program is traced, and in an elastic job it changes without another compilation; "
            "call it outside, or let pmean() divide"
        )
    return _current.world.size


def capacity() -> int:
    """How many workers there can be at most: for what is part of a program. ``size()`` where the job is not elastic.

    Raises:
      NotInitializedError: before ``initialize()``.

    Example:
      >>> jaxhetero.elastic.capacity()
      1
    """
    return current().capacity


def is_elastic() -> bool:
    """Whether workers may be lost, come and leave. Does not block.

    Raises:
      NotInitializedError: before ``initialize()``.

    Example:
      >>> jaxhetero.elastic.is_elastic()
      False
    """
    return current().is_elastic


def is_coming() -> bool:
    """Whether this process waits to be let into an elastic job that had started before. Does not block."""
    communicator = current()._communicator
    return communicator is not None and current().is_elastic and communicator.is_candidate()


def refuse_elastic(what: str) -> None:
    """``ConfigError`` in an elastic job; ``what`` needs a number of workers that does not change."""
    if current().is_elastic:
        raise ConfigError(
            f"{what} does not work in an elastic job yet, where workers may be lost: leave it out, or start the job "
            "without the setting `elastic`"
        )


def restart_count() -> int:
    """How often ``jaxhetero launch --max-restarts`` has restarted this job after a failure; 0 at first.

    Does not block. A program that saves checkpoints loads its latest one where this is above 0.

    Raises:
      NotInitializedError: before ``initialize()``.

    Example:
      >>> jaxhetero.restart_count() > 0  # then load the latest checkpoint
      False
    """
    return _settings().restart_count


def check() -> None:
    """Raise the error that ended the job, if there is one. Does not block.

    Call it where you look at results of a GPU. They are NaN after a failure, because XLA cannot fail a program that it
    has launched already. The next program with a collective, ``barrier()`` and ``shutdown()`` raise the error as well.

    Raises:
      JaxheteroError: a round failed.
      NotInitializedError: before ``initialize()``.

    Example:
      >>> jaxhetero.check()  # no round has failed
    """
    communicator = current()._communicator
    if communicator is None:
        return
    from jaxhetero import _native

    _check(communicator.failure())
    _check(_native.cuda_failure())


def _start(config: Config) -> World:
    from jaxhetero import _native
    from jaxhetero._job import ffi

    await_name(config.coordinator, config.start_timeout_ms / 1000)
    ffi.register(bool(cuda_stand_in()))
    _native.set_cuda_options(
        driver_path=cuda_stand_in() or config.cuda_driver,
        devices=ffi.lane_devices(bool(cuda_stand_in())),
        rank=config.rank,
        pinned_bytes=config.pinned_bytes,
        timeout_ms=config.timeout_ms,
    )
    settings = asdict(config) | {"most_strands": worker_strands(), "memory_nodes": memory_nodes()}
    settings |= {"worker_count": config.capacity, "least_worker_count": config.least_worker_count}
    settings |= {"first_worker_count": config.worker_count if config.elastic else 0}
    rails = rail_addresses(config)
    # An address that was given in place of the interface's own comes first.
    sources = [config.host, *rails[1:]] if rails else []
    communicator = _native.Communicator(settings | {"sources": sources})
    reducer = None
    if config.rank < config.colocated_count:
        place = {"port": 0, "number": -1, "colocated_rank": config.rank, "more_hosts": rails[1:]}
        reducer = _native.ReducerServer(settings | place)
    pumps = tuple(EventPump(source) for source in (communicator, reducer) if source is not None)
    world = World(config, communicator, reducer, pumps, _watch(config, communicator, reducer))
    for pump in world._pumps:
        pump.start()
    try:
        _check(communicator.start())
        if reducer is not None:
            _check(reducer.start())
        while (outcome := communicator.wait_ready(_POLL_MS)) is None:
            pass
        _check(outcome)
    except BaseException:
        _abandon(world)
        raise
    communicator.make_current()
    return world


def _watch(config: Config, communicator: Communicator, reducer: ReducerServer | None) -> contextlib.ExitStack:
    """What lets others see this process; closing it ends that, after the last round."""
    with contextlib.ExitStack() as stack:
        exporter = stack.enter_context(Exporter(config))
        exporter.show(watch_worker(communicator, config), *([] if reducer is None else [watch_reducer(reducer)]))
        if config.timeline_file:
            stack.enter_context(RoundsFile(Path(config.timeline_file), communicator, config.rank))
        return stack.pop_all()


def _stop(world: World) -> None:
    from jaxhetero import _native

    assert world._communicator is not None
    try:
        # XLA's threads are the parent's alone: of a forked child's programs, those that have not run never will.
        if world._communicator.failure()[0] == "ok" and _current.parent is None:
            _finish_programs()
        # What a GPU has yet to begin can only end while the communicator runs.
        _native.drain_cuda_lanes(world.config.timeout_ms)
        _check(world._communicator.shutdown(world.config.timeout_ms))
        if world._reducer is not None:
            _wait_for_last_worker(world._reducer, world.config.start_timeout_ms)
    finally:
        _native.clear_current()
        _abandon(world)


def _finish_programs() -> None:
    """Wait for the programs that JAX has launched and XLA has not run yet: their rounds have not begun.

    Results that nobody holds are no live arrays. But XLA runs the programs of one thread in order, so a program that is
    launched now ends after them. It is large enough that XLA does not run it at once, in this thread.
    """
    import jax
    import numpy as np

    operand = np.ones((64, 64), np.float32)
    last = []
    for device in jax.local_devices():
        # In a mesh of its own, since the user's program may have set one of other devices.
        with jax.transfer_guard("allow"), jax.set_mesh(jax.sharding.Mesh([device], ("device",))):
            last.append(jax.jit(lambda x: x @ x)(jax.device_put(operand, device)))
    # A look now and then, instead of block_until_ready(): Ctrl-C ends this, and errors stay with the results.
    for array in [*jax.live_arrays(), *last]:
        while not array.is_deleted() and not array.is_ready():
            time.sleep(_GLANCE_S)


def _wait_for_last_worker(reducer: ReducerServer, timeout_ms: int) -> None:
    """Keep a co-located reducer alive until the last worker, which still needs it, has left as well."""
    deadline = time.monotonic() + timeout_ms / 1000
    while not reducer.wait(_POLL_MS) and time.monotonic() < deadline:
        pass


def _abandon(world: World) -> None:
    if world._communicator is not None:
        world._communicator.shutdown(0)
    if world._reducer is not None:
        world._reducer.stop()
    for pump in world._pumps:
        pump.stop()
    world._watching.close()


def _check(status: Status) -> None:
    name, message = status
    if name != "ok":
        raise from_status(name, message)
