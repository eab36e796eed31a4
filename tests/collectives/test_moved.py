"""Collectives that only move, and add nothing."""

from tests.support.cluster import run


def test_every_dtype_is_moved_bit_by_bit() -> None:
    """Keys, bools, and numbers of 2, 4 and 8 bits; in every transformation; models with dropout; and no sums."""
    for result in run("moved.py", workers=2, reducers=1):
        assert result["wrong"] == {}
        assert result["count"] > 40
