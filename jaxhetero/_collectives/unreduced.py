"""Values of type "unreduced", each the sum of what the devices have: under ``jax.shard_map`` and in plain ``jax.jit``.

Their sums have no derivative here. Gradients are such values, and are summed after they have been taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jaxhetero._collectives.mesh_axes import AxisName, axis_names
from jaxhetero._collectives.wire_dtypes import describe_leaf
from jaxhetero._compat import summable_axes, unreduced_axes, varying_instead_of_unreduced
from jaxhetero.errors import ConfigError

# A value that is unreduced under jax.shard_map as one that varies: the same bytes. jax.lax.pcast does not do this.
_as_varying = Primitive("jaxhetero_as_varying")


def as_varying(value: Any) -> Any:
    """What this device has of ``value``, if that is unreduced under ``jax.shard_map``; else ``value``."""
    axes = unreduced_axes(jax.typeof(value))
    return _as_varying.bind(value, axes=axes) if axes else value


def has_unreduced(tree: Any) -> bool:
    """Whether a leaf is a global array of type "unreduced"."""
    return any(summable_axes(leaf) for leaf in jax.tree.leaves(tree))


def over_mesh(tree: Any, axis_name: AxisName, label: str, reduce: Callable[[Any, AxisName], Any]) -> Any:
    """``reduce(leaves, axes)`` of what each device has of ``tree``, with the axes over which the leaves are unreduced.

    Every leaf must be unreduced over the same axes, which are those of ``axis_name`` where that is given.
    """
    leaves, structure = jax.tree.flatten(tree)
    types = [jax.typeof(leaf) for leaf in leaves]
    axes = frozenset(axis_names(axis_name)) or frozenset.union(*map(summable_axes, leaves))
    for path, leaf in jax.tree.leaves_with_path(tree):
        if (found := summable_axes(leaf)) != axes:
            raise ConfigError(
                f"{label}: the {describe_leaf(leaf)} at {jax.tree_util.keystr(path) or 'the root'} is unreduced over "
                f"{sorted(found) or 'no axis'}, and the sum goes over {sorted(axes)}; if it is a gradient, make its "
                f"parameters jax.reshard(params, jax.P(reduced={set(axes)})) before they are differentiated"
            )
    mesh = types[0].sharding.mesh
    in_order = tuple(name for name in mesh.axis_names if name in axes)
    specs = [type_.sharding.spec for type_ in types]
    # Without types, where a value that is unreduced outside is a device's own part inside.
    reduced: Any = jax.custom_jvp(
        jax.shard_map(
            lambda *parts: tuple(reduce(list(parts), in_order)),
            mesh=mesh,
            in_specs=tuple(specs),
            out_specs=tuple(jax.P(*spec.partitions) for spec in specs),
            check_vma=False,
        )
    )
    reduced.defjvp(_refuse_derivative)
    return jax.tree.unflatten(structure, reduced(*leaves))


def _refuse_derivative(*_: Any, **_params: Any) -> NoReturn:
    raise ConfigError(
        'the sum of a value of type "unreduced" has no derivative; differentiate before the sum, as a train step does'
    )


_as_varying.def_abstract_eval(varying_instead_of_unreduced)
_as_varying.def_impl(lambda value, axes: value)
mlir.register_lowering(_as_varying, lambda context, value, axes: [value])
ad.primitive_jvps[_as_varying] = _refuse_derivative
