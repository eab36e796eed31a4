"""Gradients reduced across steps have the bits of the ordinary step, 2 workers, 2 reducers."""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster, run

# As users compile. At the tests' level of optimization, LLVM fuses the same sums and products in one program and not in
# another one.
FLAGS = {"XLA_FLAGS": ""}


def check(results: list[dict[str, Any]]) -> None:
    assert [result["different"] for result in results] == [[], []]
    assert results[0]["across"] == results[1]["across"] == results[0]["ordinary"]


@pytest.mark.parametrize("wire_dtype", ["-", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lamb", "clipped"])
def test_the_bits_of_the_ordinary_step(optimizer: str, wire_dtype: str) -> None:
    """After 50 steps, with a new start from a checkpoint among them."""
    check(run("across_steps.py", optimizer, wire_dtype, workers=2, reducers=2, **FLAGS))


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "clipped"])
def test_on_reducers(optimizer: str) -> None:
    """LAMB and clipping have sums over tensors first, of which the next step has still to wait for the rest."""
    check(run("across_steps.py", f"{optimizer} on reducers", "bfloat16", workers=2, reducers=2, **FLAGS))


@pytest.mark.parametrize("strands", [2, 4])
def test_several_strands(strands: int) -> None:
    settings = FLAGS | {"JAXHETERO_STRANDS": str(strands), "JAXHETERO_CHUNK_BYTES": "4096"}
    check(run("across_steps.py", "adamw", "bfloat16", workers=2, reducers=2, **settings))


@pytest.mark.parametrize(
    ("optimizer", "wire_dtype"), [("adamw", "-"), ("adamw", "bfloat16"), ("adamw on reducers", "-")]
)
def test_a_reducer_dies_while_rounds_are_pending(tmp_path: Path, optimizer: str, wire_dtype: str) -> None:
    """Between two programs of rank 0, where rank 1 has not started the same rounds yet."""
    go_on = tmp_path / "go on"
    with Cluster(2, 2, FLAGS) as cluster:
        cluster.start_reducers()
        cluster.start_workers("across_steps.py", optimizer, wire_dtype, str(go_on))
        cluster.wait_for_output("worker 0", "pending")
        cluster.process("reducer 1").send_signal(signal.SIGKILL)
        for rank in range(2):
            cluster.wait_for_error(f"worker {rank}", "going on with 1 reducers")
        go_on.touch()
        results = [outcome.result for outcome in cluster.wait_workers()]
    check(results)
    assert [result["views"] for result in results] == [1, 1]
