"""A collective of rows moves each worker's row alone; programs/table.py compares the results with jax.lax."""

import pytest

from tests.support.cluster import run


@pytest.mark.parametrize("failover", ["0", "1"])
def test_no_byte_moves_that_need_not(failover: str) -> None:
    """Of S bytes, psum_scatter sends S and receives S/n; all_gather sends S/n, and receives S less the own row."""
    workers = 4
    for result in run("row_bytes.py", workers=workers, reducers=workers, JAXHETERO_FAILOVER=failover):
        assert result["right"]
        sent, received = result["psum_scatter"]
        assert 1 <= sent <= 1.02
        assert 1 / workers <= received <= 1.05 / workers
        sent, received = result["all_gather"]
        assert 1 / workers <= sent <= 1.05 / workers
        assert 1 - 1 / workers <= received <= 1.02 * (1 - 1 / workers)
