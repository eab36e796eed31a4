"""A job whose processes fork: ``forks.py PART [PORT]``. What each part shows is printed as JSON.

``children`` forks children that end in several ways, or use the package, or meet at the port for a job of their own,
and shuts down while some live.
``worker`` prints the pids of its children, and once the job fails or changes, when it has heard of that.
``reducer`` is a reducer that forks when it gets SIGUSR1, and prints the pid of its child.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxhetero
from jaxhetero._job import world
from jaxhetero.config import ReducerConfig
from jaxhetero.launch.reducer import run_reducer

LIFE_S = 60


def descriptors() -> set[str]:
    """What this process has open that is no file: ``socket:[123]``, ``anon_inode:[eventpoll]``, ``/memfd:...``."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the folder itself
            found.add(str(link.readlink()))
    return {each for each in found if not each.startswith("/") or "memfd" in each}


def forked(run: Callable[[], Any]) -> tuple[int, str]:
    """How a child ends that was forked to run a function, and what it prints."""
    sys.stdout.flush()
    source, target = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(target, 1)
        os.dup2(target, 2)
        os.close(source)
        os.close(target)
        result = run()
        print(json.dumps(result), flush=True)
        sys.exit(7)
    os.close(target)
    with os.fdopen(source, encoding="utf-8") as said:
        signal.alarm(60)
        text = said.read()
        signal.alarm(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text.strip()


def fork_from_c() -> int:
    """A child that no Python code hears of, as a library in C forks one."""
    libc = ctypes.PyDLL(None)  # it holds the GIL, which the child could not get
    child = int(libc.fork())
    if child == 0:
        libc.sleep(LIFE_S)
        os._exit(0)
    return child


def refusal(use: Callable[[], Any]) -> str:
    try:
        return f"no error: {use()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def use_the_package() -> list[Any]:
    import jax.numpy as jnp

    refusals = [
        refusal(use)
        for use in (lambda: jaxhetero.psum(jnp.float32(1)), jaxhetero.barrier, jaxhetero.metrics, jaxhetero.check)
    ]
    jaxhetero.shutdown()
    return [[jaxhetero.rank(), jaxhetero.size(), jaxhetero.restart_count()], *refusals]


def join_another_job(compiled: Callable[[Any], Any]) -> float:
    """That of the children, which shut down at their end. XLA cannot compile here: its threads are the parent's."""
    import jax.numpy as jnp

    jaxhetero.initialize(coordinator=f"127.0.0.1:{sys.argv[2]}", token="another", metrics_port=0)
    return float(compiled(jnp.float32(1)))


def fork_again() -> tuple[int, str]:
    return forked(lambda: jaxhetero.rank())


def fail() -> None:
    raise ValueError("the child's own")


def children() -> dict[str, Any]:
    before = descriptors()
    jaxhetero.initialize()
    import jax
    import jax.numpy as jnp

    compiled = jax.jit(jaxhetero.psum)
    compiled(jnp.float32(1)).block_until_ready()
    shown: dict[str, Any] = {
        "opened": len(descriptors() - before),
        "held": forked(lambda: sorted(each for each in descriptors() - before if "pipe:" not in each)),
        "used": forked(use_the_package),
        "compiled": forked(lambda: refusal(lambda: compiled(jnp.float32(1)))),
        "again": forked(fork_again),
        "failed": forked(fail),
        "killed": forked(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    }
    held, ended = threading.Event(), threading.Event()

    def hold() -> None:
        with world._current.lock:
            held.set()
            ended.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    shown["anew"] = forked(lambda: join_another_job(compiled))
    ended.set()
    holder.join()

    loader = multiprocessing.get_context("fork").Process(target=time.sleep, args=(LIFE_S,))
    loader.start()
    child = fork_from_c()
    total = float(compiled(jnp.float32(1)))
    begin = time.monotonic()
    jaxhetero.shutdown()
    shown |= {"total": total, "shutdown_s": time.monotonic() - begin}
    loader.kill()
    os.kill(child, signal.SIGKILL)
    return shown


def worker() -> dict[str, Any]:
    jaxhetero.initialize()
    import jax.numpy as jnp

    children = [fork_from_c(), os.fork()]
    if children[-1] == 0:
        time.sleep(LIFE_S)
        os._exit(0)
    jaxhetero.barrier()
    print(json.dumps(children), flush=True)
    try:
        while jaxhetero.pmax(jnp.int32(jaxhetero.metrics().view_count)) == 0:  # all of them stop after the same round
            time.sleep(0.01)
        heard = "a new view"
    except Exception as error:
        heard = str(error)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
    shown = {"at": time.time(), "heard": heard}
    with contextlib.suppress(jaxhetero.errors.JaxheteroError):
        jaxhetero.shutdown()
    return shown


def reducer() -> None:
    def fork(_number: int, _frame: object) -> None:
        print(json.dumps([fork_from_c()]), flush=True)

    settings = {name: os.environ[f"JAXHETERO_{name.upper()}"] for name in ("coordinator", "token")}
    signal.signal(signal.SIGUSR1, fork)
    sys.exit(run_reducer(ReducerConfig(**settings)))


warnings.filterwarnings("ignore", message=".*fork", category=Warning)
if sys.argv[1] == "reducer":
    reducer()
print(json.dumps({"children": children, "worker": worker}[sys.argv[1]]()), flush=True)
