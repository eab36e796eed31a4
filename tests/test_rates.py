"""What the start finds out about the network interfaces decides who reduces how much."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from bench.netlab import Lab, missing

ROOT = Path(__file__).parent.parent
WORKERS = 2
PROGRAM = """
import jax
import numpy as np
import jaxhetero

jaxhetero.initialize()
bucket = np.ones(2**20, np.float32)
total = jax.jit(jaxhetero.psum)
for _ in range(8):
    assert (np.asarray(total(bucket)) == jaxhetero.size()).all()
jaxhetero.shutdown()
"""
needs_namespaces = pytest.mark.skipif(
    missing() is not None and os.environ.get("CI") != "true", reason=f"no network namespaces: {missing()}"
)


@needs_namespaces
@pytest.mark.parametrize("measure_rates", [True, False])
def test_slow_reducer_gets_a_smaller_share(measure_rates: bool) -> None:
    rates = {"w0": "100mbit", "w1": "100mbit", "fast": "100mbit", "slow": "40mbit"}
    with Lab(rates) as lab:
        settings = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "error",
            "JAX_PLATFORMS": "cpu",
            "JAXHETERO_WORKER_COUNT": str(WORKERS),
            "JAXHETERO_REDUCER_COUNT": "2",
            "JAXHETERO_COORDINATOR": f"{lab['w0'].address}:{lab['w0'].free_port()}",
            "JAXHETERO_TOKEN": secrets.token_hex(16),
            "JAXHETERO_START_TIMEOUT_MS": "60000",
            "JAXHETERO_MEASURE_RATES": str(int(measure_rates)),
        }
        jobs = [(name, ["-m", "jaxhetero", "reducer"], {}) for name in ("fast", "slow")]
        jobs += [(f"w{rank}", ["-c", PROGRAM], {"JAXHETERO_RANK": str(rank)}) for rank in range(WORKERS)]
        processes = [
            lab[name].start(
                [sys.executable, *command],
                env={**settings, "JAXHETERO_HOST": lab[name].address, **own},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            for name, command, own in jobs
        ]
        errors = [process.communicate(timeout=120)[1] for process in processes]
        assert not any(process.returncode for process in processes), errors
        share = lab["slow"].counters().received_bytes / lab["fast"].counters().received_bytes
    # 40 / 100 of the program's bytes. Of what the measurement itself takes, both get the same.
    assert share < 0.7 if measure_rates else share > 0.9
