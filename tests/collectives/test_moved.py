"""Collectives that only move, and add nothing."""

from tests.support.cluster import run
from tests.support.programs_on_disk import FEW_PASSES


def test_every_dtype_is_moved_bit_by_bit() -> None:
    """Keys, bools, and numbers of 2, 4 and 8 bits; in every transformation; models with dropout; and no sums."""
    # XLA's older emitter computes with float8_e5m2fnuz in a wider float, which changes bits of NaNs in its own copies.
    for result in run("moved.py", workers=2, reducers=1, XLA_FLAGS=FEW_PASSES):
        assert result["wrong"] == {}
        assert result["count"] > 40
