"""Settings of one process, and the only place that reads environment variables."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral
from pathlib import Path
from typing import Any

from jaxhetero.errors import ConfigError

ENV_PREFIX = "JAXHETERO_"
# As in xla_ffi/wire/job_shape.h and frame.h.
MOST_WORKERS = MOST_REDUCERS = 4096
MOST_STRANDS = 32
MOST_INTERFACES = 16
MOST_CHUNK_BYTES = 1 << 24
_TYPES: dict[str, Any] = {"int": Integral, "bool": bool, "str": str}
_BOOLEANS = {"1": True, "true": True, "0": False, "false": False}
_MOST_WORKERS = 4096
_COMPRESS = ("auto", "always", "never")


@dataclass(frozen=True)
class Config:
    """The settings of one worker process. Sizes are in bytes, times in milliseconds.

    Every field can be given to ``jaxhetero.initialize()`` by its name, or in the environment as
    ``JAXHETERO_`` plus the name in capitals (``JAXHETERO_TIMEOUT_MS=10000``). An argument wins over the environment.

    Raises:
      ConfigError: a setting is out of its range, or two settings contradict each other.

    Example:
      >>> from jaxhetero.config import Config
      >>> config = Config(rank=1, worker_count=4, reducer_count=2, coordinator="10.0.0.1:7700", token="secret")
      >>> config.colocated_count                     # the dedicated reducers do all the work
      0
      >>> Config(rank=4, worker_count=4)
      Traceback (most recent call last):
          ...
      jaxhetero.errors.ConfigError: rank 4 is not in 0..3
    """

    rank: int = 0
    """This worker's number, 0 to worker_count - 1."""
    worker_count: int = 1
    """How many worker processes take part; in an elastic job, at the start."""
    alone: bool = False
    """Whether a world of this worker alone is meant. Without it, ``initialize()`` refuses to be alone in a process that
    a launcher (Slurm, MPI, Kubernetes, Ray Train, torchrun) has started as one of several."""
    reducer_count: int = 0
    """How many dedicated reducers take part."""
    colocated_count: int = -1
    """How many workers run a co-located reducer, on a thread of its own: the first ranks. The plan gives a co-located
    reducer the share that relieves the dedicated ones most, which is nothing if there are as many of them as workers.
    -1: every worker if there is no dedicated reducer, else none."""
    coordinator: str = ""
    """``host:port``, or ``[address]:port`` of IPv6, where workers and reducers meet at the start; rank 0 listens on
    it, or in an elastic job ``jaxhetero coordinator``."""
    token: str = field(default="", repr=False)
    """The job's secret. A process without it is refused. Never printed."""
    host: str = ""
    """The address under which other processes reach this worker and a reducer in its process. Default: the address of
    the interface that leads to the coordinator."""
    interface: str = ""
    """The network interface to use, such as ``eth1``, or several, as in ``eth1,eth2``. Connections come from their
    addresses, of which the first is the default of ``host``. Of several, each carries a part of every large bucket; the
    first interface of one host then talks to the first of another, the second to the second, and so on. Default: the
    interface that the routes of this machine choose."""
    start_timeout_ms: int = 120_000
    """How long ``initialize`` waits for all workers and reducers."""
    timeout_ms: int = 30_000
    """How long a round, or the message of a channel, may make no progress before it fails."""
    chunk_bytes: int = 0
    """The size of a chunk, the unit of pipelining. 0: chosen from the sizes of the bucket and of the whole call. The
    same on every worker of a job."""
    window_chunks: int = 0
    """How many chunks may be on their way to one reducer before the first result is back. 0: as many as the path's
    goodput and round trip need."""
    checksum: bool = False
    """Whether every frame carries a CRC-32C that its receiver checks. A damaged frame is never summed: its connection
    is closed and counted in ``metrics()``. The same on every worker of a job."""
    failover: bool = True
    """Whether the job continues when a reducer is lost, with the same results to the bit, as long as one is left. Every
    worker then keeps a copy of its contribution to the latest round of each op. The same on every worker of a job."""
    measure_rates: bool = True
    """Whether the start measures the rate of every reducer's network interface, which takes a quarter of a second.
    Slower reducers then get smaller shares, and chunks have the size that suits the network. Where all reducers are
    dedicated, the shares follow rates that change later. The same on every worker of a job."""
    strands: int = 0
    """How many cores a worker and a reducer use each to move and to sum bytes: 1 to 32. Each strand is a thread with
    connections of its own. 0: as few as the measured rates need, or as many as all hosts of the job can spare where
    these are measured to be faster: a quarter of the cores that a worker may use, or two where it has two, and all of a
    dedicated reducer's. The same on every worker of a job."""
    elastic: str = ""
    """``"MIN:MAX"`` makes the job elastic: it goes on when a worker is lost, as long as MIN are left, and has at most
    MAX at any time. Its coordinator is a process of its own. MIN is at least 2. The same on every worker of a job."""
    lost_after_ms: int = 10_000
    """In an elastic job: how long a process may give no sign of life before it counts as lost. It counts for the
    coordinator alone."""
    rejoin_timeout_ms: int = 60_000
    """In an elastic job: how long those that are left wait at their gates for others when fewer than MIN are. It counts
    for the coordinator alone."""
    compress: str = "auto"
    """Whether this worker sends float32 and bfloat16 to reducers on other hosts in a shorter code, and gets the totals
    so; their bits stay the same. ``"auto"``: where the network, as measured at the start, is slower than the code.
    Or ``"always"``, or ``"never"``."""
    shared_memory: bool = True
    """Whether bytes for reducers on this worker's own host, and for workers there over channels, go through shared
    memory, where possible, and not through the loopback network. It takes about a megabyte for each of them."""
    fabric: str = "off"
    """Whether bytes for reducers on other hosts, and for workers there over channels, go over a fabric, which libfabric
    drives, and not over sockets. ``"off"``: never. ``"auto"``: over EFA or InfiniBand, where this host has a device and
    the library. Else the provider of libfabric to use, as in ``"efa"``. Where that cannot be, bytes go over sockets,
    and one line of the log says why. It takes about four megabytes for each connection."""
    encrypt: bool = False
    """Whether all that goes over sockets is encrypted, by the host's OpenSSL 3. Shared memory is not encrypted, and no
    fabric is used. The same on every worker, reducer and coordinator of a job."""
    metrics_port: int = 0
    """Where this process serves its counts to Prometheus, at ``http://HOST:PORT/metrics``: the port, on the address of
    ``host`` or ``interface``, else on the one that leads to the coordinator. 0: nowhere. Takes ``prometheus-client``,
    which ``pip install prometheus-client`` brings."""
    timeline_file: str = ""
    """The file to which this worker writes the times of all its rounds, while it makes them. ``jaxhetero launch
    --timeline`` sets it and reads the files. Default: none."""
    restart_count: int = 0
    """How often ``jaxhetero launch --max-restarts`` has started this job anew; see ``jaxhetero.restart_count()``."""
    pinned_bytes: int = 1 << 30
    """Pinned host memory for each GPU, taken in its first round. Give more than a program reduces in a step."""
    cuda_driver: str = "libcuda.so.1"
    """The library of the CUDA driver, opened in the first round on a GPU."""

    def __post_init__(self) -> None:
        _check_types(self)
        _take_interface(self)
        if self.worker_count < 1:
            raise ConfigError(f"worker_count is {self.worker_count}; it must be at least 1")
        if not 0 <= self.rank < self.capacity:
            raise ConfigError(f"rank {self.rank} is not in 0..{self.capacity - 1}")
        if self.reducer_count < 0:
            raise ConfigError(f"reducer_count is {self.reducer_count}; it must be 0 or more")
        if self.colocated_count == -1:
            alone = self.reducer_count == 0 and self.worker_count > 1
            object.__setattr__(self, "colocated_count", self.capacity if alone else 0)
        if not 0 <= self.colocated_count <= self.capacity:
            raise ConfigError(f"colocated_count is {self.colocated_count}; it must be in 0..{self.capacity}, or -1")
        if self.alone:
            _check_alone(self)
        if self.worker_count > 1 and self.reducer_count + self.colocated_count == 0:
            raise ConfigError("reducer_count and colocated_count are both 0; somebody must reduce")
        if self.worker_count > 1 and not self.coordinator:
            raise ConfigError(
                "no coordinator: give initialize(coordinator='host:port') or set JAXHETERO_COORDINATOR; "
                "`jaxhetero launch` sets it for every process it starts"
            )
        if self.worker_count > 1 and not self.token:
            raise ConfigError(
                "no job token: give initialize(token=...) or set JAXHETERO_TOKEN or JAXHETERO_TOKEN_FILE to the same "
                "secret on every worker and reducer; `jaxhetero launch` makes one per job"
            )
        if self.coordinator:
            parse_address("coordinator", self.coordinator)
        _check_positive(self, "start_timeout_ms", "timeout_ms", "lost_after_ms")
        if self.pinned_bytes < 1 << 16:
            raise ConfigError(f"pinned_bytes is {self.pinned_bytes}; it must be at least 65536")
        _check_port(self, "metrics_port")
        if not 0 <= self.strands <= MOST_STRANDS:
            raise ConfigError(f"strands is {self.strands}; it must be in 1..{MOST_STRANDS}, or 0")
        if 0 < self.strands < (rails := self.interface.count(",") + 1):
            raise ConfigError(f"strands is {self.strands}; with {rails} interfaces it must be at least {rails}, or 0")
        if self.compress not in _COMPRESS:
            raise ConfigError(f"compress is {self.compress!r}; it must be one of {', '.join(_COMPRESS)}")
        for name in ("window_chunks", "restart_count", "rejoin_timeout_ms"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if self.chunk_bytes and (not 1024 <= self.chunk_bytes <= MOST_CHUNK_BYTES or self.chunk_bytes % 64):
            raise ConfigError(
                f"chunk_bytes is {self.chunk_bytes}; it must be 0, or a multiple of 64 from 1024 to {MOST_CHUNK_BYTES}"
            )
        if self.elastic:
            _check_elastic(self)

    @property
    def capacity(self) -> int:
        """The most workers that take part at any time."""
        return parse_elastic(self.elastic)[1] if self.elastic else self.worker_count

    @property
    def least_worker_count(self) -> int:
        """The fewest workers with which an elastic job goes on; 0 if the job is not elastic."""
        return parse_elastic(self.elastic)[0] if self.elastic else 0


@dataclass(frozen=True)
class CoordinatorConfig:
    """The settings of the coordinator of an elastic job; fields that ``Config`` has too mean the same here.

    Raises:
      ConfigError: ``coordinator`` or ``token`` is missing, or a setting is out of its range.

    Example:
      >>> from jaxhetero.config import CoordinatorConfig
      >>> CoordinatorConfig(coordinator="10.0.0.1:7700", token="secret").lost_after_ms
      10000
    """

    coordinator: str = ""
    """The ``host:port`` to listen on, where workers and reducers meet."""
    token: str = field(default="", repr=False)
    start_timeout_ms: int = Config.start_timeout_ms
    timeout_ms: int = Config.timeout_ms
    lost_after_ms: int = Config.lost_after_ms
    rejoin_timeout_ms: int = Config.rejoin_timeout_ms
    encrypt: bool = Config.encrypt
    history_file: str = ""
    """Lines of JSON are appended to it: who takes part in which rounds. A replay of the program needs them."""

    def __post_init__(self) -> None:
        _check_types(self)
        _check_meeting(self, "to listen on")
        _check_positive(self, "start_timeout_ms", "timeout_ms", "lost_after_ms")
        if self.rejoin_timeout_ms < 0:
            raise ConfigError(f"rejoin_timeout_ms is {self.rejoin_timeout_ms}; it must be 0 or more")


@dataclass(frozen=True)
class ReducerConfig:
    """The settings of one dedicated reducer; fields that ``Config`` has too mean the same here.

    Raises:
      ConfigError: ``coordinator`` or ``token`` is missing, or a setting is out of its range.

    Example:
      >>> from jaxhetero.config import ReducerConfig
      >>> ReducerConfig(coordinator="10.0.0.1:7700", token="secret", host="10.0.0.9").timeout_ms
      30000
    """

    coordinator: str = ""
    token: str = field(default="", repr=False)
    host: str = ""
    """The address to listen on, at which workers reach this reducer. Default: the address of the interface that leads
    to the coordinator."""
    interface: str = ""
    """The network interface whose address is the default of ``host``; or several, as in ``eth1,eth2``."""
    port: int = 0
    """The port to listen on. 0: any free one."""
    number: int = -1
    """Which of the job's dedicated reducers it is, from 0: its name in all messages. -1: the lowest that is free."""
    encrypt: bool = Config.encrypt
    metrics_port: int = Config.metrics_port
    start_timeout_ms: int = Config.start_timeout_ms
    timeout_ms: int = Config.timeout_ms

    def __post_init__(self) -> None:
        _check_types(self)
        _take_interface(self)
        _check_meeting(self, "that rank 0 listens on")
        _check_port(self, "port")
        _check_port(self, "metrics_port")
        if self.number < -1:
            raise ConfigError(f"number is {self.number}; it must be 0 or more, or -1")
        _check_positive(self, "start_timeout_ms", "timeout_ms")


def _take_interface(config: Config | ReducerConfig) -> None:
    addresses = rail_addresses(config)
    if addresses and not config.host:
        object.__setattr__(config, "host", addresses[0])


def rail_addresses(config: Config | ReducerConfig) -> list[str]:
    """The addresses of the interfaces of ``config.interface``, in their order.

    Raises:
      ConfigError: there is no such interface, or it has no address.

    Example:
      >>> from jaxhetero.config import Config, rail_addresses
      >>> rail_addresses(Config(interface="lo"))
      ['127.0.0.1']
    """
    names = [name.strip() for name in config.interface.split(",")] if config.interface else []
    if len(set(names)) < len(names):
        raise ConfigError(f"interface is {config.interface!r}, which names one interface twice")
    if len(names) > MOST_INTERFACES:
        raise ConfigError(f"interface names {len(names)} interfaces; at most {MOST_INTERFACES} can be used")
    # Who meets at an address of IPv6 means it for the rest as well.
    return [interface_address(name, prefers_ipv6=config.coordinator.startswith("[")) for name in names]


def interface_address(name: str, prefers_ipv6: bool = False) -> str:
    """The address of a network interface of this machine, as ``interface_addresses`` has it.

    Raises:
      ConfigError: there is no such interface, or it has no address.

    Example:
      >>> from jaxhetero.config import interface_address
      >>> interface_address("lo")
      '127.0.0.1'
    """
    addresses = interface_addresses(prefers_ipv6)
    if name not in addresses:
        known = ", ".join(f"{other} ({address})" for other, address in addresses.items())
        raise ConfigError(f"there is no interface {name!r} with an address on host {host_name()}; there are {known}")
    return addresses[name]


def interface_addresses(prefers_ipv6: bool = False) -> dict[str, str]:
    """The address of every network interface of this machine that is up and has one.

    It is the first of IPv4, or else of IPv6; the other way round if IPv6 is preferred. A link-local address of IPv6
    comes last: it says nothing to another host.

    Example:
      >>> from jaxhetero.config import interface_addresses
      >>> interface_addresses()["lo"]
      '127.0.0.1'
    """
    import psutil

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}

    def rank(address: str) -> tuple[bool, bool]:
        return address.startswith("fe80:"), (":" in address) != prefers_ipv6

    found: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        mine = [entry.address for entry in addresses if entry.family in (socket.AF_INET, socket.AF_INET6)]
        if name in up and mine:
            found[name] = min(mine, key=rank)
    return found


def parse_elastic(text: str) -> tuple[int, int]:
    """The fewest and the most workers of ``MIN:MAX``.

    Raises:
      ConfigError: ``text`` is not that, or there are no such jobs.

    Example:
      >>> from jaxhetero.config import parse_elastic
      >>> parse_elastic("2:8")
      (2, 8)
    """
    least, _, most = text.partition(":")
    if not (least.isascii() and least.isdigit() and most.isascii() and most.isdigit()):
        raise ConfigError(f"elastic is {text!r}; it must be MIN:MAX, as in 2:8")
    if not 2 <= int(least) <= int(most) <= _MOST_WORKERS:
        raise ConfigError(f"elastic is {text!r}; it must be MIN:MAX with 2 <= MIN <= MAX <= {_MOST_WORKERS}")
    return int(least), int(most)


def _check_elastic(config: Config) -> None:
    least, most = parse_elastic(config.elastic)
    if not least <= config.worker_count <= most:
        raise ConfigError(
            f"worker_count is {config.worker_count}; with elastic {config.elastic} it must be in that range"
        )
    if not config.failover:
        raise ConfigError("failover is off, which elastic needs; unset one of them")
    # Workers that come later would have to be told the rates.
    object.__setattr__(config, "measure_rates", False)


def _check_meeting(config: CoordinatorConfig | ReducerConfig, address: str) -> None:
    """``ConfigError`` if the command's coordinator or token is missing; ``address`` says which one is wanted."""
    if not config.coordinator:
        raise ConfigError(
            f"no coordinator: give --coordinator HOST:PORT or set JAXHETERO_COORDINATOR to the address {address}"
        )
    parse_address("coordinator", config.coordinator)
    if not config.token:
        raise ConfigError(
            "no job token: set JAXHETERO_TOKEN, or give --token-file or JAXHETERO_TOKEN_FILE the name of a file "
            "that holds it; it must be the same on every worker and reducer"
        )


def _check_types(config: Config | CoordinatorConfig | ReducerConfig) -> None:
    """``ConfigError`` for a setting of another type than its field's; whole numbers of NumPy become Python's."""
    for setting in fields(config):
        value: Any = getattr(config, setting.name)
        is_bool = isinstance(value, bool)
        if not isinstance(value, _TYPES[str(setting.type)]) or is_bool != (setting.type == "bool"):
            raise ConfigError(f"{setting.name} is {value!r}; it must be of type {setting.type}")
        if setting.type == "int":
            object.__setattr__(config, setting.name, int(value))


def _check_alone(config: Config) -> None:
    for name, value in {"worker_count": 1, "reducer_count": 0, "colocated_count": 0}.items():
        if getattr(config, name) != value:
            raise ConfigError(f"alone is set, but {name} is {getattr(config, name)}; unset one of them")


def _check_positive(config: Config | CoordinatorConfig | ReducerConfig, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} is {getattr(config, name)}; it must be at least 1")


def _check_port(config: Config | ReducerConfig, name: str) -> None:
    port = getattr(config, name)
    if not 0 <= port <= 65535:
        raise ConfigError(f"{name} is {port}; it must be in 0..65535")


def parse_address(what: str, text: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[ipv6]:port``.

    Args:
      what: the name of the setting, for the error.
      text: the address.

    Raises:
      ConfigError: ``text`` is no such address.

    Example:
      >>> from jaxhetero.config import parse_address
      >>> parse_address("coordinator", "[fd00::1]:7700")
      ('fd00::1', 7700)
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    # int() would also take " 7", "+7" and "1_0".
    number = int(port) if port.isascii() and port.isdigit() else 0
    if not colon or not host.strip("[]") or (":" in host and not bracketed) or not 1 <= number <= 65535:
        raise ConfigError(f"{what} is {text!r}; it must be host:port or [ipv6]:port with a port in 1..65535")
    return host[1:-1] if bracketed else host, number


def format_address(host: str, port: int) -> str:
    """What ``parse_address`` reads.

    Example:
      >>> from jaxhetero.config import format_address
      >>> format_address("fd00::1", 7700), format_address("10.0.0.1", 7700)
      ('[fd00::1]:7700', '10.0.0.1:7700')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def read_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str | int]:
    """The fields of ``Config`` that the environment sets, by name.

    Raises:
      ConfigError: a variable has no number where one is due, or the file of the token cannot be read.

    Example:
      >>> from jaxhetero.config import read_environment
      >>> read_environment({"JAXHETERO_RANK": "3", "JAXHETERO_CHECKSUM": "true"})
      {'rank': 3, 'checksum': True}
    """
    found: dict[str, str | int] = {}
    for setting in fields(Config):
        variable = ENV_PREFIX + setting.name.upper()
        text = environ.get(variable)
        if text is None:
            continue
        if setting.type == "int":
            # An empty text is an error and not the default: a job script with an unset RANK gives one.
            try:
                found[setting.name] = int(text)
            except ValueError:
                raise ConfigError(f"{variable} is {text!r}; it must be a whole number") from None
        elif setting.type == "bool":
            if text.lower() not in _BOOLEANS:
                raise ConfigError(f"{variable} is {text!r}; it must be 1 or 0, true or false")
            found[setting.name] = _BOOLEANS[text.lower()]
        elif text:
            found[setting.name] = text
    token_file = environ.get(ENV_PREFIX + "TOKEN_FILE")
    if token_file and "token" not in found:
        found["token"] = read_token(Path(token_file))
    return found


def read_token(path: Path) -> str:
    """The job token in a file, without surrounding white space.

    Raises:
      ConfigError: the file cannot be read, or is empty.

    Example:
      >>> import pathlib
      >>> from jaxhetero.config import read_token
      >>> _ = pathlib.Path("token").write_text("secret\\n")
      >>> read_token(pathlib.Path("token"))
      'secret'
    """
    try:
        token = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"cannot read the job token from {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the job token file {path} is not text") from None
    if not token:
        raise ConfigError(f"the job token file {path} is empty")
    return token


def write_environment(settings: Mapping[str, str | int], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """``environ`` with ``settings`` added, for a child process: ``read_environment`` finds them there.

    Raises:
      ConfigError: ``Config`` has no such setting.

    Example:
      >>> from jaxhetero.config import write_environment
      >>> write_environment({"rank": 3}, {"HOME": "/root"})
      {'HOME': '/root', 'JAXHETERO_RANK': '3'}
    """
    unknown = settings.keys() - {setting.name for setting in fields(Config)}
    if unknown:
        raise ConfigError(f"no such setting: {', '.join(sorted(unknown))}")
    written = dict(environ)
    if "token" in settings:
        written.pop(ENV_PREFIX + "TOKEN_FILE", None)
    return written | {ENV_PREFIX + name.upper(): str(value) for name, value in settings.items()}


def cuda_stand_in(environ: Mapping[str, str] = os.environ) -> str:
    """The library that stands in for the CUDA driver in tests; "" otherwise. It is no argument of ``initialize()``.

    Arrays of the CPU are then handled as those of a GPU.

    Example:
      >>> from jaxhetero.config import cuda_stand_in
      >>> cuda_stand_in({"JAXHETERO_CUDA_STAND_IN": "libfake_cuda.so"})
      'libfake_cuda.so'
    """
    return environ.get(ENV_PREFIX + "CUDA_STAND_IN", "")


def colour_wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether output may be coloured: not if ``NO_COLOR`` is set (https://no-color.org) or the terminal is dumb.

    Example:
      >>> from jaxhetero.config import colour_wanted
      >>> colour_wanted({"TERM": "xterm", "NO_COLOR": "1"})
      False
    """
    return not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def host_name() -> str:
    """This host's name, as messages show it."""
    return socket.gethostname()
