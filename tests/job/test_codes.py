"""Floats go to other hosts in a shorter code where that is faster, or where asked, and the bits of sums stay."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxhetero.config import Config
from jaxhetero.errors import ConfigError
from lab.netlab import Lab, missing
from tests.support.cluster import Cluster, program_path

PROGRAM = "codes.py"
ROOT = Path(__file__).parents[2]


def run(compress: str, **settings: str) -> list[dict[str, Any]]:
    settings = {"JAXHETERO_SHARED_MEMORY": "0"} | settings
    with Cluster(2, 2, {"JAXHETERO_COMPRESS": compress, **settings}) as cluster:
        cluster.start_reducers()
        cluster.start_workers(PROGRAM)
        results = [outcome.result for outcome in cluster.wait_workers()]
        assert all(outcome.code == 0 for outcome in cluster.wait_reducers())
    assert results[0]["digests"] == results[1]["digests"]
    return results


def test_codes_are_shorter_and_change_no_bit() -> None:
    plain = run("never", JAXHETERO_STRANDS="1")
    assert [result["saved"] for result in plain] == [0, 0]
    for settings in ({"JAXHETERO_STRANDS": "2"}, {"JAXHETERO_CHECKSUM": "1", "JAXHETERO_FAILOVER": "0"}):
        for result in run("always", **settings):
            assert result["digests"] == plain[0]["digests"]
            assert result["parts"]["float32"] < 0.88
            assert result["parts"]["bfloat16"] < 0.75
            assert result["parts"]["computed in bfloat16"] < 0.4
            assert result["saved_of_noise"] == 0


def test_memory_that_is_shared_has_none() -> None:
    """But for the first chunks, under way while both sides learn that they share it."""
    for result in run("always", JAXHETERO_SHARED_MEMORY="1"):
        assert result["parts"]["computed in bfloat16"] > 0.99


@pytest.mark.skipif(missing() is not None and os.environ.get("CI") != "true", reason=f"no namespaces: {missing()}")
@pytest.mark.parametrize("is_measured", [True, False])
def test_a_network_that_was_found_slow_has_them(is_measured: bool) -> None:
    with Lab(dict.fromkeys(("w0", "w1", "r0"), "100mbit")) as lab:
        settings = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAXHETERO_WORKER_COUNT": "2",
            "JAXHETERO_REDUCER_COUNT": "1",
            "JAXHETERO_COORDINATOR": f"{lab['w0'].address}:{lab['w0'].free_port()}",
            "JAXHETERO_TOKEN": secrets.token_hex(16),
            "JAXHETERO_STRANDS": "1",
            "JAXHETERO_COMPRESS": "auto",
            "JAXHETERO_MEASURE_RATES": str(int(is_measured)),
        }
        jobs = [("r0", ["-m", "jaxhetero", "reducer"], {})]
        jobs += [(f"w{rank}", [program_path(PROGRAM)], {"JAXHETERO_RANK": str(rank)}) for rank in range(2)]
        processes = [
            lab[name].start(
                [sys.executable, *map(str, command)],
                env={**settings, "JAXHETERO_HOST": lab[name].address, **own},
                stdout=subprocess.PIPE,
            )
            for name, command, own in jobs
        ]
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert not any(process.returncode for process in processes)
    for output in outputs[1:]:
        assert (json.loads(output.splitlines()[-1])["saved"] > 0) == is_measured


def test_other_words_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^compress is 'yes'; it must be one of auto, always, never$"):
        Config(alone=True, compress="yes")
