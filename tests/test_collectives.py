"""What can be said of the collectives without other processes."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxhetero
from jaxhetero._reduction import make_buckets
from jaxhetero.errors import ConfigError, NotInitializedError


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A world of one worker and no reducer."""
    for name in ("RANK", "WORKER_COUNT", "REDUCER_COUNT"):
        monkeypatch.delenv(f"JAXHETERO_{name}", raising=False)
    jaxhetero.initialize()
    yield
    jaxhetero.shutdown()


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
def test_initialize_twice() -> None:
    with pytest.raises(ConfigError, match="initialized already"):
        jaxhetero.initialize()


def test_a_setting_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="no setting reducers; it takes rank, worker_count, reducer_count"):
        jaxhetero.initialize(reducers=2)


def test_before_initialize_and_after_shutdown() -> None:
    for use in (jaxhetero.rank, jaxhetero.size, jaxhetero.metrics, lambda: jaxhetero.psum(1.0)):
        with pytest.raises(NotInitializedError, match=r"call jaxhetero.initialize\(\)"):
            use()
    jaxhetero.shutdown()
