"""Parameters that are stacked over a scan, all stages on one worker: each stage has the rows of its part alone."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import jaxhetero
from jaxhetero.errors import ConfigError
from jaxhetero.pipeline import Rows
from jaxhetero.pipeline.graph import Value
from jaxhetero.pipeline.rows import Holding
from jaxhetero.pipeline.stacked import Span
from tests.pipeline.pipeline_zoo import MICROBATCHES, Model, errors, reference

pytestmark = pytest.mark.usefixtures("alone")

LAYERS, WIDTH = 12, 8
PARAMS = {
    "kernel": 0.3 * jax.random.normal(jax.random.key(1), (LAYERS, WIDTH, WIDTH)),
    "bias": jax.random.normal(jax.random.key(2), (LAYERS, WIDTH)),
}
X = jax.random.normal(jax.random.key(3), (4 * MICROBATCHES, WIDTH))
# Rounding of the gradients of bfloat16 copies.
BF16_ERROR = 2e-2


def layer(x: Any, params: Any) -> tuple[Any, Any]:
    x = x + jnp.tanh(x @ params["kernel"] + params["bias"])
    return x, jnp.sum(x)


def run(params: Any, x: Any, **options: Any) -> Any:
    return jnp.mean(jnp.square(jax.lax.scan(layer, x, params, **options)[0]))


def with_the_results_of_each_layer(params: Any, x: Any) -> Any:
    x, sums = jax.lax.scan(layer, x, params)
    return jnp.mean(x) + jnp.mean(sums)


def in_bfloat16(params: Any, x: Any) -> Any:
    return run(*jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, x))).astype(jnp.float32)


def with_a_copy_in_float64(params: Any, x: Any) -> Any:
    """Each of two scans has another copy of the parameters."""
    return run(params, x) + run(jax.tree.map(lambda leaf: leaf.astype(jnp.float16), params), x.astype(jnp.float16))


def twice(params: Any, x: Any) -> Any:
    x, _ = jax.lax.scan(layer, x, params)
    return run(params, x)


def two_orders(params: Any, x: Any) -> Any:
    x, _ = jax.lax.scan(layer, x, params, reverse=True)
    return run(params, x)


def reported(loss: Callable[..., Any], stages: int) -> tuple[list[int], float]:
    """The parameters of each stage, and how far the gradients are from those of ``jax.grad``."""
    model = Model(loss, PARAMS, (X,))
    grad_fn = jaxhetero.pipeline.value_and_grad(
        loss, stages=1, microbatches=MICROBATCHES, schedule="breadth_first", stages_per_worker=stages
    )
    report = grad_fn.cut(PARAMS, X)
    _, wanted = reference(model, PARAMS, (X,))
    _, grads = grad_fn(PARAMS, X)
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, PARAMS)
    return [stage.parameter_count for stage in report.stages], max(errors(grads, wanted))


@pytest.mark.parametrize(
    ("loss", "most"),
    [
        (run, 2e-6),
        (lambda params, x: run(params, x, reverse=True), 2e-6),
        (lambda params, x: run(params, x, unroll=2), 2e-6),
        (with_the_results_of_each_layer, 2e-6),
        (in_bfloat16, BF16_ERROR),
        (lambda params, x: jax.jit(in_bfloat16)(params, x), BF16_ERROR),
    ],
)
def test_each_stage_has_its_rows_alone(loss: Callable[..., Any], most: float) -> None:
    counts, error = reported(loss, 3)
    assert counts == [LAYERS // 3 * (WIDTH + 1) * WIDTH] * 3
    assert error < most


@pytest.mark.parametrize("loss", [twice, two_orders])
def test_rows_that_several_stages_use(loss: Callable[..., Any]) -> None:
    """As tied weights, each of them holds them, and their gradients are added."""
    counts, error = reported(loss, 2)
    assert counts == [LAYERS * (WIDTH + 1) * WIDTH] * 2, "each stage is one of the scans"
    assert error < 2e-6


def test_two_copies_of_the_rows() -> None:
    _, error = reported(with_a_copy_in_float64, 3)
    assert error < BF16_ERROR


@pytest.mark.parametrize(
    "also",
    [
        lambda params, x: 1e-3 * jnp.sum(jnp.square(params["kernel"])),
        lambda params, x: jnp.mean(x @ params["kernel"][1:3]),
        lambda params, x: jnp.mean(params["kernel"].astype(jnp.bfloat16)).astype(jnp.float32),
    ],
)
def test_a_leaf_that_is_used_in_another_way_too_stays_whole(also: Callable[..., Any]) -> None:
    counts, error = reported(lambda params, x: run(params, x) + also(params, x), 3)
    biases = LAYERS * WIDTH
    assert sum(counts) == biases + 3 * LAYERS * WIDTH * WIDTH
    assert error < 2e-6


def holding(*params: int) -> Holding:
    """Of a leaf of eight rows that is four parameters, and of a leaf that is one."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 3), (5,), *[(2, 3)] * 4)]
    spans = {2 + part: Span(0, 2 * part, 2 * part + 2) for part in range(4)}
    return Holding([Value(jax.typeof(jnp.zeros(shape.shape))) for shape in shapes], spans, params)


LEAF = np.arange(24, dtype=np.float32).reshape(8, 3)


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
def test_what_is_taken_apart_is_put_together(make: Callable[..., Any]) -> None:
    held = holding(5, 2, 3)
    rows = held.take(0, make(LEAF))
    assert (rows.ranges, rows.length) == (((0, 4), (6, 8)), 8)
    assert held.shape(0).shape == rows.array.shape == (6, 3)
    assert held.leaves == held.leaves_of([3]) == [0]
    parts = dict(held.parts(0, rows.array))
    assert {number: part[0, 0] for number, part in parts.items()} == {2: 0, 3: 6, 5: 18}
    joined = held.join(0, parts)
    assert joined.ranges == rows.ranges
    assert np.array_equal(joined.array, rows.array)
    assert held.take(0, rows) is rows


def test_who_holds_all_rows_holds_the_leaf() -> None:
    held = holding(1, 2, 3, 4, 5)
    assert held.leaves == [0, 1]
    assert held.take(0, LEAF) is LEAF
    assert held.join(0, dict(held.parts(0, LEAF))).shape == LEAF.shape
    assert held.join(0, {2: LEAF[:2]}) is None, "there is no gradient of the others"


def test_rows_of_another_worker_are_refused() -> None:
    rows = holding(2, 3).take(0, LEAF)
    with pytest.raises(ConfigError, match="rows 0 to 3 were given to a worker that holds rows 4 to 7; give what"):
        holding(4, 5).take(0, rows)
    with pytest.raises(ConfigError, match="all rows were given to a worker that holds rows 4 to 7; give what"):
        holding(4, 5).array(0, LEAF)
    with pytest.raises(ConfigError, match="rows 0 to 3 were given to a worker that holds all rows; give what"):
        holding(2, 3, 4, 5).take(0, rows)


def test_a_cut_wants_the_whole_leaf() -> None:
    grad_fn = jaxhetero.pipeline.value_and_grad(run, microbatches=MICROBATCHES)
    with pytest.raises(ConfigError, match="some parameters are None, or Rows; give cut"):
        grad_fn({**PARAMS, "bias": Rows(PARAMS["bias"][:2], ((0, 2),), LAYERS)}, X)


def test_layers_that_flax_stacks() -> None:
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return x + linen.Dense(WIDTH, dtype=jnp.bfloat16)(linen.LayerNorm()(x)).astype(x.dtype), None

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            layers = linen.scan(
                linen.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
            )
            return linen.Dense(1)(layers()(x, None)[0])

    model = Model()
    shapes = jax.eval_shape(model.init, jax.random.key(0), X)
    grad_fn = jaxhetero.pipeline.value_and_grad(
        lambda params, x: jnp.mean(jnp.square(model.apply(params, x))),
        stages=1,
        microbatches=MICROBATCHES,
        schedule="breadth_first",
        stages_per_worker=3,
    )
    report = grad_fn.cut(shapes, X)
    assert sum(stage.parameter_count for stage in report.stages) == sum(leaf.size for leaf in jax.tree.leaves(shapes))
