"""The optax side: LAMB and LARS against NumPy, accumulation and loss scaling, 2 workers."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxhetero
from jaxhetero import optimizers
from jaxhetero.errors import ConfigError
from tests.support.cluster import run

Tree = dict[str, Any]
Mask = Callable[[str, np.ndarray], bool]

STEPS = 6


def parameters() -> Tree:
    """Flat, so that the transcriptions need no trees. "zero" is a kernel that starts at 0, "idle" has no gradient."""
    generator = np.random.default_rng(0)
    shapes = {"kernel": (5, 4), "conv": (3, 3, 2, 4), "zero": (4, 3), "idle": (2, 2), "bias": (4,), "scale": (4,)}
    params = {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    params["zero"][...] = 0
    return params


def gradients(step: int) -> Tree:
    """Of norms above and below 1, with some so small that the epsilons count."""
    generator = np.random.default_rng(1 + step)
    size = [0.01, 2.0, 0.1][step % 3]
    grads = {name: size * generator.normal(size=leaf.shape).astype(np.float32) for name, leaf in parameters().items()}
    grads["conv"] *= 1e-5
    grads["idle"][...] = 0
    return grads


def train(optimizer: optax.GradientTransformation, dtype: str = "float32") -> list[Tree]:
    """The parameters after each step."""
    with jax.enable_x64(dtype == "float64"):
        update, history = jax.jit(optimizer.update), []
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), parameters())
        state = optimizer.init(params)
        for step in range(STEPS):
            grads = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), gradients(step))
            updates, state = update(grads, state, params)
            params = optax.apply_updates(params, updates)
            history.append(params)
        return history


def matrices(_: str, leaf: np.ndarray) -> bool:
    return leaf.ndim > 1


def kernel_and_bias(name: str, _: np.ndarray) -> bool:
    return name in ("kernel", "bias")


def as_tree(mask: Mask, params: Tree) -> Tree:
    return {name: mask(name, leaf) for name, leaf in params.items()}


def decaying(step: int) -> float:
    return 0.2 / (1 + step)


def numpy_lamb(
    rate: Callable[[int], float],
    mask: Mask = matrices,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    max_grad_norm: float | None = 1.0,
) -> Iterator[Tree]:
    """Algorithm 2 of You et al. (2020) as the reference implementations have it, in float64."""
    params = {name: leaf.astype(np.float64) for name, leaf in parameters().items()}
    m = {name: np.zeros_like(leaf) for name, leaf in params.items()}
    v = {name: np.zeros_like(leaf) for name, leaf in params.items()}
    for t in range(1, STEPS + 1):
        grads = {name: leaf.astype(np.float64) for name, leaf in gradients(t - 1).items()}
        norm = np.sqrt(sum(np.sum(leaf**2) for leaf in grads.values()))
        clip = 1.0 if max_grad_norm is None else max(1.0, norm / max_grad_norm)
        for name, w in params.items():
            g = grads[name] / clip
            m[name] = b1 * m[name] + (1 - b1) * g
            v[name] = b2 * v[name] + (1 - b2) * g**2
            u = (m[name] / (1 - b1**t)) / (np.sqrt(v[name] / (1 - b2**t)) + eps)
            ratio = 1.0
            if mask(name, w):
                u = u + weight_decay * w
                w_norm, u_norm = np.sqrt(np.sum(w**2)), np.sqrt(np.sum(u**2))
                ratio = w_norm / u_norm if w_norm > 0 and u_norm > 0 else 1.0
            params[name] = w - rate(t - 1) * ratio * u
        yield params


def numpy_lars(
    rate: Callable[[int], float],
    mask: Mask = matrices,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    trust_coefficient: float = 0.001,
    eps: float = 0.0,
    nesterov: bool = False,
) -> Iterator[Tree]:
    """MLPerf's LARSOptimizer, in float64."""
    params = {name: leaf.astype(np.float64) for name, leaf in parameters().items()}
    velocity = {name: np.zeros_like(leaf) for name, leaf in params.items()}
    for step in range(STEPS):
        for name, w in params.items():
            g = gradients(step)[name].astype(np.float64)
            scaled_rate = rate(step)
            if mask(name, w):
                w_norm, g_norm = np.sqrt(np.sum(w**2)), np.sqrt(np.sum(g**2))
                if w_norm > 0 and g_norm > 0:
                    scaled_rate *= trust_coefficient * w_norm / (g_norm + weight_decay * w_norm + eps)
                g = g + weight_decay * w
            velocity[name] = momentum * velocity[name] - scaled_rate * g
            params[name] = w + (momentum * velocity[name] - scaled_rate * g if nesterov else velocity[name])
        yield params


def check(ours: list[Tree], reference: Iterator[Tree], tolerance: float) -> None:
    for got, expected in zip(ours, reference, strict=True):
        for name in expected:
            np.testing.assert_allclose(got[name], expected[name], rtol=tolerance, atol=tolerance, err_msg=name)


# In float64, where nothing but the same formula passes.
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_grad_norm": None},
        {"max_grad_norm": 0.05},
        {"b1": 0.5, "b2": 0.7, "weight_decay": 0.5},
        {"eps": 0.1, "weight_decay": 0.0},
    ],
    ids=str,
)
def test_lamb_is_the_reference(settings: dict[str, Any]) -> None:
    ours = train(optimizers.lamb(0.1, **settings), "float64")
    check(ours, numpy_lamb(lambda _: 0.1, **settings), 1e-10)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weight_decay": 0.3, "momentum": 0.5},
        {"eps": 0.5, "trust_coefficient": 0.1},
        {"nesterov": True, "weight_decay": 0.0},
    ],
    ids=str,
)
def test_lars_is_the_reference(settings: dict[str, Any]) -> None:
    ours = train(optimizers.lars(2.0, **settings), "float64")
    check(ours, numpy_lars(lambda _: 2.0, **settings), 1e-10)


@pytest.mark.parametrize(("ours", "reference"), [(optimizers.lamb, numpy_lamb), (optimizers.lars, numpy_lars)])
def test_float32_is_close_to_the_reference(ours: Any, reference: Any) -> None:
    # Adam's 1 - 0.999**t is off by 1e-5 of itself; the rate makes that less than the tolerance.
    check(train(ours(0.01)), reference(lambda _: 0.01), 1e-6)


@pytest.mark.parametrize(("ours", "reference"), [(optimizers.lamb, numpy_lamb), (optimizers.lars, numpy_lars)])
@pytest.mark.parametrize("form", ["tree", "function"])
def test_a_mask_says_which_leaves_are_adapted(ours: Any, reference: Any, form: str) -> None:
    def function(params: Tree) -> Tree:
        return as_tree(kernel_and_bias, params)

    mask = function if form == "function" else function(parameters())
    decay = {"weight_decay": 0.1}
    got = train(ours(decaying, mask=mask, **decay), "float64")
    # Schedules of optax are computed in float32.
    check(got, reference(decaying, mask=kernel_and_bias, **decay), 1e-6)


def test_lars_needs_the_parameters() -> None:
    optimizer = optimizers.lars(0.1)
    with pytest.raises(ValueError, match="lars: give the parameters"):
        optimizer.update(gradients(0), optimizer.init(parameters()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optimizers.accumulate_gradients(optax.sgd(1.0), 0), "every is 0"),
        (lambda: optimizers.static_loss_scale(optax.sgd(1.0), 0.0), r"loss scale is 0\.0"),
        (lambda: optimizers.dynamic_loss_scale(optax.sgd(1.0), growth_interval=0), "growth_interval is 0"),
        (lambda: optimizers.scale_loss(jnp.ones(()), optax.sgd(1.0).init(jnp.ones(2))), "opt_state has no loss scale"),
    ],
)
def test_what_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def apply_all(optimizer: optax.GradientTransformation, sequence: list[Any], **extra: Any) -> tuple[list[Any], Any]:
    """Every update of one parameter of the gradients' dtype, and the last state."""
    params = jnp.zeros_like(sequence[0])
    update, state, outputs = jax.jit(optimizer.update), optimizer.init(params), []
    for gradient in sequence:
        updates, state = update(gradient, state, params, **extra)
        outputs.append(updates)
    return outputs, state


def test_accumulation_passes_the_mean_on() -> None:
    optimizer = optimizers.accumulate_gradients(optax.sgd(lambda step: 1.0 + step), every=3)
    outputs, state = apply_all(optimizer, [jnp.float32(value) for value in (1, 2, 6, 10, 10, 40, 7)])
    # The schedule counts accumulated steps, not calls.
    np.testing.assert_allclose(outputs, [0, 0, -3, 0, 0, -40, 0], rtol=1e-6)
    assert (int(state.micro_step), float(state.mean)) == (1, 7.0)


def test_accumulating_one_is_the_optimizer_itself() -> None:
    plain = train(optimizers.lamb(0.1))
    accumulated = train(optimizers.accumulate_gradients(optimizers.lamb(0.1), 1))
    jax.tree.map(lambda *leaves: np.testing.assert_allclose(*leaves, rtol=1e-6, atol=1e-7), plain, accumulated)


def test_a_nan_is_gone_with_its_accumulated_step() -> None:
    optimizer = optimizers.accumulate_gradients(optax.sgd(1.0), every=2)
    outputs, _ = apply_all(optimizer, [jnp.float32(value) for value in (np.nan, 1, 2, 4)])
    np.testing.assert_array_equal(outputs, [0, np.nan, 0, -3])


def test_float16_is_accumulated_in_float32_and_passed_on_as_it_came() -> None:
    seen = []

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        seen.append(updates.dtype)
        return updates.astype(jnp.float32), state

    inner = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    # In float16 the sum would be infinite.
    sequence = [jnp.float16(value) for value in (60000, 60000, 60000, 60000)]
    outputs, state = apply_all(optimizers.accumulate_gradients(inner, every=4), sequence)
    assert set(seen) == {jnp.dtype("float16")}
    assert state.mean.dtype == outputs[-1].dtype == jnp.float32
    np.testing.assert_array_equal(outputs, [0, 0, 0, np.float16(60000)])


def test_extra_arguments_reach_the_optimizer_inside() -> None:
    def update(updates: Any, state: Any, params: Any = None, *, factor: Any, **_: Any) -> Any:
        return updates * factor, state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    optimizer = optimizers.accumulate_gradients(optimizers.static_loss_scale(inner, 1.0), every=1)
    assert float(apply_all(optimizer, [jnp.float32(2)], factor=5.0)[0][0]) == 10.0


def scales(optimizer: optax.GradientTransformation, finite: str) -> list[float]:
    """The scale after each step; "x" is a step with a gradient that is not finite."""
    update, state, result = jax.jit(optimizer.update), optimizer.init(jnp.ones(2)), []
    for mark in finite:
        _, state = update(jnp.array([1.0, jnp.inf if mark == "x" else 1.0]), state)
        result.append(float(state.loss_scale))
    return result


@pytest.mark.parametrize(
    ("settings", "finite", "expected"),
    [
        ({"growth_interval": 3}, "......", [8, 8, 16, 16, 16, 32]),
        ({"growth_interval": 3}, "..x...", [8, 8, 4, 4, 4, 8]),
        ({"growth_interval": 1}, ".x.", [16, 8, 16]),
        ({"growth_interval": 9, "min_scale": 3.0}, "xxx", [4, 3, 3]),
        ({"growth_interval": 1, "max_scale": 20.0}, "...", [16, 20, 20]),
        ({"growth_interval": 1, "growth_factor": 4.0, "backoff_factor": 0.25}, ".xx", [32, 8, 2]),
    ],
)
def test_the_dynamic_scale_grows_and_halves(settings: dict[str, Any], finite: str, expected: list[float]) -> None:
    assert scales(optimizers.dynamic_loss_scale(optax.sgd(1.0), 8.0, **settings), finite) == expected


def test_the_static_scale_stays() -> None:
    assert scales(optimizers.static_loss_scale(optax.sgd(1.0)), "..x.") == [1024.0] * 4


@pytest.mark.parametrize("wrap", [optimizers.static_loss_scale, optimizers.dynamic_loss_scale])
def test_state_of_a_loss_scale_may_be_donated(wrap: Callable[..., optax.GradientTransformation]) -> None:
    state = wrap(optax.sgd(0.1), 8.0).init({"w": jnp.ones(3)})
    jax.block_until_ready(jax.jit(lambda state: state, donate_argnums=0)(state))


@pytest.mark.parametrize("wrap", [optimizers.static_loss_scale, optimizers.dynamic_loss_scale])
@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
def test_an_overflow_is_a_step_that_never_was(wrap: Any, bad: float) -> None:
    optimizer = wrap(optax.adam(0.1), 4.0)
    good = [jnp.array([4.0, 8.0]), jnp.array([1.0, -3.0])]
    outputs, state = apply_all(optimizer, [good[0], jnp.array([1.0, bad]), good[1]])
    np.testing.assert_array_equal(outputs[1], [0, 0])
    assert (int(state.skipped_count), int(state.good_count)) == (1, 1)
    if wrap is optimizers.static_loss_scale:
        expected, plain = apply_all(optax.adam(0.1), [gradient / 4 for gradient in good])
        np.testing.assert_array_equal([outputs[0], outputs[2]], expected)
        jax.tree.map(np.testing.assert_array_equal, state.inner_state, plain)


@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
def test_scaling_rescues_gradients_that_float16_loses(loss_scale: float) -> None:
    """A gradient of 2**-26 through a float16 product: 0 without a scale, with one what float32 gives."""
    optimizer = optax.chain(optax.identity(), optimizers.static_loss_scale(optax.sgd(1.0), loss_scale))
    params = jnp.float32(1.0)
    state = optimizer.init(params)

    def loss(params: jax.Array) -> jax.Array:
        product = params.astype(jnp.float16) * jnp.float16(1.0)
        return optimizers.scale_loss(product.astype(jnp.float32) * 2.0**-26, state)

    updates, _ = optimizer.update(jax.grad(loss)(params), state, params)
    assert float(updates) == (0.0 if loss_scale == 1.0 else -(2.0**-26))


def test_float16_gradients_are_unscaled_in_float32() -> None:
    outputs, _ = apply_all(optimizers.static_loss_scale(optax.sgd(1.0), 2.0**15), [jnp.float16(2.0**-14)])
    assert outputs[0].dtype == jnp.float32
    assert float(outputs[0]) == -(2.0**-29)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("check_vma", [True, False])
def test_the_whole_chain_under_shard_map(check_vma: bool) -> None:
    """Only what is accumulated varies over the workers, and the types under ``check_vma=True`` agree."""
    mesh = jax.make_mesh((1,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,))
    reduced = optax.chain(jaxhetero.all_reduce_gradients("workers"), optimizers.dynamic_loss_scale(optax.sgd(1.0), 1.0))
    optimizer = optimizers.accumulate_gradients(reduced, every=2)
    params = jnp.zeros(2)
    state = optimizer.init(params)
    everywhere, own = jax.P(), jax.P("workers")
    spec = jax.tree.map(lambda _: everywhere, state)._replace(mean=own)
    update = jax.shard_map(
        optimizer.update,
        mesh=mesh,
        in_specs=(own, spec, everywhere),
        out_specs=(everywhere, spec),
        check_vma=check_vma,
    )
    for gradient, expected in [([1.0, 2.0], [0, 0]), ([3.0, 4.0], [-2, -3])]:
        updates, state = jax.jit(update)(jnp.asarray(gradient), state, params)
        np.testing.assert_array_equal(updates, expected)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_that_jax_has_summed_already_are_refused(check_vma: bool) -> None:
    """Their mean over the devices would be n times too large; without types nobody sums them, and all is well."""
    reduction = jaxhetero.all_reduce_gradients("workers")

    def step(params: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        gradients = jax.grad(lambda params: jnp.sum(jnp.sin(params["w"] * x)))(params)
        return reduction.update(gradients, optax.EmptyState())[0]

    mesh = jax.sharding.AbstractMesh((2,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = jax.P(), jax.P("workers")
    sharded = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=jax.P(), check_vma=check_vma)
    if not check_vma:
        jax.eval_shape(sharded, {"w": jnp.ones(2)}, jnp.ones(4))
        return
    with pytest.raises(
        jaxhetero.errors.ConfigError,
        match=r"all_reduce_gradients: the float32\[2\] at \['w'\] does not vary over mesh axis 'workers'.*summed it",
    ):
        jax.eval_shape(sharded, {"w": jnp.ones(2)}, jnp.ones(4))


def test_two_workers_reduce_once_per_accumulated_step_and_skip_together() -> None:
    results = run("optimizers.py", workers=2, reducers=1)
    for result in results:
        assert result["failed"] == []
        # One bucket, in every third of seven calls.
        assert result["rounds"] == [0, 0, 1, 0, 0, 1, 0]
        # Only rank 1 meets the infinity, in the second call, and the NaN, in the fifth.
        assert result["scales"] == [8, 4, 4, 8, 4, 4]
        assert result["skipped"] == 2
    assert results[0]["digests"] == results[1]["digests"]


# --- compression -----------------------------------------------------------------------------------------------------


def descend(*transformations: optax.GradientTransformation) -> float:
    """How far from the optimum gradient descent ends, where gradients are small beside another one of their size."""
    target = jnp.float32(1.0)
    optimizer = optax.chain(*transformations, optax.sgd(1.0))
    params = jnp.float32(0)
    state = optimizer.init(params)
    noise = np.random.default_rng(0).choice([-1.0, 1.0], 2000).astype(np.float32)

    @jax.jit
    def step(params: jax.Array, state: Any, noise: jax.Array) -> Any:
        # A large part that cancels over the steps, and a small one that leads to the target.
        updates, state = optimizer.update(0.002 * (params - target) + noise, state, params)
        return optax.apply_updates(params, updates), state

    for sign in np.concatenate([noise, -noise]):
        params, state = step(params, state, sign)
    return float(abs(params - target))


def rounding() -> optax.GradientTransformation:
    """What ``wire_dtype=jnp.bfloat16`` does to one worker's gradients."""
    return optax.stateless(lambda updates, _: jax.lax.reduce_precision(updates, 8, 7))


def test_error_feedback_beats_plain_rounding() -> None:
    plain, fed_back = descend(rounding()), descend(optimizers.error_feedback(jnp.bfloat16), rounding())
    exact = descend()
    assert abs(fed_back - exact) < 0.01
    assert abs(plain - exact) > 10 * abs(fed_back - exact)


def test_error_feedback_sends_everything_in_the_end() -> None:
    """What was sent and what is left are what was given; other dtypes and infinities pass."""
    feedback = optimizers.error_feedback(jnp.float16)
    grads = {"wide": jnp.float32([1 / 3, 1e-9, 1e6]), "half": jnp.bfloat16([1 / 3]), "count": jnp.int32([7])}
    sent, state = jax.jit(feedback.update)(grads, feedback.init(grads))
    np.testing.assert_array_equal(sent["wide"][:2] + state.residual["wide"][:2], grads["wide"][:2])
    np.testing.assert_array_equal(sent["wide"], sent["wide"].astype(jnp.float16).astype(jnp.float32))
    assert np.isinf(sent["wide"][2])
    assert state.residual["wide"][2] == 0
    for name in ("half", "count"):
        np.testing.assert_array_equal(sent[name], grads[name])
        np.testing.assert_array_equal(state.residual[name], 0 * grads[name])
