"""What an elastic job refuses, by name; and its collectives beside means, while nobody is lost."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxhetero
from jaxhetero import optimizers, pipeline
from jaxhetero.errors import ConfigError

jaxhetero.initialize()
rank, size = jaxhetero.rank(), jaxhetero.size()
x = jnp.arange(4.0)


def refused(words: str, function, *arguments, **options) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        function(*arguments, **options)


refused("all_gather", jaxhetero.all_gather, x)
refused("psum_scatter", jaxhetero.psum_scatter, x, tiled=True)
with jax.set_mesh(jax.make_mesh((1,), ("workers",))):
    for call in (
        lambda x: jaxhetero.ppermute(x, "workers", [(0, 0)]),
        lambda x: jaxhetero.all_to_all(x, "workers", 0, 0),
    ):
        refused("does not work in an elastic job", jax.shard_map(call, in_specs=jax.P(), out_specs=jax.P()), x)
refused("jaxhetero.offload", jaxhetero.offload(jax.jit(lambda x: x + 1)), x)
across = optimizers.across_steps(optimizers.on_reducers(optax.sgd(0.1)))
refused("across_steps around on_reducers", across.send, across.init(x), x)
refused("jaxhetero.pipeline", pipeline.value_and_grad(lambda p, x: (p * x).sum(), stages=2, microbatches=1), x, x)
refused("size() is called while a program is traced", jax.jit(lambda x: x * jaxhetero.size()), x)
refused("initialized already", jaxhetero.initialize)

ranks = np.arange(size)
assert np.array_equal(jaxhetero.psum(x), x * size)
assert np.array_equal(jaxhetero.pmax(x + rank), x + size - 1)
assert np.array_equal(jaxhetero.broadcast(x + rank, root=1), x + 1)
assert np.array_equal(jaxhetero.pmean(jnp.int32(rank + 1)), (ranks + 1).mean(dtype=np.float32))
assert jaxhetero.pmean(jnp.int8(100)).dtype == jnp.float32
assert jaxhetero.pmean(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
mean, who = jaxhetero.pmean({"x": x * rank, "n": jnp.int32(rank)}, weight=rank + 1, who=True)
weights = ranks + 1
assert np.allclose(mean["n"], (ranks * weights).sum() / weights.sum()), mean
assert (who.count, who.weight, who.same) == (size, weights.sum(), True), who
gradient = jax.grad(lambda x: jaxhetero.pmean(x * (rank + 1)).sum())(x)
assert np.allclose(gradient, (rank + 1)), gradient
batched = jax.vmap(lambda x: jaxhetero.pmean(x))(jnp.ones((3, 2)) * rank)
assert np.array_equal(batched, np.full((3, 2), ranks.mean(), np.float32)), batched
# Over the devices of each worker as well.
with jax.set_mesh(jax.make_mesh((2,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))):
    for check_vma in (True, False):
        program = jax.shard_map(
            lambda x: jaxhetero.pmean(x, "devices", who=True),
            in_specs=jax.P("devices"),
            out_specs=(jax.P(), jax.P()),
            check_vma=check_vma,
        )
        mean, who = jax.jit(program)(jnp.arange(2.0) + 2 * rank)
        assert np.array_equal(mean, [np.arange(2 * size).mean()]), mean
        assert (who.count, who.same) == (size, True), who
        ones = jax.shard_map(lambda: jaxhetero.psum(1, "devices"), in_specs=(), out_specs=jax.P(), check_vma=check_vma)
        assert ones() == 2 * size
jaxhetero.barrier()
jaxhetero.shutdown()
print('"done"')
