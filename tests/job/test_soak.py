"""A job holds no more after many rounds than after a few. For an hour of it: ``python -m tests.long.soak``."""

from tests.long.soak import soak


def test_nothing_grows() -> None:
    result = soak(12, look_every_s=0.5)
    assert result.results[0]["rounds"] > 50
    for name, holdings in result.processes.items():
        assert holdings.most_descriptors_more == 0, name
        # So short a time cannot tell a leak from memory that an allocator keeps, only one in every round.
        assert holdings.growth_bytes < 64 << 20, name
