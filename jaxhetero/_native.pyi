"""The C++ core, as bound by xla_ffi/module.cc. Nothing here holds the GIL while it waits."""

from typing import Any

version: str

# What the core declares by name: "worker settings", "reducer settings", "call attributes", "exchange attributes",
# "start attributes", "done attributes", "metrics". A test holds the declarations of the Python side against it.
declared_names: dict[str, list[str]]

# (name, message): name is "ok" or a class of jaxhetero.errors; see jaxhetero.errors.from_status.
Status = tuple[str, str]

# (severity, text): severity is a level of the standard logging module.
Event = tuple[int, str]

# (job_id, a worker's rank or a reducer's number)
Place = tuple[int, int]

# op, round, bytes; requested, first_push, first_result and end in seconds of time.monotonic(); for each reducer its
# number, its part of the bytes, and when the last of that part was back.
RoundRecord = tuple[str, int, int, float, float, float, float, list[tuple[int, int, float]]]

# number, why rounds stood still, the ranks and the numbers of the reducers of the view; when rounds stood still, and
# when they went on, in seconds of time.monotonic().
ViewRecord = tuple[int, str, list[int], list[int], float, float]

class Transfer:
    """A message that was posted on a channel. Hold it until it is done: it holds the buffers until then."""

    def done(self) -> bool: ...
    def wait(self, timeout_ms: int) -> Status | None:
        """How it ended, or None when ``timeout_ms`` passed first."""

class CoordinatorServer:
    """The coordinator of an elastic job on its own native thread, until all workers have left."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """Take what ``declared_names["coordinator settings"]`` lists from ``settings``, and leave the rest."""
    def start(self) -> Status:
        """Bind the listening socket and start the thread; returns at once."""
    def wait(self, timeout_ms: int) -> bool:
        """True once the job has ended; False when ``timeout_ms`` passed first."""
    def result(self) -> Status:
        """How it ended; "ok" after every worker left in order. Call after ``wait`` returned True."""
    def stop(self) -> None:
        """Close every connection and end the thread."""
    def next_event(self, timeout_ms: int) -> Event | None: ...

class ReducerServer:
    """A reducer on its own native thread: listens, meets the others at the coordinator, sums until all workers left."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """Take what ``declared_names["reducer settings"]`` lists from ``settings``, and leave the rest."""
    def start(self) -> Status:
        """Bind the listening socket and start the thread; returns at once."""
    def wait(self, timeout_ms: int) -> bool:
        """True once the reducer has ended; False when ``timeout_ms`` passed first."""
    def result(self) -> Status:
        """How it ended; "ok" after every worker left in order. Call after ``wait`` returned True."""
    def late_workers(self) -> list[tuple[int, int]]: ...
    def lost_number(self) -> int | None:
        """The number under which the job has gone on without this reducer; None if it has not."""
    def stop(self) -> None:
        """Close every connection and end the thread."""
    def next_event(self, timeout_ms: int) -> Event | None: ...
    def place(self) -> Place | None:
        """None before it has heard of the others."""
    def metrics(self) -> dict[str, int]: ...

class TrialServer:
    def port(self) -> int: ...

class Communicator:
    """The worker's side, on its own native thread. Rank 0 of a fixed job also runs the coordinator on it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """Take what ``declared_names["worker settings"]`` lists from ``settings``, and leave the rest."""
    def start(self) -> Status: ...
    def wait_ready(self, timeout_ms: int) -> Status | None:
        """The outcome of the start, or None when ``timeout_ms`` passed first."""
    def shutdown(self, timeout_ms: int) -> Status: ...
    def next_event(self, timeout_ms: int) -> Event | None: ...
    def post_send(self, peer: int, channel: int, buffers: list[Any], tag: int, text: str) -> Transfer: ...
    def post_receive(self, peer: int, channel: int, buffers: list[Any], tag: int, text: str) -> Transfer: ...
    def failure(self) -> Status:
        """Why rounds cannot run any more; "ok" while they can."""
    def metrics(self) -> dict[str, int]: ...
    def members(self) -> list[int]:
        """The ranks that take part in an elastic job now; empty before the first view, and in a fixed job."""
    def wait_at_gate(self, timeout_ms: int) -> tuple[Status, str, int, int, list[int], list[int]] | None:
        """What to do now: (status, what, gate, view, ranks, joining); None if ``timeout_ms`` passed first.

        ``what`` is "pass", "meet", "give", "take" or "leave"; see xla_ffi/worker/gate.h.
        """
    def say_met(self) -> None: ...
    def say_given(self, view: int) -> None: ...
    def is_candidate(self) -> bool: ...
    def say_present(self, view: int) -> None: ...
    def ask_to_leave(self) -> None: ...
    def place(self) -> Place | None:
        """None before the first view."""
    def slow_rank(self) -> int:
        """The worker whose interface has become slow, as rank 0 finds; -1 if none has, and on other ranks."""
    def slow_reducers(self) -> list[tuple[int, int]]:
        """Likewise: the reducers' numbers, and what they carry in percent of a full rate."""
    def timeline(self, since: int = ...) -> tuple[int, list[RoundRecord]]:
        """The latest rounds, but for the first ``since`` of all; and how many rounds came before the first of them."""
    def views(self, number: int = ...) -> list[ViewRecord]:
        """The latest views from that number on."""
    def keep_timeline(self, most_records: int) -> None:
        """How many of the latest rounds to keep, in place of 4096. Call before ``start``."""
    def round_times(self) -> tuple[list[float], list[int], float]:
        """Upper edges in seconds, the rounds below each and at last above all, and the sum of their times."""
    def make_current(self) -> None:
        """Let the FFI handlers of this process find this communicator."""

class ProgramRunner:
    """An optimizer's program, as reducers run it. For tests and benchmarks."""

    @property
    def kernel(self) -> str:
        """The name of the fused kernel that runs it; empty if it is interpreted."""
    def choose(self, interpret: bool, baseline: bool) -> None:
        """Interpret it whatever it is; use the vectors of the platform's baseline."""
    def run(
        self, inputs: list[Any], scalars: Any, outputs: list[Any], first: int
    ) -> tuple[Status, list[list[tuple[int, int, float]]]]:
        """Write the outputs of a piece of a tensor, which begins at its element ``first``.

        Inputs, scalars and outputs are contiguous arrays with one axis: float32, and uint16 for bfloat16. The result
        has, for each summand of the program, the subtrees of its sum: (first, level, sum).
        """

def load_program(encoded: bytes) -> tuple[Status, ProgramRunner | None]: ...
def sum_of_tensor(subtrees: list[tuple[int, int, float]], count: int) -> tuple[Status, float]:
    """The sum over a tensor of ``count`` elements, of what its pieces gave."""

def clear_current() -> None:
    """Let the FFI handlers find no communicator, and end what GPUs had of it."""

def set_cuda_options(*, driver_path: str, devices: list[int], rank: int, pinned_bytes: int, timeout_ms: int) -> None:
    """What the handlers for GPUs need to know; the driver is opened in the first round on a GPU."""

def best_s_per_byte(worker_rates: list[float], reducer_rates: list[float], colocated_count: int) -> float:
    """Seconds per byte of the best possible split; see jaxhetero.best_time_s, which checks the arguments."""

def find_fabrics(wanted: str) -> tuple[Status, list[tuple[str, str]]]:
    """The devices of this host, with their providers, that the setting ``fabric`` would use."""

def serve_trial(host: str, token: str) -> tuple[Status, TrialServer | None]:
    """Receives what other processes send in trials, over whatever fabric they offer, until it is dropped."""

def run_trial(
    source: str, host: str, port: int, token: str, fabric: str, duration_ms: int, patience_ms: int
) -> tuple[Status, str, float]:
    """Sends to a ``TrialServer`` from ``source``, over the setting ``fabric``; "off" is the socket.

    Returns the provider, if any, and how many bytes a second arrived.
    """

def visit(coordinator: str, token: str, encrypt: bool, timeout_ms: int) -> tuple[Status, dict[str, Any] | None]:
    """The state of the job at a coordinator; see jaxhetero.doctor.status, which gives it types."""

def cuda_failure() -> Status: ...
def drain_cuda_lanes(timeout_ms: int) -> bool:
    """Whether all rounds that were started on GPUs ended within ``timeout_ms``."""

# The "stages" of the custom call, as jax.ffi.register_ffi_target takes them, and the "type" of its state.
def host_target() -> dict[str, dict[str, Any]]: ...
def exchange_target() -> dict[str, dict[str, Any]]: ...
def start_target() -> dict[str, dict[str, Any]]: ...
def done_target() -> dict[str, dict[str, Any]]: ...
def cuda_target() -> dict[str, dict[str, Any]]: ...
def cuda_start_target() -> dict[str, dict[str, Any]]: ...
def cuda_done_target() -> dict[str, dict[str, Any]]: ...
def stand_in_target() -> dict[str, dict[str, Any]]: ...
def stand_in_start_target() -> dict[str, dict[str, Any]]: ...
def stand_in_done_target() -> dict[str, dict[str, Any]]: ...
