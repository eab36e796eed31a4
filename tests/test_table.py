"""Every collective in every transformation, against jax.lax."""

from pathlib import Path

import pytest
from cluster import run


@pytest.mark.parametrize(("workers", "devices", "reducers"), [(2, 1, 1), (2, 2, 0)])
def test_collectives_equal_those_of_lax(workers: int, devices: int, reducers: int, tmp_path: Path) -> None:
    """jit, jvp, vjp, vmap and scan; in plain jit and in shard_map; 10 dtypes and 3 sizes; to the bit."""
    arguments = (str(workers), str(devices), str(tmp_path))
    for result in run("table.py", *arguments, workers=workers, reducers=reducers):
        assert result["wrong"] == {}
        assert result["count"] > 30
