"""Collectives that only move, of every dtype, bit by bit; prints what is wrong by the names of the cases."""

import functools
import json
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.training.train_state import TrainState

import jaxhetero
from jaxhetero.errors import ConfigError

ROOT = 1
SMALL = (
    *("bool", "int2", "int4", "uint2", "uint4", "float4_e2m1fn", "float8_e8m0fnu", "float8_e3m4", "float8_e4m3"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2", "float8_e5m2fnuz"),
)
OTHERS = ("float16", "bfloat16", "uint16")
IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")

Cases = Iterator[tuple[str, Any, Any]]
CASES: list[Callable[[], Cases]] = []


def cases(function: Callable[[], Cases]) -> Callable[[], Cases]:
    """Register a function that gives names, what it got and what it should have got."""
    CASES.append(function)
    return function


def every_value(name: str) -> np.ndarray:
    """One element for every pattern of bits that the dtype has."""
    dtype = np.dtype(bool) if name == "bool" else jnp.dtype(name)
    if dtype.itemsize == 2:
        return np.arange(2**16, dtype=np.uint16).view(dtype)
    values = np.arange(2**8, dtype=np.uint8)
    if name == "bool":
        return values % 2 == 1
    if name.startswith("float8"):
        return values.view(dtype)
    if name.startswith("float4"):
        return (values % 16).view(dtype)
    bits = int(name.lstrip("uint"))
    return (values % 2**bits - (0 if name.startswith("u") else 2 ** (bits - 1))).astype(np.int8).astype(dtype)


def of_rank(rank: int) -> dict[str, np.ndarray]:
    """Other elements on each rank."""
    return {name: np.roll(every_value(name), rank + 1).reshape(2, -1) for name in (*SMALL, *OTHERS)}


def mine() -> dict[str, jax.Array]:
    return jax.tree.map(jnp.asarray, of_rank(jaxhetero.rank()))


def joined(join: Callable[..., np.ndarray]) -> dict[str, np.ndarray]:
    trees = [of_rank(rank) for rank in range(jaxhetero.size())]
    return {name: join([tree[name] for tree in trees]) for name in trees[0]}


def kept_by_xla(tree: dict[str, Any]) -> dict[str, Any]:
    """Without floats that XLA's own scan or all-gather on a CPU may compute in float32, which changes bits of NaNs."""
    widened = ("bfloat16", "float8_e3m4", "float8_e4m3", "float8_e5m2")
    return {name: leaf for name, leaf in tree.items() if name not in widened}


def keys(rank: int) -> dict[str, jax.Array]:
    return {impl: jax.random.split(jax.random.key(rank, impl=impl), (2, 3)) for impl in IMPLS}


def joined_keys(join: Callable[..., jax.Array]) -> dict[str, jax.Array]:
    trees = [keys(rank) for rank in range(jaxhetero.size())]
    return {impl: join([tree[impl] for tree in trees]) for impl in IMPLS}


@cases
def every_bit() -> Cases:
    broadcast = functools.partial(jaxhetero.broadcast, root=ROOT)
    yield "broadcast", broadcast(mine()), of_rank(ROOT)
    yield "broadcast in jit", jax.jit(broadcast)(mine()), of_rank(ROOT)
    yield "broadcast in a group", jaxhetero.broadcast(mine(), ROOT, workers=range(jaxhetero.size())), of_rank(ROOT)
    yield "all_gather", jaxhetero.all_gather(mine()), joined(np.stack)
    last = jax.jit(functools.partial(jaxhetero.all_gather, axis=-1))
    yield "all_gather in jit, axis=-1", last(mine()), joined(functools.partial(np.stack, axis=-1))
    tiled = functools.partial(jaxhetero.all_gather, axis=1, tiled=True, bucket_bytes=100)
    yield "all_gather, tiled", tiled(mine()), joined(functools.partial(np.concatenate, axis=1))
    yield "vmap of all_gather", jax.vmap(jaxhetero.all_gather)(mine()), joined(functools.partial(np.stack, axis=1))
    yield "vmap of broadcast", jax.jit(jax.vmap(broadcast))(mine()), of_rank(ROOT)
    scanned = jax.lax.scan(lambda carry, row: (carry, jaxhetero.all_gather(row)), None, kept_by_xla(mine()))[1]
    yield "scan of all_gather", scanned, kept_by_xla(joined(functools.partial(np.stack, axis=1)))


@cases
def typed_keys() -> Cases:
    own = keys(jaxhetero.rank())
    yield "broadcast of keys", jaxhetero.broadcast(own, ROOT), keys(ROOT)
    yield "all_gather of keys", jax.jit(jaxhetero.all_gather)(own), joined_keys(jnp.stack)
    last = functools.partial(jnp.stack, axis=-1)
    yield "all_gather of keys, axis=-1", jaxhetero.all_gather(own, axis=-1), joined_keys(last)
    tiled = jaxhetero.all_gather(own, axis=-1, tiled=True)
    yield "all_gather of keys, tiled", tiled, joined_keys(functools.partial(jnp.concatenate, axis=-1))
    batched = jax.vmap(jaxhetero.all_gather, in_axes=1)(own)
    yield "vmap of all_gather of keys", batched, joined_keys(lambda parts: jnp.stack(parts).transpose(2, 0, 1))
    one = jax.random.key(jaxhetero.rank())
    yield (
        "broadcast of one key",
        jax.random.normal(jaxhetero.broadcast(one), 3),
        jax.random.normal(jax.random.key(0), 3),
    )
    none = own["rbg"][:0]
    yield "all_gather of no keys", jaxhetero.all_gather(none).shape, (jaxhetero.size(), 0, 3)


@cases
def numbers() -> Cases:
    """What is no array of JAX, and what has no elements."""
    rank, size = jaxhetero.rank(), jaxhetero.size()
    tree = {"bool": rank == ROOT, "numpy": np.bool_(rank == ROOT), "int4": jnp.int4(rank), "list": [rank, float(rank)]}
    expected = {"bool": True, "numpy": True, "int4": np.int32(ROOT), "list": [ROOT, float(ROOT)]}
    found = jaxhetero.broadcast(tree, ROOT)
    yield "broadcast of numbers", jax.tree.map(lambda leaf: leaf.astype(float), found), jax.tree.map(float, expected)
    yield (
        "dtypes of numbers",
        [str(leaf.dtype) for leaf in jax.tree.leaves(found)],
        ["bool", "int4", "int32", "float32", "bool"],
    )
    for name in ("bool", "int4", "float8_e4m3fn", "float4_e2m1fn"):
        empty = np.zeros((0, 2), every_value(name).dtype)
        yield f"broadcast of no {name}", jaxhetero.broadcast(empty), empty
        yield f"all_gather of no {name}", jaxhetero.all_gather(empty), np.stack([empty] * size)


@cases
def derivatives() -> Cases:
    """Those of float8, whose cotangents are summed in float32; of what has none; and both in one tree."""
    rank, size = jaxhetero.rank(), jaxhetero.size()
    for name in ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"):
        dtype = jnp.dtype(name)
        x = jnp.ones(4, dtype)
        # Each rank weighs the rows by its rank plus one, so that a row's cotangents add up to 3.
        gathered, pull_back = jax.vjp(jaxhetero.all_gather, x)
        yield f"vjp of all_gather of {name}", pull_back(jnp.full_like(gathered, rank + 1))[0], np.full(4, 3, dtype)
        moved, pull_back = jax.vjp(lambda x: jaxhetero.broadcast(x, ROOT), x)
        expected = np.full(4, 3 if rank == ROOT else 0, dtype)
        yield f"vjp of broadcast of {name}", pull_back(jnp.full_like(moved, rank + 1))[0], expected
        tangents = jax.jvp(jaxhetero.all_gather, (x,), (x * (rank + 1),))[1]
        yield f"jvp of all_gather of {name}", tangents, np.stack([np.full(4, r + 1, dtype) for r in range(size)])

    def loss(tree: Any) -> Any:
        moved = jaxhetero.broadcast(tree, ROOT)
        drawn = jax.random.normal(moved["key"], 3) + moved["int4"].astype(jnp.float32)
        return jnp.sum(drawn * moved["w"] * (rank + 1))

    tree = {"key": jax.random.key(rank), "int4": jnp.int4(rank), "w": jnp.ones(3)}
    gradients = jax.jit(jax.grad(loss, allow_int=True))(tree)
    yield (
        "gradients of keys",
        [leaf.dtype == jax.dtypes.float0 for leaf in jax.tree.leaves(gradients)],
        [True, True, False],
    )
    again = jaxhetero.all_gather(gradients)
    yield "what is no gradient", again["key"], np.zeros(size, jax.dtypes.float0)
    drawn = jax.random.normal(jax.random.key(ROOT), 3) + ROOT
    yield "gradients beside keys", gradients["w"], np.asarray(3 * drawn if rank == ROOT else 0 * drawn)


class Net(nnx.Module):
    """Its state has keys, counts, statistics and weights."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(3, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.norm(self.linear(x)))


class StateWithKey(TrainState):  # type: ignore[no-untyped-call]
    """As flax's guide to dropout has it."""

    key: jax.Array = flax.struct.field(default=None)


@cases
def models() -> Cases:
    import optax

    own, wanted = Net(nnx.Rngs(jaxhetero.rank())), Net(nnx.Rngs(ROOT))
    nnx.update(own, jaxhetero.broadcast(nnx.state(own), ROOT))
    yield "an NNX state", nnx.to_pure_dict(nnx.state(own)), nnx.to_pure_dict(nnx.state(wanted))
    yield "an NNX model", own(jnp.ones((4, 3))), wanted(jnp.ones((4, 3)))

    def state(rank: int) -> StateWithKey:
        key = jax.random.key(rank)
        params = {"w": jax.random.normal(key, (2, 3))}
        return StateWithKey.create(apply_fn=len, params=params, tx=TX, key=key)

    TX = optax.adam(1e-3)
    yield "a TrainState", jaxhetero.broadcast(state(jaxhetero.rank()), ROOT), state(ROOT)


@cases
def devices() -> Cases:
    """In a mesh of this worker's devices, with types and without.

    Numbers of 2 and 4 bits are such inside of the mesh only. An array of them that is sharded, and then indexed, writes
    where it must not: jaxlib 0.10.2 itself, on a CPU.
    """
    size, places = jaxhetero.size(), jax.local_device_count()
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ("d",))
    wide = dict.fromkeys(("int2", "int4", "uint2", "uint4"), "int8") | {"float4_e2m1fn": "float32"}

    def outside(tree: Any) -> Any:
        return {name: leaf.astype(wide[name]) if name in wide else leaf for name, leaf in tree.items()}

    def inside(tree: Any) -> Any:
        return {name: leaf.astype(name) if name in wide else leaf for name, leaf in tree.items()}

    own = outside({**kept_by_xla(mine()), **keys(jaxhetero.rank())})
    for checked in (True, False):
        shard = functools.partial(jax.shard_map, mesh=mesh, in_specs=jax.P("d"), check_vma=checked)

        def gather(x: Any, to: str) -> Any:
            return outside(jaxhetero.all_gather(inside(x), "d", tiled=True, to=to))

        expected = outside(
            jax.tree.map(jnp.asarray, kept_by_xla(joined(np.concatenate))) | joined_keys(jnp.concatenate)
        )
        each = jax.jit(shard(functools.partial(gather, to="varying"), out_specs=jax.P("d")))(own)
        first = jax.tree.map(lambda leaf: leaf[: leaf.shape[0] // places], each)
        yield f"all_gather over devices, check_vma={checked}", first, expected
        if checked:
            same = jax.jit(shard(functools.partial(gather, to="invarying"), out_specs=jax.P()))(own)
            yield "all_gather to invarying", same, expected
    assert size * places == 4


@cases
def refusals() -> Cases:
    """Sums stay refused, and the message says what to do."""
    advice = {
        "key": (jax.random.key(0), "jaxhetero.broadcast and jaxhetero.all_gather take it"),
        "int4": (jnp.int4(1), "x.astype('int32')"),
        "float8_e5m2": (jnp.ones((2, 2), jnp.float8_e5m2), "x.astype('float32')"),
    }
    for name, (leaf, text) in advice.items():
        for collective in (jaxhetero.psum, jaxhetero.pmean, jaxhetero.pmax, jaxhetero.psum_scatter):
            try:
                collective({"leaf": leaf})
                message = "nothing"
            except ConfigError as error:
                message = str(error)
            yield f"{collective.__name__} of {name}: {message}", text in message, True


def is_same(found: Any, wanted: Any) -> bool:
    """Of arrays: the same dtype, shape and bits."""
    if not hasattr(wanted, "dtype"):
        return bool(found == wanted)
    if jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data
        return found.dtype == wanted.dtype and found.shape == wanted.shape and is_same(data(found), data(wanted))
    arrays = np.asarray(found), np.asarray(wanted)
    return found.dtype == wanted.dtype and found.shape == wanted.shape and arrays[0].tobytes() == arrays[1].tobytes()


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    jaxhetero.initialize()
    wrong, count = {}, 0
    for group in CASES:
        try:
            for name, found, wanted in group():
                count += 1
                pairs = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True)
                if bad := [jax.tree_util.keystr(path) for (path, a), b in pairs if not is_same(a, b)]:
                    wrong[name] = bad
        except Exception:
            wrong[group.__name__] = traceback.format_exc().splitlines()[-4:]
    print(json.dumps({"wrong": wrong, "count": count}))


main()
