"""Trainers with `--optimizer-on reducers`: they follow the curve of the optimizer on workers, and go on from there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import models.bert.finetune
import models.bert.optimizer
import models.bert.presets
import models.mask_rcnn.optimizer
import models.mask_rcnn.presets
import models.resnet.optimizer
import models.resnet.presets
from jaxhetero.optimizers._programs import lower
from models.common.checkpoint import Checkpoints
from models.common.command import RunOptions
from models.common.errors import SettingsError
from tests.support import trainers
from tests.support.cluster import run
from tests.support.programs_on_disk import FAST_COMPILATION

pytestmark = pytest.mark.timeout(2 * trainers.RUN_TIMEOUT_S)

ON_REDUCERS = ["--optimizer-on", "reducers"]
NARROW = ["--weights-dtype", "bfloat16", "--wire-dtype", "bfloat16"]
RESNET = ["--preset", "mnist-smoke", "--train-image-count", "400", "--epochs", "2", "--evaluate-every", "2"]
PRESETS = {
    "resnet": (models.resnet.optimizer, models.resnet.presets.PRESETS),
    "bert": (models.bert.optimizer, models.bert.presets.PRESETS),
    "bert.finetune": (models.bert.optimizer, models.bert.finetune.PRESETS),
    "mask_rcnn": (models.mask_rcnn.optimizer, models.mask_rcnn.presets.PRESETS),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainings")


@pytest.fixture(scope="module")
def losses(folder: Path) -> dict[str, Any]:
    """Of all trainings, by name: some in a job with two reducers, and one in a job with one reducer."""
    records = trainers.prepare_records(trainers.write_text(folder), folder / "records", held_out_share=0.0)
    # Two workers have two pieces each of a step.
    lamb = ["--preset", "bert-smoke", "--data", str(records)]
    pairs = {
        "sgd": ("resnet", [*RESNET, "--loss-scaling", "dynamic"]),
        "lars": ("resnet", [*RESNET, "--algorithm", "lars"]),
        "lamb": ("bert", lamb),
    }
    with_two: dict[str, Any] = {}
    for name, (trainer, arguments) in pairs.items():
        with_two[name] = {"trainer": trainer, "arguments": arguments}
        with_two[f"{name} on reducers"] = {"trainer": trainer, "arguments": [*arguments, *ON_REDUCERS]}
    with_two["narrow"] = {"trainer": "bert", "arguments": [*lamb, *ON_REDUCERS, *NARROW]}
    with_two["onto workers"] = {**with_two["lamb"], "start": "lamb on reducers", "step": 6}
    with_one = {"onto one reducer": {**with_two["lamb on reducers"], "start": "lamb", "step": 6}}
    found = {}
    for trainings, reducers in ((with_two, 2), (with_one, 1)):
        arguments = (str(folder), json.dumps(trainings))
        found |= run("trainings.py", *arguments, workers=2, reducers=reducers, XLA_FLAGS=FAST_COMPILATION)[0]
    return found


@pytest.mark.parametrize("name", ["sgd", "lars", "lamb"])
def test_the_loss_curve_is_that_of_the_optimizer_on_workers(losses: dict[str, Any], name: str) -> None:
    """SGD with momentum and a loss scale; LARS; LAMB with clipping, and two pieces of a step on each worker."""
    np.testing.assert_allclose(losses[f"{name} on reducers"], losses[name], rtol=1e-4)
    assert np.ptp(losses[name]) > 0.03, "the weights should move"


@pytest.mark.parametrize("name", ["sgd", "lars", "lamb"])
def test_a_checkpoint_is_that_of_the_optimizer_on_workers(losses: dict[str, Any], folder: Path, name: str) -> None:
    step = len(losses[name])
    ours, theirs = (
        Checkpoints(folder / part / "checkpoints", {}).read_arrays(step) for part in (f"{name} on reducers", name)
    )
    assert ours.keys() == theirs.keys()
    for key, array in ours.items():
        assert array.dtype == theirs[key].dtype, key
        # Softmax does not depend on the biases of keys: their gradient is rounding alone.
        if "['key']['bias']" not in key:
            size = np.linalg.norm(np.float64(theirs[key]))
            assert np.linalg.norm(np.float64(array) - theirs[key]) <= 1e-3 * size, key


def test_sixteen_bits_each_way_change_the_curve_by_their_rounding(losses: dict[str, Any]) -> None:
    assert losses["narrow"] != losses["lamb on reducers"]
    np.testing.assert_allclose(losses["narrow"], losses["lamb"], rtol=5e-3)


def test_a_run_goes_on_with_the_optimizer_elsewhere(losses: dict[str, Any]) -> None:
    """From reducers to workers, and from workers to another number of reducers."""
    for name in ("onto workers", "onto one reducer"):
        assert len(losses[name]) == len(losses["lamb"])
        np.testing.assert_allclose(losses[name], losses["lamb"], rtol=1e-4)


@pytest.mark.parametrize(("trainer", "name"), [(trainer, name) for trainer in PRESETS for name in PRESETS[trainer][1]])
def test_the_optimizer_of_every_preset_can_be_sent_to_reducers(trainer: str, name: str) -> None:
    """Those of large models are not trained here. What is sent depends on the names of the weights alone."""
    module, presets = PRESETS[trainer]
    schedule = optax.linear_schedule(0.0, 0.1, 100)
    optimizer = module.make_optimizer(presets[name].optimizer, schedule, weights_from_reducers="bfloat16")
    params = {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}
    update = lower(optimizer._reducers._home.tx, params, weights_dtype=jnp.bfloat16)
    assert all(leaf.states for leaf in update.leaves)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(SettingsError, match="--stages needs --optimizer-on workers"):
        RunOptions(optimizer_on="reducers", stages=2)
    with pytest.raises(SettingsError, match="--weights-dtype bfloat16 needs --optimizer-on reducers"):
        RunOptions(weights_dtype="bfloat16")
