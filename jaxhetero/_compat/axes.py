"""Named axes: which of them a type says something about, and which are bound where the caller is."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import jax
from jax._src import core


def varying_axes(aval: Any) -> frozenset[str]:
    """The manual mesh axes that a value under ``jax.shard_map`` varies over.

    Why: there is no public name for them, and the attribute has changed its name. Until 0.9 it was ``vma``; since 0.10
    it is ``mat.varying``.
    """
    return frozenset(aval.mat.varying)


def without_varying_axis(aval: Any, axis_name: str) -> Any:
    """The type of a value like ``aval`` that no longer varies over ``axis_name``. Why, since: ``varying_axes``."""
    kept = varying_axes(aval) - {axis_name}
    return aval.update(manual_axis_type=aval.mat.update(varying=kept))


def unreduced_axes(aval: Any) -> frozenset[str]:
    """The manual axes over which a value is the sum of what the devices have. Why and since: as ``varying_axes``."""
    return frozenset(aval.mat.unreduced) if _adds_up(aval.mat) else frozenset()


def partly_reduced_axes(aval: Any) -> frozenset[str]:
    """The manual axes over which a type is "unreduced", in any way, or "reduced". Why, since: as ``varying_axes``."""
    return frozenset(aval.mat.unreduced) | frozenset(aval.mat.reduced)


def summable_axes(leaf: Any) -> frozenset[str]:
    """The mesh axes over which a global array, outside ``jax.shard_map``, is the sum of what the devices have.

    Why: that a type has a sharding is documented, but not its attribute ``spec.unreduced``. Since 0.10.
    """
    spec = getattr(getattr(jax.typeof(leaf), "sharding", None), "spec", None)
    unreduced = frozenset(getattr(spec, "unreduced", ()))
    return unreduced if unreduced and _adds_up(spec) else frozenset()


def _adds_up(type_: Any) -> bool:
    """Since 0.12 what is unreduced may also wait for a maximum or a minimum."""
    return str(getattr(type_, "unreduced_kind", None) or "sum").endswith("sum")


def varying_instead_of_unreduced(aval: Any, axes: frozenset[str]) -> Any:
    """The type of a value that varies over ``axes``, where ``aval`` is unreduced. Why, since: ``varying_axes``."""
    left = frozenset(aval.mat.unreduced) - axes
    kind = {} if left or not hasattr(aval.mat, "unreduced_kind") else {"unreduced_kind": None}
    return aval.update(manual_axis_type=aval.mat.update(varying=varying_axes(aval) | axes, unreduced=left, **kind))


def free_axes(program: Any) -> list[str]:
    """The named axes of a jaxpr that nothing in it maps. Why: effects are not public. Since 0.10."""
    return sorted(str(effect.name) for effect in program.effects if isinstance(effect, core.NamedAxisEffect))


def unbound_axis(error: NameError) -> str | None:
    """The axis that JAX says nothing maps; None if the error says something else.

    Why: only its text tells. Since 0.10.
    """
    found = re.search(r"unbound axis name: (.+?)(\. To fix this, .*)?$", str(error), re.DOTALL)
    return found and found[1]


def bound_axes() -> frozenset[str]:
    """The named axes that something maps where the caller is. Why: there is no public list. Since 0.10."""
    return frozenset(name for name in core.get_axis_env().axis_sizes if isinstance(name, str))


def bind_axis(name: str, size: int) -> contextlib.AbstractContextManager[None]:
    """For a ``with`` block in which functions are traced as if something mapped this axis.

    Why: ``jax.make_jaxpr`` can, ``jax.jit`` cannot. Since 0.10.
    """
    manager: contextlib.AbstractContextManager[None] = core.extend_axis_env_nd([(name, size), (_mark(name), 1)])
    return manager


def is_bound_here(name: str) -> bool:
    """Whether ``bind_axis`` binds the axis, and not a transformation of JAX's. Why and since: as there."""
    return _mark(name) in core.get_axis_env().axis_sizes


def _mark(name: str) -> Any:
    return "jaxhetero.offload", name
