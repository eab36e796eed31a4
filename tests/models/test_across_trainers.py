"""Trainers with `--across-steps`: the bits of the ordinary step, in curves and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import models.resnet.optimizer
import models.resnet.presets
from models.common.checkpoint import Checkpoints
from models.common.command import RunOptions
from models.common.errors import SettingsError
from tests.support import trainers
from tests.support.cluster import run
from tests.support.programs_on_disk import FAST_COMPILATION

pytestmark = pytest.mark.timeout(2 * trainers.RUN_TIMEOUT_S)

ACROSS = ["--across-steps"]
SGD = ["--preset", "mnist-smoke", "--train-image-count", "200", "--epochs", "2", "--evaluate-every", "2"]
SGD += ["--loss-scaling", "dynamic"]
NAMES = ["sgd", "lamb", "sgd on reducers"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainings")


@pytest.fixture(scope="module")
def losses(folder: Path) -> dict[str, Any]:
    """Of all trainings, by name."""
    records = trainers.prepare_records(trainers.write_text(folder), folder / "records", held_out_share=0.0)
    lamb = ["--preset", "bert-smoke", "--data", str(records), "--micro-batch", "8"]
    ordinary = {
        "sgd": {"trainer": "resnet", "arguments": SGD},
        "lamb": {"trainer": "bert", "arguments": lamb},
        "sgd on reducers": {"trainer": "resnet", "arguments": [*SGD, "--optimizer-on", "reducers"]},
    }
    trainings: dict[str, Any] = {}
    for name, training in ordinary.items():
        trainings[name] = training
        trainings[f"{name} across"] = {**training, "arguments": [*training["arguments"], *ACROSS]}
    half = len_of_epoch()
    trainings["sgd again"] = {**trainings["sgd across"], "start": "sgd", "step": half}
    trainings["sgd back"] = {**trainings["sgd"], "start": "sgd across", "step": half}
    return run("trainings.py", str(folder), json.dumps(trainings), workers=2, reducers=2, XLA_FLAGS=FAST_COMPILATION)[0]


def len_of_epoch() -> int:
    preset = models.resnet.presets.PRESETS["mnist-smoke"]
    return 200 // preset.global_batch


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_curve_has_the_bits_of_the_ordinary_step(losses: dict[str, Any], name: str) -> None:
    """SGD with momentum and a loss scale, LAMB with clipping."""
    assert losses[f"{name} across"] == losses[name]
    assert np.ptp(losses[name]) > 0.02, "the weights should move"


@pytest.mark.parametrize("name", NAMES)
def test_so_has_a_checkpoint(losses: dict[str, Any], folder: Path, name: str) -> None:
    step = len(losses[name])
    ours, theirs = (
        Checkpoints(folder / part / "checkpoints", {}).read_arrays(step) for part in (f"{name} across", name)
    )
    assert ours.keys() == theirs.keys()
    for key, array in ours.items():
        assert array.tobytes() == theirs[key].tobytes(), key


@pytest.mark.parametrize("name", ["sgd again", "sgd back"])
def test_a_run_goes_on_with_the_other_kind_of_step(losses: dict[str, Any], name: str) -> None:
    assert losses[name] == losses["sgd"]


def test_what_does_not_go_together_is_refused() -> None:
    for options in ({"stages": 2}, {"microbatches": 4}):
        with pytest.raises(SettingsError, match="--across-steps does not go with --stages and --microbatches"):
            RunOptions(across_steps=True, **options)
    config = models.resnet.presets.PRESETS["mnist-smoke"].optimizer
    with pytest.raises(SettingsError, match="each worker has 4 pieces of it: give a larger --micro-batch"):
        models.resnet.optimizer.make_optimizer(config, lambda step: 0.1, accumulate_every=4, is_across_steps=True)
