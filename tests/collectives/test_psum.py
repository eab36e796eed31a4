"""The sum is right, and has the same bits whatever sums it."""

from pathlib import Path

import pytest

from tests.support.cluster import ON_GPU, THROUGH_LANES, run

SMALL = "0,1,7,1023"


@pytest.mark.parametrize(
    ("workers", "reducers", "counts"),
    [(1, 1, SMALL), (2, 3, f"{SMALL},1000000"), (3, 2, f"{SMALL},1000000"), (3, 0, SMALL), (2, 2, "20000000")],
)
def test_psum_equals_numpy(workers: int, reducers: int, counts: str) -> None:
    """Every dtype, summed in rank order (16-bit floats in float32, rounded once), to the bit."""
    # Where it is the lane's memory that failover keeps, the largest table wants more than usual.
    settings = {"JAXHETERO_PINNED_BYTES": str(4 << 30)} if THROUGH_LANES else {}
    assert run("psum_table.py", counts, workers=workers, reducers=reducers, **settings) == [[]] * workers


@pytest.mark.skipif(ON_GPU, reason="XLA chooses other matrix products for the same training in one process")
@pytest.mark.parametrize(("workers", "reducer_counts"), [(1, (0, 1)), (2, (0, 3)), (3, (2,)), (4, (0, 1, 2, 3, 4))])
def test_training_has_the_same_bits_for_any_number_of_reducers(workers: int, reducer_counts: tuple[int, ...]) -> None:
    """Parameters after 20 steps: equal on all workers, for 0 to 4 reducers, for a mix, and to a sum in one process."""
    digests = set()
    for reducers in reducer_counts:
        for result in run("train_bits.py", workers=workers, reducers=reducers):
            digests.add(result["distributed"])
            digests.add(result["alone"] or result["distributed"])
    mixed = run("train_bits.py", workers=workers, reducers=1, JAXHETERO_COLOCATED_COUNT=str(workers // 2))
    digests.update(result["distributed"] for result in mixed)
    assert len(digests) == 1


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="the kernel has no huge pages")
@pytest.mark.skipif(THROUGH_LANES, reason="results of a GPU are not received in their place")
def test_large_results_lie_in_huge_pages() -> None:
    """Each lies in fresh memory, and pages of 4 KiB would cost more than receiving it."""
    for flags in run("huge_pages.py", workers=2, reducers=1):
        assert "hg" in flags
