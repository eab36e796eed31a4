"""A model that is cut over workers of which one is lost: the launcher starts the job anew, and it goes on."""

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from models.common.checkpoint import Checkpoints
from tests.support import trainers

pytestmark = pytest.mark.timeout(2 * trainers.RUN_TIMEOUT_S)

ARGUMENTS = ("--preset", "mnist-smoke", "--epochs", "2", "--stages", "2", "--microbatches", "4")
JOB = {"workers": 2, "reducers": 1}
LAST_STEP = 16


def lose_a_worker(output: Path, log: Path) -> Any:
    """The result of a run whose second stage is killed after the first checkpoint, and restarted once."""
    with log.open("w") as file:
        job = trainers.start(output, "models.resnet", *ARGUMENTS, **JOB, max_restarts=1, stdout=file)
    try:
        while not (output / "checkpoints" / "8").is_dir():
            assert job.poll() is None, log.read_text()
            time.sleep(0.01)
        children = psutil.Process(job.pid).children()
        next(child for child in children if child.environ().get("JAXHETERO_RANK") == "1").kill()
        assert job.wait(trainers.RUN_TIMEOUT_S) == 0, log.read_text()
    finally:
        job.kill()
        job.wait()
    return trainers.result_of(output)


def test_a_lost_stage_goes_on_from_the_checkpoint_with_the_same_bits(tmp_path: Path) -> None:
    undisturbed, restarted, log = tmp_path / "undisturbed", tmp_path / "restarted", tmp_path / "output.txt"
    wanted, _ = trainers.run(undisturbed, "models.resnet", *ARGUMENTS, **JOB)
    found = lose_a_worker(restarted, log)
    assert re.search(r"restart 1 of 1, because worker 1 \(pid \d+\) was killed by SIGKILL", log.read_text())
    assert found["first_step"] == 8
    assert found["losses"] == wanted["losses"]
    ours, theirs = (Checkpoints(run / "checkpoints", {}).read_arrays(LAST_STEP) for run in (restarted, undisturbed))
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name, strict=True)
