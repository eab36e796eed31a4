"""What workers send each other, and reductions in groups of an axis: as jax.lax does it, or an error that says who."""

from __future__ import annotations

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxhetero
from jaxhetero.errors import ConfigError
from lab.fake_cuda import build
from tests.support.cluster import THROUGH_LANES, Cluster, Outcome, free_port, run
from tests.support.patience import PATIENCE
from tests.support.programs_on_disk import FAST_COMPILATION

TIMEOUT_MS = 4000


@pytest.mark.parametrize(
    ("workers", "devices", "transforms"),
    [(3, 1, "jit,jvp,vmap,scan"), (2, 2, "vjp,offload"), (4, 1, "vjp,offload")],
    ids=["channels", "several devices", "groups of workers"],
)
def test_they_are_those_of_jax(workers: int, devices: int, transforms: str) -> None:
    """All at once in one program, over workers in plain jit and over their devices in shard_map."""
    arguments = (str(workers), str(devices), transforms)
    for result in run("exchanges.py", *arguments, workers=workers, reducers=1, XLA_FLAGS=FAST_COMPILATION):
        assert result["wrong"] == []
        assert (result["channel_sent_bytes"] > 0) == (devices == 1 and not THROUGH_LANES)


def test_arrays_of_a_gpu_take_the_other_way(tmp_path: Path) -> None:
    settings = {"JAXHETERO_CUDA_STAND_IN": str(build(tmp_path)), "XLA_FLAGS": FAST_COMPILATION}
    for result in run("exchanges.py", "2", "1", "jvp", workers=2, reducers=1, **settings):
        assert result == {"wrong": [], "channel_sent_bytes": 0}


def test_in_a_global_mesh_as_well() -> None:
    """Along each axis and along both, with types and without; and what is refused."""
    coordinator = f"127.0.0.1:{free_port()}"
    assert run("exchange_meshes.py", coordinator, workers=2, reducers=1, XLA_FLAGS=FAST_COMPILATION) == [[]] * 2


def run_mistake(mistake: str) -> list[Outcome]:
    settings = {"JAXHETERO_TIMEOUT_MS": str(round(TIMEOUT_MS * PATIENCE))}
    with Cluster(3, 1, settings) as cluster:
        cluster.start_reducers()
        cluster.start_workers("exchange_mistakes.py", mistake)
        return cluster.wait_workers()


@pytest.mark.parametrize(
    ("mistake", "texts"),
    [
        ("shape", ['"hand over bucket 0 (float32[6])", 24 bytes', '"hand over bucket 0 (float32[5])", 20 bytes']),
        ("dtype", ['"trade bucket 0 (int32[3,3])", 12 bytes', '"trade bucket 0 (float32[3,3])", 12 bytes']),
    ],
)
def test_workers_that_disagree_are_told_at_once_who_sends_what(mistake: str, texts: list[str]) -> None:
    start = time.monotonic()
    outcomes = run_mistake(mistake)
    assert time.monotonic() - start < 60 * PATIENCE, "so long may a first round take"
    for outcome in outcomes:
        message = outcome.exception_line
        assert "jaxhetero.MismatchError: message 0 of channel " in message
        assert "rank 2 (host " in message
        assert all(text in message for text in texts)


def test_a_worker_that_dies_is_named() -> None:
    for outcome in run_mistake("killed")[:2]:
        assert "jaxhetero.WorkerLost: rank 2 (host " in outcome.exception_line


def test_a_worker_that_does_not_come_is_named() -> None:
    for outcome in run_mistake("silent")[:2]:
        assert "jaxhetero.RoundTimeout" in outcome.exception_line
        assert "rank 2 (host " in outcome.exception_line


@pytest.mark.usefixtures("alone")
def test_alone_they_are_those_of_one_place() -> None:
    x = {"number": jnp.arange(6.0).reshape(1, 6), "key": jax.random.key(3)[None]}
    same = jaxhetero.ppermute(x, perm=[(0, 0)])
    assert same["key"] == x["key"]
    np.testing.assert_array_equal(same["number"], x["number"])
    assert not jaxhetero.ppermute(x["number"], perm=[]).any()
    assert jaxhetero.all_to_all(x["number"], None, 0, 1).shape == (6, 1)
    assert jaxhetero.all_gather(x["number"], axis_index_groups=[[0]]).shape == (1, 1, 6)


@pytest.mark.usefixtures("alone")
def test_what_is_no_permutation_is_refused() -> None:
    for perm in ([(0, 1)], [(0, 0), (0, 0)], [(-1, 0)]):
        with pytest.raises(ConfigError, match="it must be pairs of places"):
            jaxhetero.ppermute(jnp.ones(2), perm=perm)
    with pytest.raises(ConfigError, match="perm is missing"):
        jaxhetero.ppermute(jnp.ones(2))
    with pytest.raises(ConfigError, match=r"perm is \[0, 0\]; it must have each place once"):
        jaxhetero.pshuffle(jnp.ones(2), perm=[0, 0])
    with pytest.raises(ConfigError, match=r"axis 0 of float32\[2\] cannot be split over 1; .* or pass tiled=True"):
        jaxhetero.all_to_all(jnp.ones(2), None, 0, 0)
    with pytest.raises(ConfigError, match="must be in one group"):
        jaxhetero.psum(jnp.ones(2), axis_index_groups=[[1]])
    with pytest.raises(ConfigError, match="both workers and axis_index_groups name groups"):
        jaxhetero.psum(jnp.ones(2), workers=(0,), axis_index_groups=[[0]])
