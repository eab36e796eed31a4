"""Every collective in every transformation, against jax.lax."""

from pathlib import Path

import pytest

from tests.support.cluster import run


@pytest.mark.parametrize(("workers", "devices", "reducers"), [(3, 1, 1), (3, 2, 0)])
def test_collectives_equal_those_of_lax(workers: int, devices: int, reducers: int, tmp_path: Path) -> None:
    """jit, jvp, vjp, vmap and scan; in plain jit and in shard_map; 10 dtypes and 3 sizes; to the bit.

    Three workers, because the sum of two does not tell their order.
    """
    arguments = (str(workers), str(devices), str(tmp_path))
    for result in run("table.py", *arguments, workers=workers, reducers=reducers):
        assert result["wrong"] == {}
        assert result["count"] > 30
