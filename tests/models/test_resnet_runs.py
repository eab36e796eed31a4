"""The ResNet trainer: its settings, and whole runs through the launcher."""

from __future__ import annotations

import re
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import jaxhetero
from models.common.batches import BatchSplit
from models.common.checkpoint import Checkpoints
from models.common.command import parse_options, run_command
from models.common.errors import SettingsError
from models.resnet import __main__ as command
from models.resnet.presets import PRESETS
from tests.support import trainers

pytestmark = pytest.mark.timeout(2 * trainers.RUN_TIMEOUT_S)


def split_of(global_batch: int, *, rank: int = 0, worker_count: int = 1, micro_batch: int = 0) -> BatchSplit:
    return BatchSplit.make(global_batch, micro_batch, rank=rank, worker_count=worker_count)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_runs_on_four_workers(name: str) -> None:
    preset = PRESETS[name]
    split = split_of(preset.global_batch, worker_count=4, micro_batch=preset.micro_batch)
    assert 4 * split.micro_batch * split.accumulate_every == preset.global_batch


def test_overrides_start_from_the_named_preset() -> None:
    options = parse_options(
        command.Options, PRESETS, "mnist", ["--preset", "mnist-smoke", "--global-batch", "40", "--norm", "group"]
    )
    smoke = PRESETS["mnist-smoke"]
    assert options.settings == replace(smoke, global_batch=40, model=replace(smoke.model, norm="group"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--epochs", "1"], 0.5),
        (["--epochs=1", "--preset", "mnist-smoke"], 0.5),
        (["--epochs", "2"], 1.0),
        (["--epochs", "1", "--warmup-epochs", "0.1"], 0.1),
        (["--epochs", "4", "--preset", "resnet50-goyal"], 2.0),
        (["--epochs", "5", "--preset", "resnet50-goyal"], 2.5),
    ],
)
def test_a_run_no_longer_than_the_warm_up_warms_up_for_half_of_its_time(arguments: list[str], expected: float) -> None:
    assert command.read_options(arguments).settings.optimizer.warmup_epochs == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "nope"], "there is no preset 'nope'; there are cifar10, fashion-mnist, mnist, mnist-smoke"),
        (["--epochs", "0"], "epochs is 0; it must be at least 1"),
        (["--max-shift", "-1"], "max_shift is -1"),
        (["--warmup-epochs", "20"], "warmup_epochs is 20.0; it must be at least 0 and below epochs (20)"),
        (["--train-image-count", "50"], "train_image_count is 50; it must be at least the global batch (100)"),
        (["--train-image-count", "4001"], "there are 4000 training images; train_image_count is 4001"),
        (["--class-count", "9"], "the labels are 0 to 9; class_count is 9, so they must be 0 to 8"),
        (["--preset", "cifar10"], "--data is missing: the folder with the images of the dataset cifar10"),
        (["--preset", "cifar10", "--data", "/nowhere"], "there is no folder /nowhere"),
        (["--preset", "fashion-mnist", "--data", "/"], "there is no file train-images-idx3-ubyte or"),
        (["--resume", "latest"], "--resume needs --output"),
        (["--micro-batch", "3"], "micro_batch is 3; it must divide the 100 examples of a worker"),
        (["--stages", "2"], "--stages is 2; the 1 workers of the job must be a multiple of that"),
        (["--microbatches", "3"], "--microbatches is 3; the 100 examples of a step must be a multiple of that"),
        (["--microbatches", "-1"], "microbatches is -1; it must be at least 1"),
        (["--microbatches", "2", "--wire-dtype", "bfloat16"], "--microbatches works with --wire-dtype float32 alone"),
        (["--microbatches", "2", "--optimizer-on", "reducers"], "--microbatches needs --optimizer-on workers"),
        (["--norm", "group", "--group-count", "5"], "group_count is 5; it must divide the 16 channels"),
        (["--epochs", "1", "--warmup-epochs", "1"], "warmup_epochs is 1.0; it must be at least 0 and below epochs (1)"),
        (["--output", "/proc/run"], "cannot write /proc/run: a file in /proc failed: "),
        (["--json", "/proc/result.json"], "cannot write /proc/result.json: a file in /proc failed: "),
        (["--json", "/nowhere/result.json"], "cannot write /nowhere/result.json: there is no folder /nowhere"),
    ],
)
def test_bad_settings_are_named(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["models.resnet", *arguments])
    assert run_command(command.run) in (1, 2)
    jaxhetero.shutdown()
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_batch_that_workers_cannot_share_equally_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"global_batch 100 cannot be shared equally by 3 workers; .* is 102"):
        split_of(100, worker_count=3)


# --- whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def group_norm_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[dict[str, Any], str]]:
    """The same preset on one worker and on four, with a network that looks at one image at a time."""
    folder = tmp_path_factory.mktemp("runs")
    arguments = ("--preset", "mnist-smoke", "--norm", "group")
    return {
        1: trainers.run(folder / "one", "models.resnet", *arguments),
        4: trainers.run(folder / "four", "models.resnet", *arguments, workers=4, reducers=2),
    }


def test_four_workers_train_like_one(group_norm_runs: dict[int, tuple[dict[str, Any], str]]) -> None:
    """Four workers of 25 images and one worker of 100 follow one loss curve."""
    (one, _), (four, _) = group_norm_runs[1], group_norm_runs[4]
    assert (one["worker_count"], four["worker_count"]) == (1, 4)
    assert len(one["losses"]) == one["step_count"] == 24
    assert np.mean(one["losses"][-8:]) < 0.95 * np.mean(one["losses"][:8])
    np.testing.assert_allclose(four["losses"], one["losses"], rtol=trainers.LOSS_CURVE_TOLERANCE)
    counts = [run["evaluations"][-1]["test_correct_count"] for run in (one, four)]
    assert abs(counts[0] - counts[1]) <= 5


def test_two_stages_train_like_one_worker(tmp_path: Path) -> None:
    """With the same pieces. Any number of stages goes on from their checkpoint."""
    arguments = ("--preset", "mnist-smoke", "--epochs", "2")
    one, _ = trainers.run(tmp_path / "one", "models.resnet", *arguments, "--micro-batch", "25")
    stages = ("--stages", "2", "--microbatches", "4")
    two, output = trainers.run(tmp_path / "two", "models.resnet", *arguments, *stages, workers=2, reducers=1)
    np.testing.assert_allclose(two["losses"], one["losses"], rtol=trainers.LOSS_CURVE_TOLERANCE)
    counts = [run["evaluations"][-1]["test_correct_count"] for run in (one, two)]
    assert abs(counts[0] - counts[1]) <= 5
    assert "2 stages on 2 workers, 4 microbatches" in output
    assert "identical on 2 workers" in output
    more = ("--preset", "mnist-smoke", "--epochs", "3", "--resume", "latest", "--global-batch", "100")
    again, _ = trainers.run(tmp_path / "two", "models.resnet", *more)
    assert (again["first_step"], again["step_count"]) == (16, 8)


def test_any_number_of_workers_ends_with_the_same_bits(tmp_path: Path) -> None:
    """With batch normalisation, five microbatches a step, and on three workers no equal shares of them."""
    arguments = ("--preset", "mnist-smoke", "--epochs", "2", "--microbatches", "5")
    one, _ = trainers.run(tmp_path / "1", "models.resnet", *arguments)
    three, output = trainers.run(tmp_path / "3", "models.resnet", *arguments, workers=3, reducers=1)
    assert "identical on 3 workers" in output
    assert np.mean(one["losses"][-4:]) < 0.95 * np.mean(one["losses"][:4])
    # The loss of the first step, in which nothing fits, is an ordinary sum.
    assert three["losses"] == [pytest.approx(one["losses"][0]), *one["losses"][1:]]
    same = ("weights_digest", "evaluations")
    assert [three[name] for name in same] == [one[name] for name in same]
    shutil.rmtree(tmp_path / "3" / "checkpoints" / str(one["step_count"]))
    again = ("--resume", "latest")
    two, _ = trainers.run(tmp_path / "3", "models.resnet", *arguments, *again, workers=2, reducers=1)
    assert 0 < two["first_step"] < one["step_count"]
    assert [two[name] for name in same] == [one[name] for name in same]
    assert two["losses"][1:] == one["losses"][1:]


def test_run_on_four_workers_reports_what_the_transport_measured(
    group_norm_runs: dict[int, tuple[dict[str, Any], str]],
) -> None:
    result, output = group_norm_runs[4]
    assert result["gradient_bytes"] == 4 * result["parameter_count"]
    assert 1.0 <= result["sent_bytes_ratio"] < 1.05
    assert result["all_reduce_ms_per_step"] > 0
    assert result["examples_per_second"] > 0
    assert result["evaluations"][-1]["test_image_count"] == 1000
    assert f"{result['evaluations'][-1]['test_accuracy']:.2%}" in output
    assert f"{result['sent_bytes_ratio']:.3f}x" in output
    assert "epoch 3/3 [####################] step 24/24 loss" in output
    assert "identical on 4 workers" in output
    assert output.count("step 24/24") == 1, "only rank 0 reports"


def test_run_alone_needs_no_launcher(group_norm_runs: dict[int, tuple[dict[str, Any], str]]) -> None:
    result, output = group_norm_runs[1]
    assert result["sent_bytes_ratio"] is None
    assert result["all_reduce_ms_per_step"] is None
    assert output.count("n/a") == 4


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The preset as it is, on two workers that reduce for each other: the folder and the output."""
    folder = tmp_path_factory.mktemp("runs") / "two"
    return folder, trainers.run(folder, "models.resnet", "--preset", "mnist-smoke", workers=2)[1]


def test_batch_normalisation_and_reducers_inside_the_workers(two_workers: tuple[Path, str]) -> None:
    folder, output = two_workers
    result = trainers.result_of(folder)
    assert result["differing_worker_count"] == 0
    assert "identical on 2 workers" in output
    assert np.mean(result["losses"][-8:]) < 0.95 * np.mean(result["losses"][:8])
    assert len(result["evaluations"]) == 3


def test_ctrl_c_on_a_job_saves_a_checkpoint_that_goes_on(tmp_path: Path) -> None:
    """The launcher passes the signal on; both workers stop after the same step."""
    output, log = tmp_path / "run", tmp_path / "output.txt"
    with log.open("w") as file:
        arguments = ("--preset", "mnist-smoke", "--epochs", "1000")
        job = trainers.start(output, "models.resnet", *arguments, workers=2, stdout=file)
    try:
        while not (output / "checkpoints" / "16").is_dir():
            assert job.poll() is None, log.read_text()
            time.sleep(0.05)
        job.send_signal(signal.SIGINT)
        assert job.wait(trainers.RUN_TIMEOUT_S) == 130, log.read_text()
    finally:
        job.kill()
        job.wait()
    result = trainers.result_of(output)
    last = len(result["losses"])
    assert not result["is_complete"]
    assert result["differing_worker_count"] == 0
    assert (output / "checkpoints" / str(last)).is_dir()
    assert f"stopped after step {last} of 8000; its checkpoint is saved" in log.read_text()


def test_a_job_that_loses_a_worker_ends_with_the_same_bits(two_workers: tuple[Path, str], tmp_path: Path) -> None:
    """Killed after the first checkpoint, started anew by the launcher, and a reducer in a process of its own."""
    undisturbed, output, log = two_workers[0], tmp_path / "run", tmp_path / "output.txt"
    with log.open("w") as file:
        arguments = ("--preset", "mnist-smoke")
        launcher = {"workers": 2, "reducers": 1, "max_restarts": 1}
        job = trainers.start(output, "models.resnet", *arguments, **launcher, stdout=file)
    try:
        while not (output / "checkpoints" / "8").is_dir():
            assert job.poll() is None, log.read_text()
            time.sleep(0.01)
        victims = [
            child for child in psutil.Process(job.pid).children() if child.environ().get("JAXHETERO_RANK") == "1"
        ]
        victims[0].kill()
        assert job.wait(trainers.RUN_TIMEOUT_S) == 0, log.read_text()
    finally:
        job.kill()
        job.wait()
    assert re.search(r"restart 1 of 1, because worker 1 \(pid \d+\) was killed by SIGKILL", log.read_text())
    result, wanted = trainers.result_of(output), trainers.result_of(undisturbed)
    assert result["first_step"] in (8, 16)
    assert result["losses"] == wanted["losses"]
    ours, theirs = (Checkpoints(folder / "checkpoints", {}).read_arrays(24) for folder in (output, undisturbed))
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name, strict=True)


def test_a_preset_for_parameter_servers_has_its_optimizer_on_reducers() -> None:
    def place(*arguments: str) -> str:
        return parse_options(command.make_options, PRESETS, "mnist", list(arguments)).run.optimizer_on

    assert {name for name in PRESETS if place("--preset", name) == "reducers"} == {"resnet50-aws-mxnet"}
    assert place("--preset", "resnet50-aws-mxnet", "--optimizer-on", "workers") == "workers"
    assert place("--preset", "resnet50-goyal", "--optimizer-on", "reducers") == "reducers"


def test_gradients_in_half_the_bytes(tmp_path: Path) -> None:
    """And what rounding keeps back survives a checkpoint: a resumed run has the losses of one without a break."""
    arguments = ("--preset", "mnist-smoke", "--wire-dtype", "bfloat16", "--error-feedback")
    whole, _ = trainers.run(tmp_path / "whole", "models.resnet", *arguments, workers=2)
    assert whole["differing_worker_count"] == 0
    assert 0.5 <= whole["sent_bytes_ratio"] < 0.53
    assert np.mean(whole["losses"][-8:]) < 0.95 * np.mean(whole["losses"][:8])

    shutil.copytree(tmp_path / "whole" / "checkpoints" / "16", tmp_path / "resumed" / "checkpoints" / "16")
    resumed, _ = trainers.run(tmp_path / "resumed", "models.resnet", *arguments, "--resume", "latest", workers=2)
    assert resumed["first_step"] == 16
    assert resumed["losses"] == whole["losses"]
