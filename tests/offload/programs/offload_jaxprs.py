"""What offload makes of foreign jaxprs. Prints the name of each function with another result than jax.lax gives.

Each function has collectives in a place where JAX, or a library with primitives of its own, keeps a jaxpr, a value of
a special kind, or a rule for a transformation. What jax.lax gives is computed in this process, on as many devices.
"""

import dataclasses
import json
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import hijax, io_callback, pallas
from jax.experimental.ode import odeint
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.scipy.sparse.linalg import cg

import jaxhetero
from jaxhetero.errors import ConfigError

AXIS, WORKERS = "batch", 2
WEIGHTS = np.arange(6, dtype=np.float32)[:, None]

Function = Callable[[Any], Any]
SAME: dict[str, Function] = {}
TRANSFORMED: dict[str, tuple[Callable[[Function], Function], Function]] = {}
REFUSED: dict[str, tuple[str, Function]] = {}
# What jax.lax runs in the place of a function.
EQUIVALENT: dict[str, Function] = {}


def same(function: Function) -> Function:
    """Gives what it gives with jax.lax."""
    SAME[function.__name__] = function
    return function


def transformed(transform: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """So does ``transform`` of the function, where offload is inside."""

    def register(function: Function) -> Function:
        TRANSFORMED[function.__name__] = transform, function
        return function

    return register


def refused(text: str) -> Callable[[Function], Function]:
    """Is refused with ``text``."""

    def register(function: Function) -> Function:
        REFUSED[function.__name__] = text, function
        return function

    return register


def total(x: Any) -> Any:
    return lax.psum(x, AXIS)


def mean(x: Any) -> Any:
    return lax.pmean(x, AXIS)


# --- Results of collectives that run together.


@same
def several_indices(x: Any) -> Any:
    first, second, _unused = (lax.axis_index(AXIS) for _ in range(3))
    return x * first + second, first


@same
def index_under_checkpoint(x: Any) -> Any:
    return jax.grad(jax.checkpoint(lambda x: jnp.sin(total(x) * lax.axis_index(AXIS)).sum()))(x)


@same
def one_result_twice(x: Any) -> Any:
    total(x)
    result = total({"x": x, "rest": (x[0], 3)})
    return result, result["x"], result


@same
def weak_types(x: Any) -> Any:
    carried = lax.fori_loop(0, 3, lambda _, carry: lax.pmax(carry, AXIS) + 1, 0)
    return lax.while_loop(lambda carry: total(carry) < 9.0, lambda carry: carry * 2, 1.5), carried, x


# --- Named tuples.


@same
def conjugate_gradients(x: Any) -> Any:
    return cg(lambda v: mean(x.T @ (x @ v)) + v, jnp.ones(3), maxiter=5)[0]


@same
def gradient_of_a_solver(x: Any) -> Any:
    def solve(b: Any) -> Any:
        return lax.custom_linear_solve(lambda v: mean(v) * 2 + v, b, lambda _, c: c / 3, symmetric=True)

    return jax.grad(lambda x: (solve(x[0]) * x).sum())(x)


@same
def solvers_in_a_scan(x: Any) -> Any:
    def body(carry: Any, row: Any) -> Any:
        return cg(lambda v: mean(v) * 2 + v, carry + row, maxiter=2)[0], total(row)

    return lax.scan(body, x[0], x), jax.vmap(lambda b: cg(lambda v: mean(v) * 2 + v, b, maxiter=2)[0])(x)


@same
def differential_equation(x: Any) -> Any:
    times = jnp.array([0.0, 0.1, 0.2])
    return jax.grad(lambda y: odeint(lambda y, _: -y * mean(x.sum(0)) ** 2, y, times).sum())(jnp.ones(3))


# --- References.


@same
def reference_in_a_scan(x: Any) -> Any:
    held = jax.new_ref(jnp.zeros(3))

    def body(carry: Any, row: Any) -> Any:
        held[...] = held[...] + mean(row)
        return carry, None

    lax.scan(body, 0, x)
    return held[...]


@same
def reference_in_branches(x: Any) -> Any:
    held = jax.new_ref(jnp.zeros(3))

    def write(sign: int) -> None:
        held[...] = sign * mean(x[0])

    lax.cond(total(x).sum() > 0, lambda: write(1), lambda: write(-1))
    return held[...]


@same
def reference_as_an_argument(x: Any) -> Any:
    held = jax.new_ref(jnp.zeros(3))

    @jax.jit
    def add(held: Any, x: Any) -> Any:
        held[...] = held[...] + mean(x[0])
        return total(held[...])

    return add(held, x), add(held, x), held[...]


@same
def reference_of_integers_in_a_loop(x: Any) -> Any:
    def of_row(row: Any) -> Any:
        held = jax.new_ref(jnp.zeros(3, jnp.int32))

        def body(place: Any, carry: Any) -> Any:
            held[place] += total((row[place] * 10).astype(jnp.int32))
            return carry

        lax.fori_loop(0, 3, body, 0)
        return held[...]

    return jax.vmap(of_row)(x)


@same
def reference_between_collectives(x: Any) -> Any:
    """A collective of what was read waits until it is used; what is written meanwhile does not matter to it."""
    held = jax.new_ref(x)
    before = total(held[...])
    held[...] = held[...] * 10
    after = total(held[...])
    held[...] = jnp.zeros_like(x)
    return before, after, jax.ref.freeze(held)


@same
def reference_in_a_custom_derivative(x: Any) -> Any:
    @jax.custom_vjp
    def noted(held: Any, y: Any) -> Any:
        held[...] = total(y)
        return y * 2

    noted.defvjp(lambda held, y: (noted(held, y), None), lambda _, cotangent: (None, cotangent))
    held = jax.new_ref(x)
    return noted(held, x), held[...]


# --- Positions in the place of names.


def over_all(reduce: Callable[..., Any]) -> Function:
    """Over the workers and two axes of vmap, in each order."""

    def of_number(x: Any) -> Any:
        return reduce(x, ("rows", AXIS)), reduce(x, (AXIS, "columns")), reduce(x, ("columns", AXIS, "rows"))

    return jax.vmap(jax.vmap(of_number, axis_name="columns"), axis_name="rows")


SAME |= {f"{reduce.__name__}_under_vmap": over_all(reduce) for reduce in (lax.psum, lax.pmean, lax.pmax, lax.pmin)}


@same
def flags_under_vmap(x: Any) -> Any:
    both = ("rows", AXIS)
    return jax.vmap(lambda row: (lax.psum(row > 0, both), lax.pmax(row > 0, both)), axis_name="rows")(x)


@same
def gradient_under_vmap(x: Any) -> Any:
    def loss(x: Any) -> Any:
        return (jax.vmap(lambda row: lax.psum(jnp.sin(row), ("rows", AXIS)), axis_name="rows")(x) * x).sum()

    return jax.grad(loss)(x)


@same
def vmap_in_a_scan(x: Any) -> Any:
    def body(carry: Any, row: Any) -> Any:
        return carry + jax.vmap(lambda one: lax.pmean(one, (AXIS, "ones")), axis_name="ones")(row)[0], None

    return lax.scan(body, jnp.zeros(()), x)[0], lax.psum(x, (0, AXIS)), lax.pmax(x, (AXIS, 1))


# --- Primitives of libraries, which keep jaxprs where they like.


class Entries(dict[str, Any]):
    __hash__ = object.__hash__  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class Data:
    jaxpr: Any
    count: int = dataclasses.field(init=False, default=1)


class Loop(NamedTuple):
    condition: int
    bodies: tuple[Any, ...]


class Static:
    __slots__ = ("itself", "jaxpr")

    def __init__(self, jaxpr: Any) -> None:
        self.jaxpr = jaxpr
        self.itself = self


class Frozen:
    def __init__(self, entries: dict[str, Any]) -> None:
        self._entries = entries


# How each kind of parameter is made of a jaxpr, and how the jaxpr is found in it again.
KEPT: dict[str, tuple[Function, Function]] = {
    "dictionary": (lambda jaxpr: Entries({"first": 3, "body": jaxpr}), lambda kept: kept["body"]),
    "dataclass": (Data, lambda kept: kept.jaxpr),
    "named tuple": (lambda jaxpr: Loop(1, (Entries(body=jaxpr),)), lambda kept: kept.bodies[0]["body"]),
    "slots": (Static, lambda kept: kept.jaxpr),
    "object": (lambda jaxpr: Frozen({"body": jaxpr}), lambda kept: kept._entries["body"]),
    "open": (lambda jaxpr: getattr(jaxpr, "jaxpr", jaxpr), lambda kept: kept),
    "function": (lambda jaxpr: lambda: jaxpr, lambda kept: kept()),
}


def make_primitive(find: Function) -> Any:
    """A primitive that runs the jaxpr that is kept in its parameter."""

    def run(*operands: Any, kept: Any) -> Any:
        jaxpr = find(kept)
        return jax.core.eval_jaxpr(getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ()), *operands)

    primitive = Primitive("of_a_library")
    primitive.multiple_results = True
    primitive.def_impl(run)
    primitive.def_abstract_eval(lambda *_, kept: [variable.aval for variable in find(kept).outvars])
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True))
    return primitive


PRIMITIVES = {kind: make_primitive(find) for kind, (_, find) in KEPT.items()}


def in_a_library(kind: str, x: Any, factor: Any = 2.0) -> Any:
    jaxpr = jax.make_jaxpr(lambda y: total(y) * factor, axis_env=[(AXIS, WORKERS)])(x)
    return PRIMITIVES[kind].bind(x, kept=KEPT[kind][0](jaxpr))[0]


@same
def primitives_of_libraries(x: Any) -> Any:
    return [in_a_library(kind, x, WEIGHTS) for kind in ("dictionary", "dataclass", "named tuple", "slots", "object")]


@same
def primitives_of_libraries_inside(x: Any) -> Any:
    looped = lax.scan(lambda carry, _: (in_a_library("dataclass", carry), None), x, None, length=2)[0]
    return looped, jax.checkpoint(lambda x: in_a_library("open", x) + 1)(x)


@refused("the of_a_library at offload_jaxprs.py:in_a_library has a collective inside")
def program_in_a_function(x: Any) -> Any:
    return in_a_library("function", x)


# The name until JAX 0.11, and since.
HiPrimitive: Any = getattr(hijax, "VJPHiPrimitive", None) or hijax.HiPrim  # type: ignore[attr-defined]


class Summed(HiPrimitive):  # type: ignore[misc]
    """A primitive that shows what it does when it is compiled."""

    def __init__(self, x: Any) -> None:
        self.in_avals = (jax.typeof(x),)
        self.out_aval = jax.typeof(x)
        self.params = {}
        super().__init__()

    def expand(self, x: Any) -> Any:
        return summed(x)


def summed(x: Any) -> Any:
    return total(x) * WEIGHTS[: x.shape[0]]


def in_many_places(function: Function) -> Function:
    """The constant of ``summed`` has no place in the jaxpr of a checkpoint."""

    def places(x: Any) -> Any:
        looped = lax.scan(lambda carry, row: (carry + function(row), None), x[:1], x[:, None])[0]
        return function(x), looped, jax.checkpoint(lambda x: function(x) + 1)(x)

    return places


SAME["expanded_late"] = in_many_places(lambda x: Summed(x)(x))
EQUIVALENT["expanded_late"] = in_many_places(summed)  # JAX 0.10 fails on such constants of the other


# --- What cannot have our collectives inside.


@refused("the pallas_call at offload_jaxprs.py:in_a_kernel has a collective inside")
def in_a_kernel(x: Any) -> Any:
    def kernel(source: Any, target: Any) -> None:
        target[...] = source[...] * lax.axis_index(AXIS)

    return pallas.pallas_call(kernel, out_shape=jax.typeof(x), interpret=True)(x)


@refused("the scatter at offload_jaxprs.py:in_a_scatter has a collective inside")
def in_a_scatter(x: Any) -> Any:
    return x.at[jnp.array([0, 1])].apply(total)


@refused("the reduce at offload_jaxprs.py:in_a_reduction has a collective inside")
def in_a_reduction(x: Any) -> Any:
    return lax.reduce(x, 0.0, lambda one, other: one + total(other), (0,))


@same
def beside_kernels(x: Any) -> Any:
    """Kernels and reductions without a collective are as they were, and so is what is in them."""

    def kernel(source: Any, target: Any) -> None:
        target[...] = jax.nn.relu(source[...])

    summed = pallas.pallas_call(kernel, out_shape=jax.typeof(x), interpret=True)(total(x))
    return lax.reduce(summed, 0.0, lambda one, other: one + jax.nn.relu(other), (0,))


# --- Rules for transformations around offload.


@jax.custom_vjp
def summed_backward(x: Any) -> Any:
    return x


summed_backward.defvjp(lambda x: (x, None), lambda _, cotangent: (total(cotangent),))


@jax.custom_vjp
def summed_for_backward(x: Any) -> Any:
    return total(x)


summed_for_backward.defvjp(lambda x: (total(x), mean(x)), lambda kept, cotangent: (kept * total(cotangent),))


@jax.custom_jvp
def summed_tangent(x: Any) -> Any:
    return x


summed_tangent.defjvp(lambda primals, tangents: (primals[0], total(tangents[0])))


@jax.custom_batching.custom_vmap
def summed_batch(x: Any) -> Any:
    return x


summed_batch.def_vmap(lambda _size, _batched, x: (total(x), True))


@transformed(jax.grad)
def backward_rule(x: Any) -> Any:
    return (summed_backward(x) ** 2).sum()


@transformed(jax.grad)
def forward_and_backward_rules(x: Any) -> Any:
    return (summed_for_backward(x) ** 2).sum()


@transformed(jax.grad)
def tangent_rule_in_a_scan(x: Any) -> Any:
    return lax.scan(lambda carry, row: (summed_tangent(carry) * row, None), x[0], x)[0].sum() + total(x).sum()


@transformed(jax.vmap)
def batching_rule(x: Any) -> Any:
    return summed_batch(x) + total(x)


@transformed(jax.hessian)
def second_derivative(x: Any) -> Any:
    return total(jax.nn.softplus(summed_tangent(x).sum())) ** 2


# --- Running them.


def offloaded(function: Function) -> Function:
    return jaxhetero.offload(function, axis_name=AXIS)


def is_same(found: Any, expected: Any) -> bool:
    """Up to the order of sums. The types must be the same."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return jax.tree.structure(found) == jax.tree.structure(expected) and all(
        one.dtype == other.dtype and one.shape == other.shape and np.allclose(one, other, rtol=1e-4, atol=1e-5)
        for one, other in pairs
    )


def run(name: str, call: Callable[[], Any], expected: Any) -> list[str]:
    try:
        return [] if is_same(jax.tree.map(np.asarray, call()), expected) else [f"{name}: another result"]
    except Exception:
        return [f"{name}: {traceback.format_exc(limit=-3)}"]


def refusal(name: str, text: str, call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except ConfigError as error:
        return [] if text in str(error) else [f"{name}: {error}"]
    except Exception:
        return [f"{name}: {traceback.format_exc(limit=-3)}"]
    return [f"{name}: not refused"]


def effects_keep_their_order(x: Any) -> list[str]:
    seen: list[float] = []

    def note(value: Any) -> None:
        seen.append(float(value))

    def function(x: Any) -> Any:
        late = total(x).sum()
        for value in (x.sum(), total(x).sum(), -x.sum()):
            io_callback(note, None, value, ordered=True)
        return late

    result = float(jax.jit(offloaded(function))(x))
    jax.effects_barrier()
    own = float(x.sum())
    return [] if np.allclose(seen, [own, result, -own], rtol=1e-5) else [f"effects: {seen} around {result}"]


def main() -> None:
    jax.config.update("jax_num_cpu_devices", WORKERS)
    # XLA crashes, about every tenth time, in the program on two devices below if it has it from disk. Seen in 0.10.2,
    # also before jaxhetero has been initialized.
    jax.config.update("jax_enable_compilation_cache", False)
    jaxhetero.initialize()
    own = jaxhetero.rank()
    rows = jnp.stack([jax.random.normal(jax.random.key(rank), (6, 3)) for rank in range(WORKERS)])
    x = rows[own]
    plain = SAME | {name: transform(function) for name, (transform, function) in TRANSFORMED.items()}
    plain |= EQUIVALENT
    on_devices = jax.pmap(lambda x: {name: function(x) for name, function in plain.items()}, axis_name=AXIS)
    expected = jax.tree.map(lambda leaf: np.asarray(leaf[own]), on_devices(rows))
    wrong = effects_keep_their_order(x)
    for name, function in SAME.items():
        wrong += run(name, lambda function=function: jax.jit(offloaded(function))(x), expected[name])  # type: ignore[misc]
    for name, (text, function) in REFUSED.items():
        wrong += refusal(name, text, lambda function=function: jax.jit(offloaded(function))(x))  # type: ignore[misc]
    one_device = jax.devices()[:1]
    for name, (transform, function) in TRANSFORMED.items():
        call = transform(offloaded(function))
        wrong += run(name, lambda call=call: jax.jit(call)(x), expected[name])  # type: ignore[misc]
        in_pmap = jax.pmap(call, axis_name=AXIS, devices=one_device)
        wrong += run(
            f"{name} in pmap",
            lambda call=in_pmap: jax.tree.map(lambda leaf: leaf[0], call(x[None])),  # type: ignore[misc]
            expected[name],
        )
    with jax.checking_leaks():
        for name in ("several_indices", "conjugate_gradients", "reference_in_a_scan", "psum_under_vmap"):
            call = jax.jit(offloaded(SAME[name]))
            wrong += run(f"{name} without leaks", lambda call=call: call(x), expected[name])  # type: ignore[misc]
    jaxhetero.shutdown()
    print(json.dumps(wrong))


main()
