"""Updates that replace the weights, in place of those that are added to them. Nothing else can be done with them."""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl

from jaxhetero._compat import describe_caller, describe_flattener
from jaxhetero.errors import ConfigError

_BITS: dict[int, Any] = {2: np.uint16, 4: np.uint32}


def _no_key(*_: Any, **__: Any) -> NoReturn:
    raise _refusal("a function of jax.random")


# JAX computes nothing from keys of random numbers, and takes them wherever it takes arrays: in and out of functions
# that are jitted, scanned or mapped over a mesh.
_SEALED = define_prng_impl(
    key_shape=(1,),
    seed=_no_key,
    split=_no_key,
    random_bits=_no_key,
    fold_in=_no_key,
    name="jaxhetero.NewWeights",
    tag="new weights, for optax.apply_updates alone",
)


@jax.tree_util.register_pytree_node_class
class NewWeights:
    """An update that replaces the weights: ``optax.apply_updates`` adds it, and the sum is what it holds.

    Whatever else computes with it would compute with weights where it takes them for a step. So the leaf of this node
    is no number to JAX, and only JAX itself gets at it, to carry it from function to function.
    """

    __array_ufunc__ = None  # so that NumPy leaves the sum to this class

    def __init__(self, weights: Any, replaced: Any = None) -> None:
        """``replaced``: the weights whose place these take, if they are known."""
        self._dtype = np.dtype(weights.dtype)
        bits = jax.lax.bitcast_convert_type(weights, _BITS[self._dtype.itemsize]).astype(np.uint32)
        self._sealed: Any = jax.random.wrap_key_data(bits[..., None], impl=_SEALED)
        self._replaced = replaced

    def __radd__(self, params: Any) -> Any:
        if self._replaced is not None and params is not self._replaced:
            raise _refusal(f"a sum with other parameters than update() was given, in {describe_caller()},")
        bits = jax.random.key_data(self._sealed)[..., 0].astype(_BITS[self._dtype.itemsize])
        return jax.lax.bitcast_convert_type(bits, self._dtype)

    def __repr__(self) -> str:
        return f"NewWeights({self._dtype}{list(jnp.shape(self._sealed))})"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise _refusal(f"arithmetic in {describe_caller()}")

    __add__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __matmul__ = __rmatmul__ = __neg__ = __pos__ = __abs__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __array__ = __float__ = _refuse

    def tree_flatten(self) -> tuple[tuple[Any], np.dtype[Any]]:
        """For JAX. Whoever else takes updates apart means to compute with them."""
        flattener = describe_flattener()
        if flattener is not None:
            raise _refusal(flattener)
        return (self._sealed,), self._dtype

    @classmethod
    def tree_unflatten(cls, dtype: np.dtype[Any], leaves: Any) -> NewWeights:
        """What JAX has carried."""
        made = cls.__new__(cls)
        (made._sealed,) = leaves
        made._dtype, made._replaced = dtype, None
        return made


def is_new_weights(node: Any) -> bool:
    """For ``is_leaf`` of ``jax.tree.map``."""
    return isinstance(node, NewWeights)


def _refusal(what: str) -> ConfigError:
    return ConfigError(
        f"the updates of an optimizer on reducers are new weights, not steps, and {what} would change them: give them "
        "to optax.apply_updates alone, with the parameters that update() was given. What transforms gradients or steps "
        "goes inside, on_reducers(optax.chain(...))"
    )
