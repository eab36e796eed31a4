"""Where a tree has leaves, and where it has None of the user's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxhetero.errors import ConfigError
from jaxhetero.pipeline.rows import is_leaf


@dataclass(frozen=True)
class Layout:
    """For each leaf and each None of a whole tree, in their order, whether it is a leaf.

    In a worker's own tree there is None also in the place of a leaf that only others hold. The layout tells the two
    apart: what is None in the whole tree is the user's, and stays.
    """

    has_leaf: tuple[bool, ...]

    @classmethod
    def of(cls, tree: Any) -> Layout:
        """Of a whole tree."""
        return cls(tuple(node is not None for node in jax.tree.leaves(tree, is_leaf=is_leaf)))

    def leaves(self, tree: Any, what: str) -> list[Any]:
        """The leaves of a whole tree or of a worker's own, without the user's None.

        Raises:
          ConfigError: the tree is another one; ``what`` names it.
        """
        nodes = jax.tree.leaves(tree, is_leaf=is_leaf)
        if len(nodes) != len(self.has_leaf):
            raise ConfigError(
                f"pipeline: {what} has {len(nodes)} leaves, with each None; the loss was cut for {len(self.has_leaf)}"
            )
        for number, (node, has) in enumerate(zip(nodes, self.has_leaf, strict=True)):
            if node is not None and not has:
                raise ConfigError(
                    f"pipeline: {what} has a leaf at place {number}, for which the loss was cut with None"
                )
        return [node for node, has in zip(nodes, self.has_leaf, strict=True) if has]

    def filled(self, tree: Any, leaves: Mapping[int, Any]) -> Any:
        """A tree like ``tree`` with these leaves, by their numbers among the leaves; the others are None."""
        numbers = iter(range(sum(self.has_leaf)))
        nodes = [leaves.get(next(numbers)) if has else None for has in self.has_leaf]
        return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=is_leaf), nodes)
