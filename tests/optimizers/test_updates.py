"""Optimizers as programs: the same bits as a transcription in NumPy, and what optax computes."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxhetero import _native, optimizers
from jaxhetero.errors import ConfigError
from jaxhetero.optimizers._programs import lower, program
from jaxhetero.optimizers._programs.program import Instruction, Opcode, Output, OutputType, Program
from tests.optimizers.optimizer_zoo import OPTIMIZERS, SCHEDULE, SIGNS, Tree, matrices, multi_steps, recorded, weights
from tests.optimizers.update_machine import Job, NativePasses, numpy_pass, tree_sum


def bits(job: Job) -> list[bytes]:
    return [array.tobytes() for leaf in (*job.states, job.weights, job.sent) for array in leaf]


def by_optax(tx: optax.GradientTransformation, params: Tree, gradients: list[Tree]) -> list[Any]:
    @jax.jit
    def step(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init)(params)
    for each in gradients:
        params, state = step(params, state, each)
    return [np.asarray(leaf).ravel() for leaf in jax.tree.leaves(params)]


def trained(tx: optax.GradientTransformation, steps: int) -> tuple[list[Any], list[Any]]:
    """Weights by programs and by optax; in the first steps, the native runner is held to NumPy."""
    params, gradients = weights(), recorded(steps)
    update = lower(tx, params, weights_dtype=jnp.bfloat16)
    state = tx.init(params)
    native, transcribed = Job(update, NativePasses(Random(0)), params, state), Job(update, numpy_pass, params, state)
    for number, each in enumerate(gradients):
        native.step(each)
        if number < 20:
            transcribed.step(each)
            assert bits(native) == bits(transcribed)
    return native.weights, by_optax(tx, params, gradients)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_hundred_steps_are_those_of_optax(name: str) -> None:
    for ours, theirs in zip(*trained(OPTIMIZERS[name], 100), strict=True):
        assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)


@pytest.mark.parametrize("name", SIGNS)
def test_of_optimizers_with_a_sign_few_elements_differ(name: str) -> None:
    ours, theirs = (np.concatenate(leaves) for leaves in trained(SIGNS[name], 100))
    assert np.mean(~np.isclose(ours, theirs, rtol=1e-5, atol=1e-6)) < 1e-3


def test_a_leaf_may_be_empty() -> None:
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.lamb(0.1))
    params = {"full": np.ones(5, np.float32), "empty": np.zeros((0, 3), np.float32)}
    job = Job(lower(tx, params), NativePasses(), params, tx.init(params))
    job.step(params)
    assert [leaf.size for leaf in job.weights] == [0, 5]
    (_, ours), (_, theirs) = job.weights, by_optax(tx, params, [params])
    assert np.allclose(ours, theirs, rtol=1e-6)


def test_a_step_whose_gradients_are_not_finite_is_skipped() -> None:
    """On all leaves, with the count and the loss scale that the workers keep."""
    tx = optimizers.dynamic_loss_scale(optax.adamw(SCHEDULE))
    params, gradients = weights(), recorded(20)
    gradients[4]["kernel"][3, 5] = np.inf
    gradients[11]["bias"][0] = np.nan
    update = lower(tx, params)
    job = Job(update, NativePasses(Random(2)), params, tx.init(params))
    for number, each in enumerate(gradients):
        before = bits(job)
        job.step(each)
        assert (bits(job) == before) == (number in {4, 11})
    for ours, theirs in zip(job.weights, by_optax(tx, params, gradients), strict=True):
        assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)


FUSED = {
    "sgd": OPTIMIZERS["sgd"],
    "momentum": OPTIMIZERS["momentum"],
    "nesterov": OPTIMIZERS["nesterov"],
    "adam": OPTIMIZERS["adam"],
    "adamw": OPTIMIZERS["adamw"],
    "lamb": optimizers.lamb(SCHEDULE, max_grad_norm=None, mask=lambda params: jax.tree.map(lambda _: True, params)),
    "lars": optimizers.lars(SCHEDULE, mask=lambda params: jax.tree.map(lambda _: True, params)),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_kernels_have_the_bits_of_the_interpreter(name: str) -> None:
    params, gradients = weights(), recorded(5)
    update = lower(FUSED[name], params)
    state = FUSED[name].init(params)
    machines = [
        NativePasses(),
        NativePasses(Random(1)),
        NativePasses(baseline=True),
        NativePasses(interpret=True),
        NativePasses(interpret=True, baseline=True),
    ]
    jobs = [Job(update, machine, params, state) for machine in machines]
    gradients[3]["bias"][:9] = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-40, 3e38]
    for each in gradients:
        for job in jobs:
            job.step(each)
        assert all(bits(job) == bits(jobs[0]) for job in jobs)
    passes = {update.programs[pass_.program] for leaf in update.leaves for pass_ in leaf.passes}
    kernels = {machines[0].kernels[each] for each in passes}
    assert all(kernel.split(",")[0] == name for kernel in kernels), kernels


def test_leaves_that_are_treated_alike_share_their_program() -> None:
    assert len(lower(OPTIMIZERS["adamw"], weights()).programs) == 1
    masked = lower(OPTIMIZERS["adamw, scheduled and masked"], weights())
    assert len({leaf.passes[-1].program for leaf in masked.leaves}) == 2


def test_workers_keep_counts_and_reducers_keep_moments() -> None:
    tx = OPTIMIZERS["adamw, accumulated"]
    params = weights()
    states = jax.tree.leaves(tx.init(params))
    update = lower(tx, params)
    assert {states[i].dtype for i in update.worker_states} == {np.dtype(np.int32)}
    assert all(len(leaf.states) == 3 for leaf in update.leaves)  # two moments, and what is accumulated
    for number, leaf in enumerate(update.leaves):
        assert {states[i].shape for i in leaf.states} == {jax.tree.leaves(params)[number].shape}


def test_lamb_needs_one_pass_before_the_last() -> None:
    """``optax.safe_norm`` takes a second norm, of what it selects by the first."""
    assert {len(leaf.passes) for leaf in lower(optax.lamb(0.1), weights()).leaves} == {2}
    clipped = lower(optimizers.lamb(0.1), weights())
    assert [len(leaf.passes) for leaf in clipped.leaves] == [2, 3, 2, 2]


def norms(tree: Tree) -> jax.Array:
    return jnp.stack([jnp.linalg.norm(leaf) for leaf in jax.tree.leaves(tree)])


def divided(number: Callable[[jax.Array], Any]) -> optax.GradientTransformation:
    """By a number that comes from the norms of all leaves."""
    return optax.chain(
        optax.stateless(lambda updates, _: jax.tree.map(lambda leaf: leaf / (1 + number(norms(updates))), updates)),
        optax.sgd(0.1),
    )


def outer(left: jax.Array, right: jax.Array) -> jax.Array:
    return left[:, None] * right[None]


OF_SUMS: dict[str, Callable[[jax.Array], Any]] = {
    "their norm": jnp.linalg.norm,
    "their mean": jnp.mean,
    "their variance": jnp.var,
    "the largest": jnp.max,
    "one of them": lambda found: found[1],
    "some of them": lambda found: jnp.sum(found[1:3]),
    "a scalar product": lambda found: jnp.dot(found, found[::-1]),
    "all products": lambda found: jnp.sum(outer(found, found) * jnp.arange(4.0)),
    "some more numbers": lambda found: jnp.prod(jnp.concatenate([found, jnp.full(2, 0.5)])),
    "whether all are small": lambda found: jnp.where(jnp.all(found < 9), 1.0, 2.0),
}


@pytest.mark.parametrize("name", OF_SUMS)
def test_numbers_from_several_sums_are_those_of_optax(name: str) -> None:
    for ours, theirs in zip(*trained(divided(OF_SUMS[name]), 4), strict=True):
        assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)


def test_sums_over_sums_over_sums() -> None:
    """Each leaf is divided by what comes from the norms of all leaves, three times over."""
    link = optax.stateless(lambda updates, _: jax.tree.map(lambda g: g / jnp.linalg.norm(norms(updates)), updates))
    for ours, theirs in zip(*trained(optax.chain(link, link, link, optax.adam(0.1)), 4), strict=True):
        assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)


def test_apply_if_finite_gives_up_when_optax_does() -> None:
    tx = optax.apply_if_finite(optax.adam(0.1), 2)
    params, gradients = weights(), recorded(9)
    for number in (1, 3, 4, 5, 7):
        gradients[number]["bias"][number] = np.nan
    job = Job(lower(tx, params), NativePasses(Random(3)), params, tx.init(params))
    for number, each in enumerate(gradients):
        job.step(each)
        for ours, theirs in zip(job.weights, by_optax(tx, params, gradients[: number + 1]), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def rows(tx_or_function: Any) -> optax.GradientTransformation:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(tx_or_function, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def accumulated_if_finite() -> optax.GradientTransformation:
    steps = optax.MultiSteps(optax.sgd(0.1), 2, should_skip_update_fn=optax.skip_not_finite)
    return steps.gradient_transformation()


REFUSED: dict[str, tuple[Callable[[], optax.GradientTransformation], str]] = {
    "noise": (lambda: optax.add_noise(0.1, 0.5, jax.random.key(0)), r"add_noise .* uses an array that mul makes"),
    "a primitive": (lambda: rows(jnp.tanh), r"rows \(test_updates.py:rows.* calls tanh, which no program can do"),
    "a sum over an axis": (lambda: rows(lambda g: g - g.mean(-1, keepdims=True)), "reduce_sum over some axes"),
    "whole numbers from sums": (
        lambda: optax.MultiSteps(
            optax.sgd(0.1), 2, should_skip_update_fn=optax.skip_not_finite
        ).gradient_transformation(),
        "skip_not_finite calls .* and computes with int32",
    ),
    "a loop": (lambda: rows(lambda g: jax.lax.fori_loop(0, 3, lambda _, x: x * x, g)), "calls (scan|while)"),
    "a transposed leaf": (lambda: rows(lambda g: g + g.T), "calls transpose"),
    "an outer product": (lambda: rows(lambda g: g * jnp.sum(outer(g[0], g[0]))), "calls (slice|squeeze)"),
    "a product with itself": (
        lambda: rows(lambda g: g / jnp.sum(outer(g.ravel(), g.ravel()))),
        r"rows .* calls reshape",
    ),
    "another order": (lambda: rows(lambda g: jax.lax.reshape(g, (4, 4), dimensions=(1, 0))), r"rows .* calls reshape"),
    "a sort of norms": (lambda: divided(lambda found: jnp.sort(found)[0]), "calls sort, which no program can do"),
    "an extra argument": (optax.contrib.reduce_on_plateau, "missing 1 required keyword-only argument: 'value'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_lowered_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        lower(make(), {"w": np.zeros((4, 4), np.float32)})


def test_a_refusal_names_the_caller_and_not_who_called_a_jitted_function_first() -> None:
    @jax.jit
    def shared(leaf: jax.Array) -> jax.Array:
        return jnp.tanh(leaf)

    def first(leaf: jax.Array) -> jax.Array:
        return shared(leaf)

    def second(leaf: jax.Array) -> jax.Array:
        return shared(leaf)

    jax.eval_shape(first, jax.ShapeDtypeStruct((4, 4), jnp.float32))
    with pytest.raises(ConfigError, match=r"<locals>.second\) calls tanh"):
        lower(rows(second), {"w": np.zeros((4, 4), np.float32)})


def test_parameters_are_float32() -> None:
    with pytest.raises(ConfigError, match=r"params\['w'\] is bfloat16"):
        lower(optax.sgd(0.1), {"w": jnp.zeros(3, jnp.bfloat16)})
    with pytest.raises(ConfigError, match="weights_dtype is float16"):
        lower(optax.sgd(0.1), {"w": jnp.zeros(3)}, weights_dtype=jnp.float16)


def test_leaves_do_not_meet() -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return {"a": updates["a"] + updates["b"], "b": updates["b"]}, state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    with pytest.raises(ConfigError, match="combines elements of several tensors"):
        lower(tx, {"a": np.zeros(3, np.float32), "b": np.zeros(3, np.float32)})


LINKS = st.sampled_from(
    [
        optax.scale(0.5),
        optax.scale_by_adam(),
        optax.scale_by_adam(nesterov=True),
        optax.scale_by_rms(),
        optax.scale_by_rss(),
        optax.scale_by_stddev(),
        optax.scale_by_lion(),
        optax.scale_by_sign(),
        optax.scale_by_trust_ratio(),
        optax.scale_by_param_block_norm(),
        optax.scale_by_param_block_rms(),
        optax.scale_by_schedule(SCHEDULE),
        optax.add_decayed_weights(0.01),
        optax.masked(optax.add_decayed_weights(0.01), matrices),
        optax.masked(optax.scale_by_belief(), matrices),
        optax.clip(0.1),
        optax.clip_by_block_rms(0.1),
        optax.clip_by_global_norm(0.1),
        optax.trace(0.9),
        optax.trace(0.9, nesterov=True),
        optax.ema(0.9),
        optax.keep_params_nonnegative(),
        optax.normalize_by_update_norm(),
    ]
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(st.lists(LINKS, min_size=1, max_size=5), st.booleans(), st.randoms(use_true_random=False))
def test_any_chain_has_the_bits_of_numpy(links: list[Any], accumulated: bool, random: Random) -> None:
    tx = optax.chain(*links, optax.scale(-0.01))
    tx = multi_steps(tx) if accumulated else tx
    params = {"a": np.linspace(-1, 1, 5001, dtype=np.float32).reshape(3, -1), "b": np.full(7, -0.5, np.float32)}
    update = lower(tx, params)
    native, transcribed = (
        Job(update, passes, params, tx.init(params)) for passes in (NativePasses(random), numpy_pass)
    )
    noise = np.random.default_rng(3)
    for _ in range(4):
        gradients = {name: noise.normal(size=leaf.shape).astype(np.float32) for name, leaf in params.items()}
        native.step(gradients)
        transcribed.step(gradients)
        assert bits(native) == bits(transcribed)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(1, 20_000), st.randoms(use_true_random=False))
def test_a_sum_has_the_same_bits_for_any_pieces(count: int, random: Random) -> None:
    values = np.random.default_rng(count).normal(size=count).astype(np.float32) ** 9
    copy = Program(1, 0, 1, (Instruction(Opcode.COPY, 1, (0,)),), (1,), ())
    _, (total,) = NativePasses(random)(copy, [values], np.zeros(0, np.float32), count)
    assert total.tobytes() == tree_sum(values).tobytes()


def good() -> Program:
    return Program(1, 1, 1, (Instruction(Opcode.ADD, 2, (0, 1)),), (2,), (Output(2, OutputType.F32),))


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "cut": good().encode()[:-1],
    "more": good().encode() + b"\0",
    "an unknown operation": good().encode().replace(bytes([Opcode.ADD, 2, 0, 0, 0]), bytes([99, 2, 0, 0, 0])),
    "a slot that is not there": Program(1, 1, 1, (Instruction(Opcode.ADD, 2, (0, 3)),), (), ()).encode(),
    "a result over an input": Program(1, 1, 1, (Instruction(Opcode.ADD, 0, (0, 1)),), (), ()).encode(),
    "a temporary without a value": Program(1, 1, 2, (Instruction(Opcode.ADD, 2, (0, 3)),), (), ()).encode(),
    "an output without a value": Program(1, 1, 1, (), (), (Output(2, OutputType.F32),)).encode(),
    "an input as an output": Program(1, 1, 0, (), (), (Output(0, OutputType.F32),)).encode(),
    "too many temporaries": Program(1, 1, 60_000, (), (), ()).encode(),
}


def of_size(inputs: int = 0, scalars: int = 1, temporaries: int = 1, steps: int = 1, results: int = 0) -> Program:
    first = inputs + scalars
    instructions = (Instruction(Opcode.COPY, first, (0,)),) * steps
    outputs = (Output(first, OutputType.F32),) * results
    return Program(inputs, scalars, temporaries, instructions, (first,) * results, outputs)


LIMITS = {
    "inputs": program.MOST_INPUTS,
    "scalars": program.MOST_SCALARS,
    "temporaries": program.MOST_TEMPORARIES,
    "steps": program.MOST_INSTRUCTIONS,
    "results": program.MOST_RESULTS,
}


@pytest.mark.parametrize("what", LIMITS)
def test_reducers_take_programs_up_to_the_limits_and_no_larger(what: str) -> None:
    for size, is_small in ((LIMITS[what], True), (LIMITS[what] + 1, False)):
        sized = of_size(**{what: size})
        assert sized.is_small == is_small
        assert (_native.load_program(sized.encode())[0][0] == "ok") == is_small


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_is_refused(name: str) -> None:
    status, runner = _native.load_program(HOSTILE[name])
    assert status[0] == "ProtocolError"
    assert status[1].startswith("malformed program")
    assert runner is None


def test_a_run_checks_the_sizes_of_what_it_is_given() -> None:
    _, runner = _native.load_program(good().encode())
    assert runner is not None
    three, none = np.zeros(3, np.float32), np.zeros(0, np.float32)
    assert runner.run([three], three[:1], [three.copy()], 0)[0][0] == "ok"
    for inputs, scalars, outputs in [
        ([], three[:1], [three]),
        ([three], none, [three]),
        ([three], three[:1], []),
        ([three], three[:1], [three[:2].copy()]),
        ([three, three], three[:1], [three]),
    ]:
        assert runner.run(inputs, scalars, outputs, 0)[0][0] == "InternalError"


def test_pieces_must_hold_every_element_once() -> None:
    whole = (0, 3, 1.0)
    assert _native.sum_of_tensor([whole], 8) == (("ok", ""), 1.0)
    assert _native.sum_of_tensor([], 0) == (("ok", ""), 0.0)
    for subtrees, count in [([], 8), ([whole], 9), ([whole, whole], 16), ([whole], 7), ([(4, 3, 1.0)], 12)]:
        assert _native.sum_of_tensor(subtrees, count)[0][0] == "ProtocolError"
