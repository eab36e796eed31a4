"""The mean over microbatches has the same bits whoever has computed them."""

import jax.numpy as jnp
import pytest

from jaxhetero.errors import ConfigError
from jaxhetero.optimizers import ExactMean
from tests.support.cluster import run


def test_bits_do_not_depend_on_who_has_computed_what() -> None:
    """Any number of workers, any deal: numbers of all sizes in float64, float32 and bfloat16, and zeros."""
    histories = [
        history
        for seed, workers in enumerate([1, 2, 3, 5])
        for history in run("exact_mean.py", str(seed), workers=workers, reducers=1 if workers > 1 else 0)
    ]
    assert all(history == histories[0] for history in histories)
    assert len({digest for _, fits, digest, _ in histories[0] if fits}) == 4
    # The first step finds out how large numbers are. The second has larger ones, but not by much; the last are far
    # smaller, so that they are known less well.
    assert [(is_whole, fits) for is_whole, fits, _, _ in histories[0]] == [(True, False), *[(True, True)] * 4]
    assert all(error < 2**-24 for _, _, _, error in histories[0][1:3])


def test_what_has_grown_too_much_does_not_fit_and_is_no_number_either(alone: None) -> None:
    means = ExactMean(2)
    sums = means.init(jnp.zeros(3))
    found = []
    for size in (1, 3, 100, 100, jnp.inf, jnp.nan, 100):
        for _ in range(2):
            sums = means.add(sums, jnp.full(3, size, jnp.float32))
        mean, is_whole, fits, sums = means.mean(sums)
        assert is_whole
        found.append(float(mean[0]) if fits else None)
    assert found == [None, 3, None, 100, None, None, 100]


def test_a_microbatch_that_is_missing_or_comes_twice_is_noticed(alone: None) -> None:
    means = ExactMean(2)
    sums = means.init(jnp.zeros(3))
    for _ in range(2):
        sums = means.add(sums, jnp.ones(3))
    sums = means.mean(sums).sums
    for count in (1, 2, 3):
        for _ in range(count):
            sums = means.add(sums, jnp.ones(3))
        mean, is_whole, fits, sums = means.mean(sums)
        assert fits
        assert bool(is_whole) == (count == 2)
        assert not is_whole or mean.tolist() == [1, 1, 1]


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="microbatches is 0; it must be 1 to 65536"):
        ExactMean(0)
    with pytest.raises(ConfigError, match=r"a leaf is int32\[2\]; it must be of a floating dtype"):
        ExactMean(2).init({"w": jnp.ones(2, jnp.int32)})
    with pytest.raises(ConfigError, match="the tree has no leaf"):
        ExactMean(2).init({})
