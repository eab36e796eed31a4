"""Refuses to sum a value that is the same on all devices by its type: a gradient that JAX has summed already."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxhetero._collectives.mesh_axes import AxisName, axis_names
from jaxhetero._collectives.wire_dtypes import describe_leaf
from jaxhetero._compat import partly_reduced_axes, varying_axes
from jaxhetero.errors import ConfigError


def refuse_invariant(tree: Any, axis_name: AxisName, label: str, *, mean: bool | None) -> None:
    """``ConfigError`` for a float or complex leaf that is the same along one of the axes, as far as types tell.

    In ``jax.shard_map(check_vma=True)`` the gradient of a replicated parameter is such a leaf: JAX has summed it. A
    second sum makes the gradient ``n`` times too large. A mean leaves it as it is, which is ``n`` times too large as
    well. Integers and bools, which have no gradients, and constants pass: ``psum`` of them counts devices.

    ``mean``: the caller is a mean and not a sum, for the replacement that the message offers. None: there is none.
    """
    typed = typed_axes(axis_name)
    for path, leaf in jax.tree.leaves_with_path(tree) if typed else []:
        if missing := _missing_axes(leaf, typed):
            raise ConfigError(_explain(jax.tree_util.keystr(path), leaf, missing, axis_name, label, mean=mean))


def typed_axes(axis_name: AxisName) -> tuple[str, ...]:
    """The axes of several devices over which types track what varies; none with ``check_vma=False``."""

    def index_varies(name: str) -> bool:
        # Traced apart from the caller's program, to which it would add an instruction.
        (index,) = jax.make_jaxpr(lambda: jax.lax.axis_index(name))().out_avals
        return name in varying_axes(index)

    return tuple(name for name in axis_names(axis_name) if jax.lax.axis_size(name) > 1 and index_varies(name))


def _missing_axes(leaf: Any, typed: tuple[str, ...]) -> tuple[str, ...]:
    if not isinstance(leaf, jax.core.Tracer) or not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return ()
    aval = jax.typeof(leaf)
    # prepare_leaves refuses a type of "unreduced" or "reduced", with a message of its own.
    known = varying_axes(aval) | partly_reduced_axes(aval)
    return tuple(name for name in typed if name not in known)


def _explain(
    path: str, leaf: Any, missing: tuple[str, ...], axis_name: AxisName, label: str, *, mean: bool | None
) -> str:
    axes = repr(missing[0] if len(missing) == 1 else missing)
    replicated = f"jaxhetero.replicated(params, {axis_name!r}{', mean=True' if mean else ''})"
    instead = f", or differentiate through {replicated} and do without this call" if mean is not None else ""
    return (
        f"{label}: the {describe_leaf(leaf)} at {path or 'the root'} does not vary over mesh axis {axes}. If it is the "
        "gradient of replicated parameters, JAX has summed it already, because jax.shard_map has check_vma=True, and "
        f"this call would multiply that sum. {'Either cast' if instead else 'Cast'} the parameters before they are "
        f"differentiated, params = jax.lax.pcast(params, {axes}, to='varying'){instead}. "
        "If each device's equal copy is meant to count, cast the value itself: "
        f"jax.lax.pcast(x, {axes}, to='varying')"
    )
