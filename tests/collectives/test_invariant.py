"""What psum and pmean refuse because JAX's types say that it is the same everywhere. Only traced: nothing runs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxhetero
from jaxhetero.errors import ConfigError

BOTH = ("a", "b")

pytestmark = pytest.mark.usefixtures("alone")


def trace(function: Any, *, sizes: tuple[int, int] = (2, 3), dtype: Any = jnp.float32, **options: Any) -> Any:
    """``function`` of a value that is the same everywhere, one that varies along "a", and one along "a" and "b"."""
    mesh = jax.sharding.AbstractMesh(sizes, BOTH, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    arrays = [jnp.ones(shape, dtype) for shape in (4, 4 * sizes[0], 4 * sizes[0] * sizes[1])]

    def shard(*arrays: jax.Array) -> None:
        function(*arrays)

    specs = jax.P(), jax.P("a"), jax.P(options.pop("last", BOTH))
    jax.eval_shape(jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=None, **options), *arrays)


SUMS = pytest.mark.parametrize("collective", [jaxhetero.psum, jaxhetero.pmean])


@SUMS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64"])
def test_the_leaf_the_axis_and_the_way_out_are_named(collective: Any, dtype: str) -> None:
    with pytest.raises(ConfigError) as found:
        trace(lambda same, a, _: collective({"x": a, "y": [a, same]}, "a"), dtype=dtype)
    message = str(found.value)
    assert message.startswith(f"{collective.__name__} at test_invariant.py:test_the_leaf")
    assert f"the {dtype}[4] at ['y'][1] does not vary over mesh axis 'a'." in message
    assert "params = jax.lax.pcast(params, 'a', to='varying')" in message
    mean = ", mean=True" if collective is jaxhetero.pmean else ""
    assert f"jaxhetero.replicated(params, 'a'{mean})" in message


@SUMS
def test_only_the_axes_along_which_it_is_the_same_are_named(collective: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"at the root does not vary over mesh axis 'b'\..*replicated\(params, \('a', "
    ):
        trace(lambda _, a, __: collective(a, BOTH))
    with pytest.raises(ConfigError, match=r"mesh axis \('a', 'b'\)\."):
        trace(lambda same, _, __: collective(same, BOTH))


@SUMS
def test_what_varies_passes_whatever_the_transformation(collective: Any) -> None:
    """Zeros for unused parameters, tangents and cotangents as well: AD makes nothing that is refused."""

    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(collective(x, BOTH))

    def step(same: jax.Array, _: jax.Array, x: jax.Array) -> None:
        params = jax.lax.pcast({"used": same, "unused": same}, BOTH, to="varying")
        collective(jax.grad(lambda params: jnp.sum(params["used"] * x))(params), BOTH)
        for function in (total, jax.checkpoint(total), jax.jit(total), lambda x: jnp.sum(jax.vmap(total)(x))):
            jax.grad(function)(x)
            jax.jvp(jax.grad(function), (x,), (x,))
            jax.linear_transpose(function, x)(same[0])
        jax.lax.scan(lambda carry, row: (carry, collective(row, BOTH)), 0, x)
        jax.lax.cond(True, total, lambda x: same[0], x)
        jax.grad(lambda same: jnp.sum(jaxhetero.replicated({"p": same, "q": same}, BOTH)["p"]))(same)

    trace(step)


@pytest.mark.parametrize(
    "use",
    [
        lambda same: jax.vmap(lambda x: jaxhetero.psum(x, "a"))(same),
        lambda same: jax.lax.scan(lambda carry, x: (carry, jaxhetero.psum(x, "a")), 0, same),
        lambda same: jax.jvp(lambda x: jaxhetero.psum(x, "a"), (same,), (same,)),
        lambda same: jax.grad(lambda x: jnp.sum(jaxhetero.pmean(x, "a")))(same),
        lambda same: jax.jit(lambda x: jaxhetero.pmean(x, "a"))(same),
        lambda same: jaxhetero.psum(jax.grad(lambda x: jnp.sum(x * jax.lax.axis_index("a")))(same), "a"),
        lambda same: jaxhetero.psum(jaxhetero.psum(jax.lax.pcast(same, "a", to="varying"), "a"), "a"),
    ],
)
def test_what_does_not_vary_is_refused_in_every_transformation(use: Any) -> None:
    with pytest.raises(ConfigError, match="does not vary over mesh axis 'a'"):
        trace(lambda same, _, __: use(same))
    trace(lambda same, _, __: use(same), check_vma=False)


@SUMS
@pytest.mark.parametrize("value", [2, 2.5, True, np.float32(1), np.ones(3), 1j])
def test_constants_are_counted(collective: Any, value: Any) -> None:
    count = 1 if collective is jaxhetero.pmean else 6

    def step(_: jax.Array, __: jax.Array, x: jax.Array) -> None:
        np.testing.assert_array_equal(collective(value, BOTH), count * value)
        collective((value, x), BOTH)

    trace(step)


@SUMS
@pytest.mark.parametrize("dtype", ["int8", "uint32", "bool"])
def test_integers_and_booleans_are_counted(collective: Any, dtype: str) -> None:
    trace(lambda same, a, _: collective((same, a), BOTH), dtype=dtype)


@SUMS
def test_where_there_is_nothing_to_sum_over_twice(collective: Any) -> None:
    """Along an axis of one device, without types, and without a mesh."""
    trace(lambda _, a, __: collective(a, BOTH), sizes=(2, 1))
    trace(lambda same, _, __: collective(same, BOTH), check_vma=False)
    jax.eval_shape(collective, jnp.ones(3))


def test_other_collectives_take_what_does_not_vary() -> None:
    def step(same: jax.Array, _: jax.Array, __: jax.Array) -> None:
        jaxhetero.pmax(same, BOTH)
        jaxhetero.pmin(same, BOTH)
        jaxhetero.all_gather(same, BOTH)

    trace(step)


@SUMS
def test_axes_that_are_not_manual_do_not_matter(collective: Any) -> None:
    """Under shard_map over some axes of a mesh the types know of those alone."""
    partly = {"axis_names": {"a"}, "last": "a"}
    trace(lambda _, a, __: collective(a, "a"), **partly)
    with pytest.raises(ConfigError, match="mesh axis 'a'"):
        trace(lambda same, _, __: collective(same, "a"), **partly)
