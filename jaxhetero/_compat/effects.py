"""What JAX must neither drop nor do twice."""

from __future__ import annotations

from dataclasses import dataclass

from jax._src import effects


@dataclass(frozen=True)
class SideEffect(effects.Effect):
    """Of an equation that JAX must run once each time that the program runs, whether its results are used or not.

    Where JAX would run it again, as under ``jax.checkpoint``, JAX refuses it by ``name``.

    Why: a primitive says so in its types alone, and the classes for that are not public. Since 0.10.
    """

    name: str

    def __str__(self) -> str:
        return self.name


effects.lowerable_effects.add_type(SideEffect)
effects.control_flow_allowed_effects.add_type(SideEffect)
