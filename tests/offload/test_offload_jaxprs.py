"""``offload`` and the jaxprs that JAX and libraries make: each gives what jax.lax gives, or is refused by its name."""

from tests.support.cluster import run
from tests.support.programs_on_disk import FAST_COMPILATION


def test_foreign_jaxprs_give_what_those_of_lax_give() -> None:
    """Wherever a jaxpr is kept, whatever its values are, and whatever transformation comes after offload."""
    assert run("offload_jaxprs.py", workers=2, reducers=1, XLA_FLAGS=FAST_COMPILATION) == [[], []]
