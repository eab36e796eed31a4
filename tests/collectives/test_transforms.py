"""The collectives under JAX's transformations."""

import pytest

from tests.support.cluster import run


@pytest.mark.parametrize(("workers", "reducers"), [(3, 2)])
def test_transformations_of_the_collectives(workers: int, reducers: int) -> None:
    """jit, scan, while, cond, vmap, jvp, grad, checkpoint, custom_vjp, donation: right values, and compiled once."""
    for result in run("transforms.py", workers=workers, reducers=reducers):
        assert result["failed"] == []
        assert result["count"] > 0
        assert result["compiled"] == 1
