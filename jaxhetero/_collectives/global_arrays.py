"""Sums of global arrays in plain ``jax.jit``, whose types say that they are not summed yet ("unreduced")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxhetero._collectives.mesh_axes import AxisName, axis_names
from jaxhetero._collectives.wire_dtypes import describe_leaf
from jaxhetero._compat import summable_axes
from jaxhetero.errors import ConfigError


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
    reduced: Callable[..., Any] = jax.shard_map(
        lambda *parts: tuple(reduce(list(parts), in_order)),
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=tuple(jax.P(*spec.partitions) for spec in specs),
        check_vma=False,
    )
    return jax.tree.unflatten(structure, reduced(*leaves))
