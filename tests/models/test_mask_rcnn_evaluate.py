"""COCO's scores over workers' shares of a held-out set, and the picture of what was found."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from models.common.batches import BatchSplit
from models.mask_rcnn.batch import Batch, Detections
from models.mask_rcnn.coco import CocoPart
from models.mask_rcnn.data import CocoData
from models.mask_rcnn.draw import TILE, draw_findings
from models.mask_rcnn.evaluate import FIGURES, Evaluation, Finding, gather_bytes, score_findings
from models.mask_rcnn.masks import encode_mask, mask_pixels
from models.mask_rcnn.presets import PRESETS, ImageConfig
from tests.models import coco_folder
from tests.support.cluster import ROOT, program_path

HELD_OUT_COUNT = 7
KINDS = ("box", "mask")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parts = {coco_folder.TRAIN: 4, coco_folder.HELD_OUT: HELD_OUT_COUNT}
    return coco_folder.write_coco(tmp_path_factory.mktemp("coco"), parts, size=(160, 120))


@pytest.fixture(scope="module")
def part(folder: Path) -> CocoPart:
    return CocoPart(folder, coco_folder.HELD_OUT)


def random_findings(part: CocoPart, seed: int) -> list[Finding]:
    """Objects moved by some pixels, others twice, in the wrong class or from nowhere; many scores are equal."""
    rng = np.random.default_rng(seed)
    findings = []
    for image in part.images:
        for thing in image.objects:
            mask = mask_pixels(thing.segmentation, image.height, image.width, where="it")
            for _ in range(rng.integers(0, 3)):
                moved = np.roll(mask, rng.integers(-4, 5, 2), axis=(0, 1))
                rows, columns = np.nonzero(moved)
                left, top = columns.min(), rows.min()
                findings.append(
                    {
                        "image_id": image.id,
                        "category_id": int(rng.choice([thing.category_id, coco_folder.DISC])),
                        "score": round(float(rng.random()), 1),
                        "bbox": [
                            float(number) for number in (left, top, columns.max() + 1 - left, rows.max() + 1 - top)
                        ],
                        "segmentation": encode_mask(moved),
                    }
                )
    return findings


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_faster_scoring_gives_the_same_figures(part: CocoPart, kind: str, seed: int) -> None:
    pytest.importorskip("faster_coco_eval", reason="faster-coco-eval is not installed")
    findings = random_findings(part, seed)
    figures = [score_findings(part.truth(), findings, kind, faster=faster) for faster in (False, True)]
    assert 0.1 < figures[0][0] < 0.9
    np.testing.assert_allclose(figures[1], figures[0], rtol=0, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_no_finding_scores_nothing(part: CocoPart, kind: str) -> None:
    figures = dict(zip(FIGURES, score_findings(part.truth(), [], kind), strict=True))
    assert figures["ap"] == figures["ar100"] == 0


@pytest.mark.parametrize("faster", [False, True])
@pytest.mark.parametrize("field", ["id", "image_id", "category_id"])
@pytest.mark.parametrize(
    "number", [lambda place: place, lambda place: -place, lambda place: 2**70 * (place % 2) + place]
)
def test_the_figures_do_not_depend_on_the_ids(part: CocoPart, field: str, number: Any, faster: bool) -> None:
    """Those of annotations need not even differ: here every second one is the first's."""
    if faster:
        pytest.importorskip("faster_coco_eval", reason="faster-coco-eval is not installed")
    truth, findings = part.truth(), random_findings(part, 0)
    for place, finding in enumerate(findings):  # Equal scores are ranked by their images' ids.
        finding["score"] += 1e-4 * place
    expected = [score_findings(truth, findings, kind, faster=faster) for kind in KINDS]
    if field == "id":
        for place, entry in enumerate(truth["annotations"]):
            entry["id"] = number(place) if place % 2 else number(0)
    else:
        listed = truth["images" if field == "image_id" else "categories"]
        new = {entry["id"]: number(place) for place, entry in enumerate(listed)}
        for entry in listed:
            entry["id"] = new[entry["id"]]
        for entry in (*truth["annotations"], *findings):
            entry[field] = new[entry[field]]
    for kind, figures in zip(KINDS, expected, strict=True):
        np.testing.assert_allclose(score_findings(truth, findings, kind, faster=faster), figures, atol=1e-6)


def oracle(example: Batch) -> Detections:
    """A detector that knows the answers."""
    masks = example.masks.reshape(*example.masks.shape[:2], 28, 4, 28, 4).mean(axis=(3, 5), dtype=np.float32)
    scores = np.where(example.classes > 0, np.float32(0.9), np.float32(0))
    return Detections(jnp.asarray(example.boxes), jnp.asarray(scores), jnp.asarray(example.classes), jnp.asarray(masks))


def coco_data(folder: Path) -> CocoData:
    """Images of 160 x 120 pixels, scaled to 100 x 75."""
    nuclei = PRESETS["nuclei"]
    images = ImageConfig(size=128, short_sides=(75, 75), test_short_side=75, long_side=100, object_count=4)
    return CocoData(folder, replace(nuclei, model=replace(nuclei.model, class_count=2), images=images))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("batch", [1, 4])
def test_the_right_answers_score_nearly_one(folder: Path, batch: int) -> None:
    """In the pixels of the files, which are not those of the model."""
    data = coco_data(folder)
    evaluation = Evaluation(lambda state, example: oracle(example), data, BatchSplit(batch, batch, 0, 1))
    scores = evaluation(None)
    assert list(scores) == [f"{kind}_{figure}" for kind in KINDS for figure in FIGURES]
    assert scores["box_ap"] > 0.95
    assert scores["mask_ap"] > 0.9
    assert scores["mask_ap50"] == 1
    assert len(evaluation.findings) == 2 * HELD_OUT_COUNT

    images = data.held_out.images[:3]
    picture, without = (draw_findings(images, data.held_out, found) for found in (evaluation.findings, []))
    assert picture.shape == (2 * 288 + 8, 3 * TILE + 16, 3)
    np.testing.assert_array_equal(picture[:288], without[:288])
    assert 0.05 < np.mean(np.any(picture[-288:] != without[-288:], axis=2)) < 0.6


def test_workers_share_the_set_and_all_get_the_scores(folder: Path, tmp_path: Path, launch: Any) -> None:
    """Three workers for seven images: the findings, and their order, are those of one worker."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    program = (sys.executable, str(program_path("evaluate_coco.py")), str(folder), str(tmp_path))
    done = launch("--workers", "3", "--reducers", "1", "--", *program, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    scores, findings = zip(*(json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)), strict=True)
    assert scores[0] == scores[1] == scores[2]
    assert [len(of_rank) for of_rank in findings] == [2 * HELD_OUT_COUNT, 0, 0]
    assert [finding["image_id"] for finding in findings[0]] == [10 * (1 + place // 2) for place in range(14)]


@pytest.mark.usefixtures("alone")
def test_bytes_of_one_worker_come_back() -> None:
    assert gather_bytes(b"abc") == [b"abc"]
