"""Work of rank 0 that takes longer than a round may wait, and work that fails."""

import time

import jaxhetero
from models.common.errors import DataError
from models.common.rank_0 import run_on_rank_0

SLOW_S = 6.0  # the test sets timeout_ms to 4 s


def work() -> int:
    time.sleep(SLOW_S)
    return 7


def fail() -> None:
    raise DataError("no such thing")


jaxhetero.initialize()
print(f"rank {jaxhetero.rank()} has {run_on_rank_0(work)}", flush=True)
try:
    run_on_rank_0(fail)
except DataError as error:
    print(f"rank {jaxhetero.rank()}: {error}", flush=True)
jaxhetero.shutdown()
