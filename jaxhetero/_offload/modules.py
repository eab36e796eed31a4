"""Objects of flax's NNX among the arguments of a function, which may change them in place."""

from __future__ import annotations

import operator
import sys
from typing import Any

import jax


class Modules:
    """The NNX objects in a pytree, such as modules and optimizers, parted from all else in it.

    As pytrees they would lose what they share, and what a function changes in them.
    """

    def __init__(self, tree: Any) -> None:
        nnx: Any = sys.modules.get("flax.nnx")  # who has such an object has imported it
        kinds: tuple[type, ...] = () if nnx is None else (nnx.Pytree, nnx.Variable)
        leaves, self._structure = jax.tree.flatten(tree, is_leaf=lambda node: isinstance(node, kinds))
        self._places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, kinds)]
        self._objects = [leaves[index] for index in self._places]
        self.rest = [None if isinstance(leaf, kinds) else leaf for leaf in leaves]
        """What is not an NNX object."""
        self._nnx = nnx
        self._definition: Any = None
        self.values: Any = None
        """What the NNX objects hold: a pytree of arrays."""
        if self._objects:
            self._definition, self.values = nnx.split(self._objects)
        self._held = jax.tree.leaves(self.values)

    def rebuilt(self, rest: list[Any], values: Any) -> Modules:
        """The same with other arrays, in objects of their own."""
        leaves = list(rest)
        if self._objects:
            for index, made in zip(self._places, self._nnx.merge(self._definition, values), strict=True):
                leaves[index] = made
        return Modules(jax.tree.unflatten(self._structure, leaves))

    @property
    def tree(self) -> Any:
        """The pytree, with the objects in it."""
        leaves = list(self.rest)
        for index, module in zip(self._places, self._objects, strict=True):
            leaves[index] = module
        return jax.tree.unflatten(self._structure, leaves)

    def changes(self) -> Any:
        """What the objects hold, if that is not what they held at first; else None."""
        if not self._objects:
            return None
        values = self._nnx.state(self._objects)
        holds = jax.tree.leaves(values)
        is_same = len(holds) == len(self._held) and all(map(operator.is_, holds, self._held))
        return None if is_same else values

    def change(self, changes: Any) -> None:
        """Make the ``changes`` of objects like these."""
        if changes is not None:
            self._nnx.update(self._objects, changes)
