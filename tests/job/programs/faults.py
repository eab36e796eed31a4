"""Rounds whose sums are known, held at the place where a fault is to strike; prints one JSON object for each event.

The first argument is that phase: idle, push, return, start, shutdown. In the folder that the second one names the files
"begin", "come" (for the last rank) and "work" let the program go on. Times are of the steady clock, which all processes
of a machine share.
"""

import json
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxhetero
from jaxhetero.config import Config, read_environment
from jaxhetero.errors import InternalError, JaxheteroError, from_message

PHASE = sys.argv[1]
FOLDER = Path(sys.argv[2])
COUNT = int(sys.argv[3])
"""Elements of the bucket."""
ROUNDS_AFTER = 2
CHUNK_BYTES = 64 << 10

wrong_count = 0
is_running = False
one_says = threading.Lock()


def say(event: str, **more: Any) -> None:
    with one_says:  # print() writes a line and its end apart, and two threads say things
        print(json.dumps({"event": event, "at": time.monotonic(), **more}), flush=True)


def wait_for(name: str) -> None:
    while not (FOLDER / name).exists():
        if is_running:
            jaxhetero.check()
        time.sleep(0.005)


def contribution(rank: int, number: int) -> np.ndarray:
    """Integers, so that float32 adds them exactly."""
    return (np.arange(COUNT, dtype=np.int32) % 1009 * (rank + 1) + number).astype(np.float32)


def expected(number: int, ranks: Iterable[int]) -> np.ndarray:
    return sum(contribution(int(rank), number) for rank in ranks)


# In an elastic job, others may take part than at the start.
psum = jax.jit(lambda x: jaxhetero.psum(x, name="sum", who=True))


def check_round(number: int, result: tuple[jax.Array, jaxhetero.Who]) -> None:
    global wrong_count
    total, who = jax.block_until_ready(result)
    wrong = not np.array_equal(np.asarray(total), expected(number, np.flatnonzero(who.ranks)))
    wrong_count += wrong
    say("round", number=number, wrong=wrong)


def run_round(number: int) -> None:
    check_round(number, psum(jnp.asarray(contribution(jaxhetero.rank(), number))))


def leave_with_a_round_under_way() -> None:
    """XLA waits for a program as small as this one, hence the thread."""
    sent_bytes = jaxhetero.metrics().sent_bytes
    with ThreadPoolExecutor(1) as pool:
        round_1 = pool.submit(lambda: jax.block_until_ready(psum(jnp.asarray(contribution(jaxhetero.rank(), 1)))))
        while jaxhetero.metrics().sent_bytes < sent_bytes + CHUNK_BYTES and not round_1.done():
            time.sleep(0.001)
        say("leaving")
        jaxhetero.shutdown()
        check_round(1, round_1.result())


def report_moves() -> None:
    """Says how much of the held round has gone out and come back, in parts of this worker's contribution."""
    before = jaxhetero.metrics()

    def watch() -> None:
        last = None
        while True:
            try:
                now = jaxhetero.metrics()
            except JaxheteroError:
                return
            sent = (now.sent_bytes - before.sent_bytes) / (4 * COUNT)
            received = (now.received_bytes - before.received_bytes) / (4 * COUNT)
            if (moved := (round(sent, 2), round(received, 2))) != last:
                say("moved", sent=moved[0], received=moved[1])
                last = moved
            time.sleep(0.002)

    threading.Thread(target=watch, daemon=True).start()


def program() -> None:
    config = Config(**read_environment())
    last = config.rank == config.worker_count - 1
    say("loaded")
    wait_for("begin")
    say("starting")
    if PHASE == "start" and last:
        wait_for("come")
    jaxhetero.initialize()
    run_round(0)
    global is_running
    is_running = True
    say("running")
    if PHASE == "idle":
        wait_for("work")
    if PHASE in ("push", "return", "shutdown"):
        report_moves()
        if last:
            wait_for("come")
    if PHASE == "shutdown":
        leave_with_a_round_under_way()
        return
    for number in range(1, 2 + ROUNDS_AFTER):
        run_round(number)
    jaxhetero.shutdown()


def main() -> None:
    wall = time.time() - time.monotonic()
    error: JaxheteroError | None = None
    try:
        program()
    except JaxheteroError as raised:
        error = raised
    except (jax.errors.JaxRuntimeError, ValueError) as raised:
        error = from_message(str(raised))
    except BaseException as raised:
        error = InternalError(f"another exception: {raised!r}")
    say(
        "end",
        kind=type(error).__name__ if error else "goes on",
        message=str(error or ""),
        wrong=wrong_count,
        jump_s=round(time.time() - time.monotonic() - wall),
    )
    sys.exit(error is not None)


main()
