"""The mean over the microbatches of a step, with the same bits however many workers have computed them.

Sums of floats depend on their order, and the order on who has computed what. So every gradient is rounded to a whole
multiple of a small step, a power of two that follows from the largest gradient of the leaf in the steps before. Sums of
whole numbers are exact in any order: within a worker, and at the reducers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxhetero._collectives.api import psum
from jaxhetero._collectives.wire_dtypes import describe_leaf, sum_dtype
from jaxhetero.errors import ConfigError

# How many times, as a power of two, the largest number of a leaf may grow from one step to the next.
_SPARE_BITS = 2
# The largest number of a leaf is known by its place: 0 if it is zero; p if it is below 2 ** (_LOWEST + p); and the last
# one if it is too large for the others, or not finite.
_PLACES = 96
_LOWEST = -70
# The exponent of a leaf that has been zero so far: no other number fits.
_UNKNOWN = -10_000


class ExactSums(NamedTuple):
    """What one worker has added up in a step so far. ``exponents`` are the same on all workers.

    Example:
      >>> from jaxhetero.optimizers import ExactMean
      >>> ExactMean(8).init({"w": jnp.ones(2)}).totals
      {'w': Array([0, 0], dtype=int32)}
    """

    totals: Any
    """Whole numbers, of the shapes of what is added: int32, or int64 for float64."""
    places: Any
    """int32[96] a leaf: how many microbatches had their largest number in which range."""
    exponents: Any
    """int32[] a leaf: numbers below 2 to the power of it fit."""


class ExactResult(NamedTuple):
    """What ``ExactMean.mean`` gives; the same on all workers.

    Example:
      >>> from jaxhetero.optimizers import ExactMean
      >>> means = ExactMean(1)
      >>> result = means.mean(means.add(means.init(jnp.float32(0)), jnp.float32(0.5)))
      >>> bool(result.is_whole), bool(result.fits)  # the first step only finds out how large the numbers are
      (True, False)
    """

    mean: Any
    """The mean over the microbatches, in float32, or float64 for float64. Of use where both below hold."""
    is_whole: jax.Array
    """bool[]: every microbatch is in it, once. If not, since a worker was lost, compute all of them again."""
    fits: jax.Array
    """bool[]: no number was too large for its leaf's exponent, or none at all. If not, the step must be left out."""
    sums: ExactSums
    """For the next step."""


@dataclass(frozen=True)
class ExactMean:
    """A mean over ``microbatches`` that does not depend on how many workers computed them, nor who which.

    A step has a fixed number of microbatches, which the workers share out in any way. Each is computed by the same
    program at the same shapes. Its worker adds the gradients with ``add``, and after its last one all workers call
    ``mean``, which sums over them. A worker that has computed none calls ``mean`` as well.

    With 8 microbatches, numbers are rounded to whole multiples of at most 2**-25 of the largest number of their leaf
    in the step before; with 16, of 2**-24. That is how float32 rounds the largest number itself. The workers exchange
    as many bytes as a sum of float32 needs, and 384 bytes a leaf.

    A step in which a leaf has grown to more than four times what it was does not fit and must be left out, as with
    ``dynamic_loss_scale``; so must the first step, which finds out how large the numbers are, and each with a number of
    2**24 or more. Where numbers shrink, the multiples follow by one bit a step.

    Args:
      microbatches: how many a step has, on all workers together, 1 to 65536.

    Raises:
      ConfigError: ``microbatches`` is out of range.

    Example:
      A step of four microbatches, of which this worker, being alone, computes all. The rest of a train step is left out
      where the mean is not to be used:

      >>> from jaxhetero.optimizers import ExactMean
      >>> means = ExactMean(4)
      >>> sums = means.init(jnp.float32(0))
      >>> for step in range(2):
      ...     for gradient in (0.1, 0.2, 0.3, 0.4):
      ...         sums = means.add(sums, jnp.float32(gradient))
      ...     mean, is_whole, fits, sums = means.mean(sums)
      ...     print(f"{mean:.3f}", is_whole and fits)
      0.000 False
      0.250 True
    """

    microbatches: int

    def __post_init__(self) -> None:
        if not 1 <= self.microbatches <= 65536:
            raise ConfigError(f"ExactMean: microbatches is {self.microbatches}; it must be 1 to 65536")

    def init(self, tree: Any) -> ExactSums:
        """The sums before the first step; with the ``exponents`` of an earlier one, those before the next.

        Args:
          tree: arrays of the shapes and floating dtypes that ``add`` will get, such as the parameters, or
            ``jax.ShapeDtypeStruct``.

        Raises:
          ConfigError: a leaf is not of a floating dtype, or there is none.
        """
        leaves = jax.tree.leaves(tree)
        if not leaves:
            raise ConfigError("ExactMean: the tree has no leaf")
        for leaf in leaves:
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                raise ConfigError(f"ExactMean: a leaf is {describe_leaf(leaf)}; it must be of a floating dtype")
        return ExactSums(
            jax.tree.map(lambda leaf: jnp.zeros(jnp.shape(leaf), _whole(jnp.result_type(leaf))), tree),
            jax.tree.map(lambda _: jnp.zeros(_PLACES, jnp.int32), tree),
            jax.tree.map(lambda _: jnp.full([], _UNKNOWN, jnp.int32), tree),
        )

    def add(self, sums: ExactSums, tree: Any) -> ExactSums:
        """``sums`` and one microbatch. Does not communicate."""
        with jax.numpy_dtype_promotion("standard"):
            places = jax.tree.map(lambda old, leaf: old + _vote(leaf), sums.places, tree)
            totals = jax.tree.map(self._add, sums.totals, tree, sums.exponents)
        return ExactSums(totals, places, sums.exponents)

    def mean(self, sums: ExactSums) -> ExactResult:
        """The mean over all microbatches of the step. All workers call it, after the last ``add`` of each.

        Does not block, as ``psum``, whose errors it has.
        """
        (totals, places), who = psum((sums.totals, sums.places), who=True)
        counts = jnp.stack([votes.sum() for votes in jax.tree.leaves(places)])
        is_whole = who.same & jnp.all(counts == self.microbatches)
        highest = jax.tree.map(_highest, places)
        fits = jnp.stack(jax.tree.leaves(jax.tree.map(_fits, highest, sums.exponents))).all()
        exponents = jax.tree.map(
            lambda place, old: jnp.where(is_whole, _next_exponent(place, old), old), highest, sums.exponents
        )
        mean = jax.tree.map(self._to_mean, totals, sums.exponents)
        totals, places = jax.tree.map(jnp.zeros_like, (totals, places))
        return ExactResult(mean, is_whole, fits, ExactSums(totals, places, exponents))

    def _bits(self, whole: Any) -> int:
        """How many bits, but for the sign, a number of one microbatch has, so that the sum of all stays in range."""
        return 8 * int(jnp.dtype(whole).itemsize) - 1 - math.ceil(math.log2(self.microbatches))

    def _add(self, total: jax.Array, leaf: jax.Array, exponent: jax.Array) -> jax.Array:
        bits = self._bits(total.dtype)
        floating = sum_dtype(leaf.dtype)
        scale = jnp.where(exponent == _UNKNOWN, 0, jnp.ldexp(jnp.ones([], floating), bits - exponent))
        rounded = jnp.round(leaf.astype(floating) * scale)
        # What does not fit is counted in another place, and must not wrap here.
        largest = 2.0**bits * (1 - float(np.finfo(floating).eps) / 2)
        return total + jnp.clip(jnp.nan_to_num(rounded), -largest, largest).astype(total.dtype)

    def _to_mean(self, total: jax.Array, exponent: jax.Array) -> jax.Array:
        floating = jnp.float64 if total.dtype == jnp.int64 else jnp.float32
        step = jnp.ldexp(jnp.ones([], floating), jnp.maximum(exponent, _LOWEST) - self._bits(total.dtype))
        return total.astype(floating) / self.microbatches * step


def _whole(dtype: Any) -> Any:
    return jnp.int64 if dtype == jnp.float64 else jnp.int32


def _vote(leaf: jax.Array) -> jax.Array:
    """int32[96]: 1 in the place of the leaf's largest number."""
    largest = jnp.max(jnp.abs(leaf.astype(sum_dtype(leaf.dtype))), initial=0)
    _, exponent = jnp.frexp(largest)
    place = jnp.clip(exponent - _LOWEST, 1, _PLACES - 1)
    place = jnp.where(largest == 0, 0, jnp.where(jnp.isfinite(largest), place, _PLACES - 1))
    return (jnp.arange(_PLACES) == place).astype(jnp.int32)


def _highest(votes: jax.Array) -> jax.Array:
    """int32[]: the last place that has votes."""
    return jnp.max(jnp.where(votes > 0, jnp.arange(_PLACES), 0))


def _fits(place: jax.Array, exponent: jax.Array) -> jax.Array:
    return (place == 0) | ((place < _PLACES - 1) & (_LOWEST + place <= exponent))


def _next_exponent(place: jax.Array, old: jax.Array) -> jax.Array:
    """Room to grow at once, and less of it step by step where numbers become smaller."""
    tells_nothing = (place == 0) | (place == _PLACES - 1)
    return jnp.where(tells_nothing, old, jnp.maximum(_LOWEST + place + _SPARE_BITS, old - 1))
