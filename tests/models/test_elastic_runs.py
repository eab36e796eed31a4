"""A training whose workers die and come back ends with the bits of one that nothing happens to."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.long.elastic_churn import bits
from tests.support.cluster import ROOT, program_path, run
from tests.support.launcher import TIMEOUT_S, Start

STEPS = 600


def wait_for(log: Path, pattern: str) -> re.Match[str]:
    deadline = time.monotonic() + TIMEOUT_S
    while not (log.exists() and (found := re.search(pattern, log.read_text()))):
        assert time.monotonic() < deadline, log.read_text() if log.exists() else f"no {log}"
        time.sleep(0.02)
    return found


def test_deaths_and_returns_change_no_bit(start_launch: Start, tmp_path: Path) -> None:
    """A worker of three is killed, twice, and started again by the launcher; rank 0, which reports, is one of them.

    Every microbatch counts once.
    """
    (alone,) = run("elastic_training.py", str(STEPS), "0", workers=1, reducers=0)
    program = [sys.executable, str(program_path("elastic_training.py")), str(STEPS), "0.05"]
    job = start_launch(
        *("--elastic", "2:4", "--workers", "3", "--reducers", "1", "--log-dir", str(tmp_path / "logs"), "--", *program),
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
    )
    for rank in (1, 0):
        found = wait_for(tmp_path / "logs" / f"worker-{rank}.log", r"process (\d+) of rank \d is in at step 0")
        os.kill(int(found[1]), signal.SIGKILL)
        wait_for(tmp_path / "logs" / f"worker-{rank}-2.log", r"is in at step [1-9]")
    output, errors = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 0, output + errors
    results: list[Any] = [json.loads(line[line.index('["') :]) for line in output.splitlines() if '["' in line]
    assert results
    assert alone[0] in [digest for digest, _, _ in results]
    assert all(losses == alone[1] and others == 0 for _, losses, others in results)


def test_a_resnet_whose_worker_is_killed_has_the_bits_of_one_worker() -> None:
    """The short form of tests.long.elastic_churn, which checks that the hashes are equal and each step counts once."""
    found = bits(counts=(1,), histories=("5",), workers=3, epochs=6)
    killed = list(found)[-1]
    assert killed.startswith("killed (rank, step): [(0, ")
    assert "members: [3, 2" in killed
