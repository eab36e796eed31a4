"""The trainer of Mask R-CNN: its settings, and whole runs through the launcher."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from rich.console import Console

import jaxhetero
from models.common.checkpoint import Checkpoints
from models.common.command import parse_options, run_command
from models.common.errors import DataError
from models.mask_rcnn import __main__ as command
from models.mask_rcnn import prepare
from models.mask_rcnn.data import CocoData
from models.mask_rcnn.presets import PRESETS
from tests.models import coco_folder
from tests.models.coco_folder import HELD_OUT, TRAIN
from tests.support import trainers

pytestmark = pytest.mark.timeout(3 * trainers.RUN_TIMEOUT_S)

MODULE = "models.mask_rcnn"
LOSS_CURVE_TOLERANCE = 1e-2
COCO_PRESETS = sorted(name for name, preset in PRESETS.items() if preset.dataset == "coco" and name != "smoke")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "nope"], "there is no preset 'nope'; there are aws-tf-128, detectron-1x"),
        (["--preset", "detectron-1x"], "--data is missing: the COCO folder"),
        (["--preset", "detectron-1x", "--data", "/nowhere"], "--start-from is missing: the normalisation is frozen"),
        (["--preset", "smoke", "--data", "/nowhere"], "there is no file /nowhere/annotations/instances_train.json"),
        (["--size", "144"], "size is 144; it must be a multiple of 32"),
        (["--micro-batch", "3"], "micro_batch is 3; it must divide the 4 examples of a worker"),
        (["--resume", "latest"], "--resume needs --output"),
    ],
)
def test_bad_settings_are_named(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [MODULE, *arguments])
    assert run_command(command.run) in (1, 2)
    jaxhetero.shutdown()
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


@pytest.mark.parametrize("name", COCO_PRESETS)
def test_a_dry_run_shows_the_published_network(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(["--preset", name, "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "44,125,173 in" in output
    assert "176,500,692 bytes" in output


def options_of(*arguments: str) -> command.Options:
    return parse_options(command.Options, PRESETS, "nuclei", list(arguments), with_prefixes=True)


def test_options_of_settings_inside_of_others_have_both_names() -> None:
    options = options_of("--samples.roi-overlap", "0.6", "--proposals.level-count", "50", "--detection.score", "0.1")
    nuclei = PRESETS["nuclei"]
    assert options.settings == replace(
        nuclei,
        loss=replace(
            nuclei.loss,
            samples=replace(nuclei.loss.samples, roi_overlap=0.6),
            proposals=replace(nuclei.loss.proposals, level_count=50),
        ),
        detection=replace(nuclei.detection, score=0.1),
    )


def test_data_are_staged(tmp_path: Path) -> None:
    """Both parts and their annotations, and nothing else of the folder."""
    coco = coco_folder.write_coco(tmp_path / "coco", {TRAIN: 4, HELD_OUT: 2})
    (coco / "test2017").mkdir()
    (coco / "test2017" / "1.png").write_bytes(b"large")
    options = options_of("--preset", "smoke", "--data", str(coco), "--stage", str(tmp_path / "stage"))
    jaxhetero.initialize()
    with command.open_folder(options, Console()) as folder:
        assert folder
        assert folder.is_relative_to(tmp_path / "stage")
        assert {path.name for path in folder.iterdir()} == {"annotations", TRAIN, HELD_OUT}
        assert len(CocoData(folder, options.settings).train_images) == 4
    jaxhetero.shutdown()
    assert not (tmp_path / "stage").exists()


# --- whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def coco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return coco_folder.write_coco(tmp_path_factory.mktemp("coco"), {TRAIN: 12, HELD_OUT: 6}, size=(64, 48))


def smoke(coco: Path) -> tuple[str, ...]:
    return ("--preset", "smoke", "--data", str(coco))


@pytest.fixture(scope="module")
def alone(coco: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("alone") / "run"
    return folder, trainers.run(folder, MODULE, *smoke(coco))[0]


@pytest.fixture(scope="module")
def two_workers(coco: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, str]:
    folder = tmp_path_factory.mktemp("two") / "run"
    return folder, *trainers.run(folder, MODULE, *smoke(coco), workers=2, reducers=2)


def saved(folder: Path, step: int) -> dict[str, Any]:
    return Checkpoints(folder / "checkpoints", {}).read_arrays(step)


def assert_same_bits(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(actual[name], expected[name], err_msg=name, strict=True)


def test_a_run_leaves_figures_pictures_and_checkpoints(alone: tuple[Path, Any]) -> None:
    folder, result = alone
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"6", "12"}
    for name in ("loss.png", "picture.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    assert any(path.name.startswith("events.out") for path in (folder / "tensorboard").iterdir())
    assert result["is_complete"]
    assert np.mean(result["losses"][-4:]) < 0.9 * np.mean(result["losses"][:4])
    assert result["settings"]["loss"]["samples"]["roi_count"] == 64
    assert [scores["step"] for scores in result["evaluations"]] == [6, 12]
    assert len(result["evaluations"][-1]) == 1 + 2 * 12


def test_a_resumed_run_ends_with_the_same_bits(coco: Path, alone: tuple[Path, Any], tmp_path: Path) -> None:
    """Losses, scores, weights and momentum."""
    folder, whole = alone
    shutil.copytree(folder / "checkpoints" / "6", tmp_path / "run" / "checkpoints" / "6")
    resumed, _ = trainers.run(tmp_path / "run", MODULE, *smoke(coco), "--resume", "latest")
    assert (resumed["first_step"], resumed["step_count"]) == (6, 6)
    assert resumed["losses"] == whole["losses"]
    assert resumed["evaluations"] == whole["evaluations"]
    assert_same_bits(saved(tmp_path / "run", 12), saved(folder, 12))


def test_two_workers_follow_the_loss_curve_of_one(alone: tuple[Path, Any], two_workers: tuple[Path, Any, str]) -> None:
    """One worker that accumulates four pieces, and two with two pieces each, which find the same objects.

    Rounding may decide which of two equal proposals is taken, so the curves differ by more than those of a classifier.
    """
    one, (_, two, output) = alone[1], two_workers
    np.testing.assert_allclose(two["losses"], one["losses"], rtol=LOSS_CURVE_TOLERANCE)
    for name, value in one["evaluations"][-1].items():
        assert two["evaluations"][-1][name] == pytest.approx(value, abs=0.02), name
    assert 1.0 <= two["sent_bytes_ratio"] < 1.05
    assert "identical on 2 workers" in output
    assert "12 images, " in output
    assert output.count("step 12/12") == 1, "only rank 0 reports"


def test_two_stages_follow_the_same_loss_curve(coco: Path, alone: tuple[Path, Any], tmp_path: Path) -> None:
    """With the same pieces."""
    stages = ("--stages", "2", "--microbatches", "4")
    two, output = trainers.run(tmp_path / "two", MODULE, *smoke(coco), *stages, workers=2, reducers=1)
    np.testing.assert_allclose(two["losses"], alone[1]["losses"], rtol=LOSS_CURVE_TOLERANCE)
    assert "2 stages on 2 workers, 4 microbatches" in output


def test_a_reducer_that_is_killed_changes_no_bit(
    coco: Path, two_workers: tuple[Path, Any, str], tmp_path: Path
) -> None:
    undisturbed, wanted, _ = two_workers
    output, log = tmp_path / "run", tmp_path / "output.txt"
    with log.open("w") as file:
        job = trainers.start(output, MODULE, *smoke(coco), workers=2, reducers=2, stdout=file)
    try:
        wait_for(lambda: (output / "checkpoints" / "6").is_dir(), job, log)
        reducers = [child for child in psutil.Process(job.pid).children() if "reducer" in child.cmdline()]
        reducers[0].kill()
        assert job.wait(trainers.RUN_TIMEOUT_S) == 0, log.read_text()
    finally:
        job.kill()
        job.wait()
    assert "going on with 1 reducers" in log.read_text()
    assert trainers.result_of(output)["losses"] == wanted["losses"]
    assert trainers.result_of(output)["evaluations"] == wanted["evaluations"]
    assert_same_bits(saved(output, 12), saved(undisturbed, 12))


def wait_for(condition: Callable[[], bool], job: Any, log: Path) -> None:
    while not condition():
        assert job.poll() is None, log.read_text()
        time.sleep(0.01)


def test_nuclei_are_found(tmp_path: Path) -> None:
    """A short form of the preset: real nuclei of the held-out half, after a fourteenth of the steps."""
    try:
        prepare.run(["nuclei", str(tmp_path / "coco")])
    except DataError as error:
        pytest.skip(f"no nuclei: {error}")
    arguments = ("--data", str(tmp_path / "coco"), "--step-count", "50", "--drop-steps", "40")
    result, _ = trainers.run(tmp_path / "run", MODULE, "--preset", "nuclei", *arguments, workers=2, reducers=2)
    scores = result["evaluations"][-1]
    assert scores["mask_ap50"] > 0.25, "0.40 was measured"
    assert scores["mask_ap"] > 0.05, "0.09 was measured"
    assert result["differing_worker_count"] == 0
