"""Models that are cut over several worker processes."""

import json
from typing import Any

import pytest

from tests.support.cluster import Cluster, run

WAYS = {"tcp": {"JAXHETERO_SHARED_MEMORY": "0"}, "shared memory": {}}
# The gradient of one bias of BERT is a sum that nearly cancels: jax.grad itself is 1.4e-5 from the truth there.
MOST_ERROR = {"bert": 1e-5}


def steps(
    model: str, workers: int, cuts: list[dict[str, Any]], *, way: str = "shared memory", reducers: int = 1
) -> list[list[Any]]:
    """What each worker has found, of each cut; all have the same gradients, which are those of jax.grad."""
    of_workers = run("pipeline_step.py", model, json.dumps(cuts), workers=workers, reducers=reducers, **WAYS[way])
    of_cuts = [list(found) for found in zip(*of_workers, strict=True)]
    for found in of_cuts:
        assert found[0]["error"] < MOST_ERROR.get(model, 2e-6)
        assert len({worker["digest"] for worker in found}) == 1
        for worker in found:
            assert worker["value"] == found[worker["replica"][0] * workers // found[0]["replica"][1]]["value"]
    return of_cuts


def step(model: str, workers: int, *, reducers: int = 1, **options: Any) -> list[Any]:
    """The same of one cut."""
    return steps(model, workers, [options], reducers=reducers)[0]


def test_every_schedule_over_tcp_and_in_shared_memory() -> None:
    cuts = [
        {"stages": 2, "schedule": "interleaved"},
        {"stages": 2, "schedule": "zero_bubble"},
        {"stages": 2, "schedule": "breadth_first", "stages_per_worker": 2},
        {"stages": 2, "schedule": "virtual", "stages_per_worker": 2},
    ]
    digests = [[found[0]["digest"] for found in steps("tied", 2, cuts, way=way)] for way in WAYS]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("model", ["encoder-decoder", "unet", "bert", "scan"])
def test_skips_dropout_and_outputs_over_three_stages(model: str) -> None:
    found = step(model, 3, stages=3, schedule="interleaved")
    assert found[0]["stages"] == 3


def test_replicas_reduce_the_gradients_of_their_stages() -> None:
    found = step("tied", 4, stages=2, schedule="breadth_first", stages_per_worker=2, reducers=2)
    assert [worker["replica"] for worker in found] == [[0, 2], [0, 2], [1, 2], [1, 2]]


def test_the_statistics_of_batch_norm_stay_with_their_stage() -> None:
    step("resnet", 2, stages=2, schedule="interleaved")


@pytest.mark.parametrize("costs", ["flops", "measured"])
def test_number_of_stages_and_schedule_may_be_chosen(costs: str) -> None:
    """What rank 0 measures is what all decide by."""
    found = step("decoder", 2, costs=costs)
    assert len({worker["stages"] for worker in found}) == 1


def test_none_of_the_user_and_values_of_any_dtype() -> None:
    """In parameters, batch, state, optimizer and checkpoint; keys, bools, int4 and float8 from stage to stage."""
    for worker in run("pipeline_values.py", workers=2, reducers=1):
        found = worker["none_is_the_users"]
        assert found.pop("parted")
        assert max(found.values()) < 1e-6
        assert worker["stages_send_every_dtype"]["received"]
        assert worker["stages_send_every_dtype"]["gradients"] < 1e-6
        assert worker["gathered_keys"] == {"same": True, "nobody": True}


def train(workers: int, model: dict[str, Any], **cut: Any) -> list[Any]:
    """What each worker has found; each drew its own parameters, and a checkpoint has everything."""
    found = run("pipeline_training.py", json.dumps(model), json.dumps(cut), workers=workers, reducers=1)
    for worker in found:
        assert worker["same_start"]
        assert worker["same_part"]
        # Adam divides a gradient by its own size; where that is nearly nothing, so may be what is right of it.
        assert max(worker["error"], worker["state_error"]) < 1e-5
    return found


def test_training_is_that_of_the_whole_model() -> None:
    """The norm that clips is that of all stages."""
    leaves = [worker["own_leaves"] for worker in train(2, {"tied": True, "layers": 2})]
    assert min(leaves) > 0
    assert sum(leaves) == 1 + 2 * 8 + 1 + 1, "each leaf on one worker, but for the tied embedding, which both have"


@pytest.mark.parametrize("cut", [{"schedule": "interleaved"}, {"schedule": "virtual", "stages_per_worker": 2}], ids=str)
def test_of_layers_that_are_stacked_each_worker_holds_its_own(cut: dict[str, Any]) -> None:
    """And nothing else: not in its parameters, and not in the state of the optimizer."""
    found = train(2, {"scan": True, "layers": 8}, **cut)
    assert sum(worker["own_elements"] for worker in found) == found[0]["elements"]
    assert max(worker["own_elements"] for worker in found) < 0.7 * found[0]["elements"]
    assert sum(found[0]["reported_elements"]) == found[0]["elements"]


def test_different_models_on_two_workers() -> None:
    with Cluster(2, 1) as cluster:
        cluster.start_reducers()
        options = json.dumps([{"stages": 2, "schedule": "interleaved"}])
        cluster.start_worker(0, "pipeline_step.py", "decoder", options)
        cluster.start_worker(1, "pipeline_step.py", "tied", options)
        for outcome in cluster.wait_workers():
            assert "MismatchError: pipeline: the loss or a setting of rank 1 is another than that of rank 0" in (
                outcome.errors
            )
