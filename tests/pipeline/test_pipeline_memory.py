"""What a worker of a pipeline holds in memory: what the report says, and no copies of the parameters."""

from jaxhetero.pipeline.schedules import NAMES
from tests.support.cluster import run


def test_a_worker_holds_what_the_report_says() -> None:
    """Each worker of three, in every schedule. Messages on their way come on top of it."""
    for worker in run("pipeline_memory.py", workers=3, reducers=1):
        assert worker["ratios"].keys() == set(NAMES)
        assert all(1 <= ratio <= 1.05 for ratio in worker["ratios"].values()), worker["ratios"]
        assert not worker["keeps_kernels"]
