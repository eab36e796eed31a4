"""What can be said of the collectives without other processes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxhetero
import jaxhetero.optimizers
from jaxhetero._collectives.buckets import make_buckets
from jaxhetero.errors import ConfigError, NotInitializedError


@pytest.mark.parametrize(
    ("bytes_of", "bucket_bytes", "buckets"),
    [
        ([], 10, []),
        ([4, 4, 4], 100, [[2, 1, 0]]),
        ([4, 4, 4], 8, [[2, 1], [0]]),
        ([4, 400, 4], 8, [[2], [1], [0]]),
        ([400, 4, 4], 8, [[2, 1], [0]]),
        ([0, 0], 8, [[1, 0]]),
    ],
)
def test_buckets_go_from_the_last_leaf_to_the_first(
    bytes_of: list[int], bucket_bytes: int, buckets: list[list[int]]
) -> None:
    assert make_buckets([np.zeros(size, np.int8) for size in bytes_of], bucket_bytes) == buckets


def test_a_bucket_has_one_dtype() -> None:
    arrays = [np.zeros(2, dtype) for dtype in ("float32", "int32", "float32", "int32")]
    assert make_buckets(arrays, 100) == [[3, 1], [2, 0]]


@pytest.mark.parametrize(
    ("dtype", "wire_dtype", "buckets"),
    [
        ("float32", None, [[3], [2], [1], [0]]),
        ("float32", "bfloat16", [[3, 2], [1, 0]]),
        ("bfloat16", "bfloat16", [[3, 2], [1, 0]]),
        ("int32", "bfloat16", [[3], [2], [1], [0]]),
    ],
)
def test_buckets_are_of_bytes_on_the_wire(dtype: str, wire_dtype: str | None, buckets: list[list[int]]) -> None:
    assert make_buckets([jnp.zeros(2, dtype)] * 4, 8, wire_dtype) == buckets


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("tree", [{}, {"a": jnp.ones(3), "b": [jnp.arange(2), 2.5]}, 7, jnp.zeros((0, 4))])
def test_alone_a_sum_is_the_value_itself(tree: Any) -> None:
    for result in (jaxhetero.psum(tree), jax.jit(jaxhetero.psum)(tree), jaxhetero.broadcast(tree)):
        assert jax.tree.structure(result) == jax.tree.structure(tree)
        jax.tree.map(np.testing.assert_array_equal, result, tree)


@pytest.mark.usefixtures("alone")
def test_alone_nothing_is_counted() -> None:
    assert (jaxhetero.rank(), jaxhetero.size()) == (0, 1)
    assert jaxhetero.metrics() == jaxhetero.Metrics()


@pytest.mark.usefixtures("alone")
def test_mean_of_integers_is_a_float() -> None:
    assert jaxhetero.pmean(jnp.arange(3)).dtype == jnp.float32


@pytest.mark.usefixtures("alone")
def test_devices_of_one_worker_are_summed_by_xla() -> None:
    mesh = jax.make_mesh((1,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    for collective in (jaxhetero.psum, jaxhetero.pmean):
        step = jax.shard_map(
            lambda x, c=collective: c(x, "devices"), mesh=mesh, in_specs=jax.P("devices"), out_specs=jax.P()
        )
        np.testing.assert_array_equal(step(jnp.arange(4.0)), jnp.arange(4.0))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a")])
def test_what_varies_along_one_axis_is_summed_along_both(axes: tuple[str, ...]) -> None:
    """jax.lax refuses it by a type; ours take it between workers, and so inside the only one."""
    mesh = jax.sharding.AbstractMesh((2, 1), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    step = jax.shard_map(lambda x: jaxhetero.psum(x, axes), mesh=mesh, in_specs=jax.P("a"), out_specs=jax.P())
    assert jax.eval_shape(step, jnp.arange(4)).shape == (2,)


@pytest.mark.usefixtures("alone")
def test_a_dtype_that_cannot_be_summed_is_named() -> None:
    with pytest.raises(ConfigError, match=r"psum at test_collectives\.py:.*float8_e5m2\[3\].*cast it first"):
        jaxhetero.psum(jnp.ones(3, jnp.float8_e5m2))


@pytest.mark.usefixtures("alone")
def test_booleans_are_counted() -> None:
    assert jaxhetero.psum(jnp.ones(3, bool)).dtype == jnp.int32


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("root", [-1, 1])
def test_a_root_that_does_not_exist(root: int) -> None:
    with pytest.raises(ConfigError, match=f"root {root} is not in 0..0"):
        jaxhetero.broadcast(1.0, root)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["psum", "pmean", "pmax", "pmin", "all_gather", "psum_scatter"])
def test_groups_that_are_none_are_refused_by_name(name: str) -> None:
    for groups in ([[0], [0]], [[1]], [[0], []], []):
        with pytest.raises(ConfigError, match=rf"{name} at .*: axis_index_groups is .*must be in one group"):
            getattr(jaxhetero, name)(jnp.ones(1), axis_index_groups=groups)


@pytest.mark.usefixtures("alone")
def test_the_sum_over_a_group_of_one_is_the_value_itself() -> None:
    x = jnp.arange(3.0)
    for collective in (jaxhetero.psum, jaxhetero.pmean, jaxhetero.pmax, jaxhetero.pmin, jaxhetero.broadcast):
        np.testing.assert_array_equal(collective(x, workers=(0,)), x)
        np.testing.assert_array_equal(jax.jit(lambda x, c=collective: c(x, workers=[0]))(x), x)
    jaxhetero.barrier(workers=(0,))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jaxhetero.pmax(jnp.ones(2, jnp.complex64)), r"complex64\[2\], and complex numbers have no order"),
        (
            lambda: jaxhetero.psum(jnp.ones(2), wire_dtype=jnp.int16),
            "wire_dtype is int16; it can be bfloat16, float16, int8, int4 or float8_e4m3fn",
        ),
        (lambda: jaxhetero.optimizers.error_feedback("float8_e5m2"), "wire_dtype is float8_e5m2; it can be"),
        (lambda: jaxhetero.all_gather(jnp.ones(2), to="reduced"), "to is 'reduced'; it can be"),
        (lambda: jaxhetero.psum_scatter(jnp.ones(2)), r"axis 0 of float32\[2\] cannot be scattered over 1"),
        (lambda: jaxhetero.psum(jnp.ones(2), (0,)), "axis_name has 0, a position"),
        (lambda: jax.jit(lambda: jaxhetero.barrier())(), "barrier at .*: inside a traced function"),
        (
            lambda: jaxhetero.psum(jnp.ones(2), workers=(0, 1)),
            r"workers is \(0, 1\); it must be different ranks",
        ),
        (
            lambda: jaxhetero.pmax(jnp.ones(2), workers=(0, 0)),
            r"\(0, 0\); it must be different ranks of 0..0",
        ),
        (lambda: jaxhetero.pmean(jnp.ones(2), workers=()), r"workers is \(\), and this is rank 0; only the workers of"),
        (lambda: jaxhetero.psum(jnp.ones(2), "axis", workers=(0,)), "by their ranks or by a mesh axis, not by both"),
    ],
)
def test_what_is_refused_says_why(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


@pytest.mark.usefixtures("alone")
def test_alone_every_collective_is_what_it_is_on_one_device() -> None:
    x = jnp.arange(6.0).reshape(1, 6)
    for collective in (jaxhetero.pmax, jaxhetero.pmin, jaxhetero.pmean):
        np.testing.assert_array_equal(collective(x), x)
    np.testing.assert_array_equal(jaxhetero.all_gather(x, axis=1), x[:, None])
    np.testing.assert_array_equal(jaxhetero.all_gather(x, axis=-1, tiled=True), x)
    np.testing.assert_array_equal(jaxhetero.psum_scatter(x), x[0])
    np.testing.assert_array_equal(jaxhetero.psum_scatter(x, scatter_dimension=1, tiled=True), x)
    jaxhetero.barrier()
    with pytest.raises(ValueError, match="axis 3 is out of bounds"):
        jaxhetero.all_gather(x, axis=3)


@pytest.mark.usefixtures("alone")
def test_initialize_twice() -> None:
    with pytest.raises(ConfigError, match="initialized already"):
        jaxhetero.initialize()


def test_a_setting_that_does_not_exist() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'reducers'"):
        jaxhetero.initialize(reducers=2)  # type: ignore[call-arg]


def test_before_initialize_and_after_shutdown() -> None:
    for use in (jaxhetero.rank, jaxhetero.size, jaxhetero.metrics, lambda: jaxhetero.psum(1.0)):
        with pytest.raises(NotInitializedError, match=r"call jaxhetero.initialize\(\)"):
            use()
    jaxhetero.shutdown()
