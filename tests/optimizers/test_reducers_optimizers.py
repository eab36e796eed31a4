"""Optimizers whose state and update live at the reducers: the bits, what a user may do with them, and how they fail."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bench.accelerator.emulation import WAIT_SOURCE
from bench.engines import build_native
from jaxhetero.optimizers import on_reducers
from jaxhetero.optimizers._programs import lower
from tests.long.chaos import run_job
from tests.optimizers.optimizer_zoo import OPTIMIZERS, SIGNS, recorded, weights
from tests.optimizers.programs.reducers_optimizers import large
from tests.optimizers.update_machine import NUMBERS, Job, in_numbers, numpy_pass
from tests.support.cluster import Cluster, free_port, run

STEPS = 4
# One without sums, one with sums of each leaf, with sums over all leaves, with skipped steps, with several of these.
SIX = ("adamw, scheduled and masked", "lars", "adamw, clipped", "adamw, accumulated", "loss scaling", "prodigy")
TWO = ("adamw, scheduled and masked", "loss scaling")


def digest(arrays: list[Any]) -> str:
    found = hashlib.sha256()
    for array in arrays:
        found.update(array.tobytes())
    return found.hexdigest()[:16]


def summed(workers: int, wire_dtype: str) -> list[dict[str, Any]]:
    """The gradients of all workers, in rank order."""

    def sent(gradient: np.ndarray) -> np.ndarray:
        if wire_dtype in NUMBERS:
            return in_numbers(gradient, wire_dtype)
        return gradient.astype(jnp.dtype(wire_dtype or "float32")).astype(np.float32)

    by_rank = [[large(gradients) for gradients in recorded(STEPS, rank)] for rank in range(workers)]
    return [
        {name: functools.reduce(np.add, (sent(steps[i][name]) for steps in by_rank)) for name in by_rank[0][i]}
        for i in range(STEPS)
    ]


@functools.cache
def transcribed(name: str, workers: int, weights_dtype: str, wire_dtype: str) -> dict[str, str]:
    """What the reducers have to come to, operation by operation in NumPy."""
    tx, params = (OPTIMIZERS | SIGNS)[name], large(weights(0))
    state = tx.init(params)
    update = lower(tx, params, weights_dtype=jnp.dtype(weights_dtype))
    job = Job(update, numpy_pass, params, state)
    for gradients in summed(workers, wire_dtype):
        job.step(gradients)
    leaves = jax.tree.leaves(state)
    for index, value in zip(update.worker_states, job.worker_states, strict=True):
        leaves[index] = np.asarray(value)
    for leaf, arrays in zip(update.leaves, job.states, strict=True):
        for index, array in zip(leaf.states, arrays, strict=True):
            leaves[index] = array.astype(jnp.result_type(leaves[index]))
    sent = [array.astype(np.float32) for array in job.sent]
    return {"sent": digest(sent), "kept": digest(job.weights), "state": digest(leaves)}


@pytest.mark.parametrize(
    ("names", "workers", "reducers", "types", "settings"),
    [
        (SIX, 2, 1, ("float32", ""), {"JAXHETERO_STRANDS": "1"}),
        (TWO, 2, 3, ("bfloat16", "bfloat16"), {"JAXHETERO_STRANDS": "2", "JAXHETERO_CHUNK_BYTES": "1024"}),
        # Of five workers: the four reducers would leave nothing to those inside of four.
        (
            TWO,
            5,
            4,
            ("bfloat16", ""),
            {"JAXHETERO_COLOCATED_COUNT": "2", "JAXHETERO_CHUNK_BYTES": "1024", "JAXHETERO_SHARED_MEMORY": "0"},
        ),
        (TWO, 2, 0, ("float32", "float16"), {"JAXHETERO_FAILOVER": "0"}),
        (SIX, 2, 2, ("float32", "int8"), {"JAXHETERO_SHARED_MEMORY": "0"}),
        (
            TWO,
            3,
            2,
            ("bfloat16", "int4"),
            {"JAXHETERO_SHARED_MEMORY": "0", "JAXHETERO_STRANDS": "2", "JAXHETERO_CHUNK_BYTES": "1088"},
        ),
        # Without a schedule: in a program with float8, XLA rounds a scheduled learning rate in another way.
        (
            ("adam", "adamw, clipped"),
            2,
            1,
            ("float32", "float8_e4m3fn"),
            {"JAXHETERO_SHARED_MEMORY": "0", "JAXHETERO_COMPRESS": "always", "JAXHETERO_CHECKSUM": "1"},
        ),
        (TWO, 2, 2, ("float32", "int8"), {}),  # in memory that is shared there are no codes
        *((SIX[:2], 2, reducers, ("float32", ""), {}) for reducers in (2, 4, 8)),
    ],
    ids=[
        *("one reducer", "tiny chunks", "four and two inside", "inside"),
        *("int8", "int4, tiny chunks", "float8, coded", "int8, shared memory"),
        *("two", "four", "eight"),
    ],
)
def test_bits_are_those_of_a_transcription(
    names: tuple[str, ...], workers: int, reducers: int, types: tuple[str, str], settings: dict[str, str]
) -> None:
    """With any number of reducers, of any kind, and any chunks and strands; workers get what the reducers keep."""
    results = run("reducers_optimizers.py", str(STEPS), *types, *names, workers=workers, reducers=reducers, **settings)
    for result in results:
        for name in names:
            expected = transcribed(name, workers, *types)
            assert {key: result[name][key] for key in expected} == expected, name
            assert result[name]["again"] == results[0][name]["again"]


def test_a_worker_has_no_state_on_its_device() -> None:
    """After steps of AdamW: a few numbers, where workers that run it have 12 bytes for each weight."""
    for result in run("reducers_device_bytes.py", workers=2, reducers=1):
        assert result["reducers"] < 1e-3
        assert 12 <= result["workers"] < 12.001


def test_every_place_gives_the_same_weights_and_what_cannot_be_done_is_refused() -> None:
    for result in run("reducers_places.py", workers=2, reducers=2):
        assert len(set(result["trained"].values())) == 1, result["trained"]
        words = {
            "random numbers": "scale_by_muon",
            "integers": "params['w'] is int32",
            "dtype": "weights_dtype is float16",
            "backups": "backups is 2",
            "state": "the state is not one of this optimizer",
        }
        for name, word in words.items():
            assert word in result["refusals"][name]


@pytest.mark.parametrize(("kind", "workers"), [("own", 2), ("global", 2), ("flat", 2), ("own", 1)])
def test_the_devices_of_a_worker_share_an_update(kind: str, workers: int) -> None:
    """It has the bits that one device has which adds their gradients up; each byte leaves a worker once."""
    reducers = 2 if workers > 1 else 0
    coordinator, settings = f"127.0.0.1:{free_port()}", {"JAXHETERO_SHARED_MEMORY": "0", "JAXHETERO_COMPRESS": "never"}
    for result in run("reducers_devices.py", kind, coordinator, workers=workers, reducers=reducers, **settings):
        assert all(result["equal"].values()), result["equal"]
        if workers == 1:
            continue
        for name, sent in result["sent"].items():
            part = 0.25 if "int8" in name else 1
            assert part <= sent < 1.1 * part, result["sent"]
        if kind == "own":
            assert "name all axes of the mesh" in result["refusals"]["unnamed"]
            assert "JAX has summed it already" in result["refusals"]["summed"]


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("twice", ["jaxhetero.ConfigError", "each one can be used once"]),
        ("replaced", ["jaxhetero.ConfigError", "another init() or push() have taken the place"]),
        ("rates", ["jaxhetero.MismatchError", "have other numbers for the step", "learning rate"]),
        ("wire", ["jaxhetero.MismatchError", "float32[40000] as int4 of", "float32[40000] as int8 of"]),
        ("lost", ["jaxhetero.ReducerLost", "start again from a checkpoint"]),
        ("lost on two devices", ["jaxhetero.ReducerLost", "start again from a checkpoint"]),
    ],
)
def test_mistakes_are_told(mistake: str, words: list[str]) -> None:
    with Cluster(2, 2, {"JAXHETERO_TIMEOUT_MS": "10000"}) as cluster:
        cluster.start_reducers()
        cluster.start_workers("reducers_mistakes.py", mistake)
        if mistake.startswith("lost"):
            cluster.wait_for_output("worker 0", "running")
            cluster.process("reducer 1").kill()
        for outcome in cluster.wait_workers():
            for word in words:
                assert word in outcome.exception_line


def test_numbers_take_a_byte_or_half_of_one() -> None:
    """And all that is done around an optimizer on reducers gives what it gives with gradients that are rounded so."""
    parts = {"int8": 0.25, "int4": 0.125, "float8_e4m3fn": 0.25}
    results = run("reducers_numbers.py", workers=2, reducers=2, JAXHETERO_SHARED_MEMORY="0", JAXHETERO_COMPRESS="never")
    for result in results:
        for wire_dtype, part in parts.items():
            assert all(result["equal"][wire_dtype].values()), (wire_dtype, result["equal"])
            assert part < result["sent"][wire_dtype] < 1.06 * part


def test_deaths_of_reducers_change_no_bit() -> None:
    """Of AdamW, and of LAMB with its sums over tensors; those that join get shares, and are killed as well."""
    arguments = ("adamw", "lamb", "adamw in int8")
    toll = run_job(2, strikes=4, workers=2, program="reducers_training.py", arguments=arguments, backed_up=True)
    assert toll.kills == 4
    assert toll.views >= 12
    assert toll.same_bits


def test_gradients_are_accumulated_and_their_scale_is_agreed_on() -> None:
    """The reducers update in the last of each two calls, unless a gradient was infinite; in the other, nothing is sent.

    The loss scale is found in the state, as with the optimizer on workers.
    """
    for result in run("reducers_accumulation.py", workers=2, reducers=2):
        ours, theirs = result["reducers"], result["workers"]
        assert ours["rounds"] == [False, True] * 4
        assert ours["moved"] == [False, True, False, False, False, True, False, True]
        assert (ours["scale"], ours["skipped"], ours["steps"]) == (512, 1, 3)
        for name, leaf in theirs.pop("weights").items():
            np.testing.assert_allclose(ours["weights"][name], leaf, rtol=1e-5, atol=1e-6)
        assert theirs == {key: ours[key] for key in theirs}


def test_a_bucket_waits_for_nothing_of_others(tmp_path: Path) -> None:
    """With a norm of each tensor, a bucket's update follows its measure, while other gradients are not there yet."""
    library = str(build_native.build(WAIT_SOURCE, tmp_path, jax.ffi.include_dir()))
    ready_s = [str(0.4 * (1 + bucket)) for bucket in range(6)]
    wanted = [f"bucket {bucket} {kind}" for bucket in range(6) for kind in ("measure", "update")]
    for rounds in run("reducers_overlap.py", library, "lamb", *ready_s, workers=2, reducers=2):
        assert rounds == wanted


@pytest.mark.usefixtures("alone")
def test_a_worker_alone_runs_the_optimizer_itself() -> None:
    """It gets rounded weights, keeps them in float32, and can give both memories to a step."""
    tx = optax.adamw(1e-2)
    optimizer = on_reducers(tx, weights_dtype=jnp.bfloat16)
    params = expected = jax.tree.map(jnp.asarray, weights())
    state, expected_state = jax.jit(optimizer.init)(params), tx.init(params)

    def step(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    donating = jax.jit(step, donate_argnums=(0, 1))
    params = jax.tree.map(jnp.copy, params)
    for number, gradients in enumerate(recorded(STEPS)):
        updates, expected_state = tx.update(gradients, expected_state, expected)
        expected = optax.apply_updates(expected, updates)
        params, state = donating(params, state, gradients)
        if number == 1:
            state = optimizer.push(*optimizer.pull(state))
    kept, opt_state = optimizer.pull(state)
    assert jax.tree.structure(opt_state) == jax.tree.structure(expected_state)
    for name, leaf in expected.items():
        np.testing.assert_allclose(kept[name], leaf, rtol=1e-5, atol=1e-7)
        np.testing.assert_array_equal(params[name], kept[name].astype(jnp.bfloat16).astype(jnp.float32))
