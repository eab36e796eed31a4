"""COCO's scores of a held-out set: each worker finds objects in its share of the images, and rank 0 scores them."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

import jaxhetero
from models.common.batches import BatchSplit
from models.common.rank_0 import run_on_rank_0
from models.common.training import Scores
from models.mask_rcnn.batch import Detections
from models.mask_rcnn.coco import CocoImage
from models.mask_rcnn.data import CocoData
from models.mask_rcnn.masks import encode_mask
from models.mask_rcnn.paste import paste_mask

Finding = dict[str, Any]
"""One detection in COCO's format of results, with a box and a mask."""

FIGURES = (
    "ap",
    "ap50",
    "ap75",
    "ap_small",
    "ap_medium",
    "ap_large",
    "ar1",
    "ar10",
    "ar100",
    "ar_small",
    "ar_medium",
    "ar_large",
)
"""COCO's twelve figures, in its order. One is -1 where the held-out set has no object to count."""
# From our name to that of COCO, and the field of a finding.
_KINDS = {"box": ("bbox", "bbox"), "mask": ("segm", "segmentation")}
_HAS_FASTER = importlib.util.find_spec("faster_coco_eval") is not None
# The workers exchange their findings in pieces of this size.
_PIECE_BYTES = 1 << 20


def _joined(everyone: list[bytes]) -> list[Finding]:
    return [finding for part in everyone for finding in json.loads(zlib.decompress(part))]


class Evaluation:
    """Finds objects in the held-out images and scores what was found. Call it on every worker."""

    def __init__(self, detect: jax.stages.Wrapped, data: CocoData, split: BatchSplit) -> None:
        """``detect``: jitted, ``(state, batch) -> Detections``."""
        self._detect, self._data, self._split = detect, data, split
        self.findings: list[Finding] = []
        """Those of the last call, in the order of the images: of all workers on rank 0, and of no worker elsewhere."""

    def __call__(self, state: Any) -> Scores:
        """The figures of boxes and masks over all held-out images: every image counts once."""
        names = [f"{kind}_{figure}" for kind in _KINDS for figure in FIGURES]
        found = self._find(state)
        if jaxhetero.elastic.is_elastic():  # every worker has found all
            return dict(zip(names, self._score(found).tolist(), strict=True))
        everyone = gather_bytes(zlib.compress(json.dumps(found).encode()))
        figures = run_on_rank_0(lambda: self._score(_joined(everyone)))
        values = figures if figures is not None else np.zeros(len(_KINDS) * len(FIGURES), np.float32)
        return dict(zip(names, np.asarray(jaxhetero.broadcast(values)).tolist(), strict=True))

    def _find(self, state: Any) -> list[Finding]:
        """What this worker finds in its share of the images."""
        images = self._data.held_out.images
        findings: list[Finding] = []
        for batch, is_real in self._data.held_out_batches(self._split):
            found = jax.tree.map(np.asarray, self._detect(state, batch))
            for place in np.flatnonzero(is_real):
                of_one = jax.tree.map(lambda leaf, place=place: leaf[place], found)
                image = images[int(batch.number[place])]
                size = np.asarray(batch.size[place])
                findings += to_findings(of_one, size, image, self._data.held_out.category_of)
        return findings

    def _score(self, findings: list[Finding]) -> NDArray[np.float32]:
        # COCO ranks equal scores by their order, which must not depend on the number of workers.
        places = {image.id: place for place, image in enumerate(self._data.held_out.images)}
        self.findings = sorted(findings, key=lambda finding: places[finding["image_id"]])
        truth = self._data.held_out.truth()
        return np.concatenate([score_findings(truth, self.findings, kind) for kind in _KINDS])


def to_findings(
    found: Detections, size: NDArray[Any], image: CocoImage, category_of: Callable[[int], int]
) -> list[Finding]:
    """The detections in one image, whose scaled height and width are ``size``, in the pixels of its file.

    ``category_of`` gives the category of a class.
    """
    scale = np.array([image.width / size[1], image.height / size[0]] * 2)
    findings = []
    for place in np.flatnonzero(found.classes):
        left, top, right, bottom = box = np.asarray(found.boxes[place]) * scale
        mask = paste_mask(np.asarray(found.masks[place]), box, image.height, image.width)
        findings.append(
            {
                "image_id": image.id,
                "category_id": category_of(int(found.classes[place])),
                "score": float(found.scores[place]),
                "bbox": [float(left), float(top), float(right - left), float(bottom - top)],
                "segmentation": encode_mask(mask),
            }
        )
    return findings


def score_findings(
    truth: dict[str, Any], findings: list[Finding], kind: str, *, faster: bool = _HAS_FASTER
) -> NDArray[np.float32]:
    """COCO's figures, in the order of ``FIGURES``, for boxes (``kind`` "box") or masks ("mask").

    ``faster`` is the faster implementation, of the package faster-coco-eval. Both give the same numbers.
    """
    truth, findings = _numbered(truth, findings)
    if faster:
        from faster_coco_eval import COCO
        from faster_coco_eval import COCOeval_faster as COCOeval
    else:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    name, field = _KINDS[kind]
    with contextlib.redirect_stdout(io.StringIO()):
        coco = _indexed(COCO(), truth)
        if findings:
            kept = ("image_id", "category_id", "score", field)
            found = coco.loadRes([{key: finding[key] for key in kept} for finding in findings])
        else:
            found = _indexed(COCO(), truth | {"annotations": []})
        scoring = COCOeval(coco, found, name)
        scoring.evaluate()
        scoring.accumulate()
        scoring.summarize()
    return np.asarray(scoring.stats[: len(FIGURES)], np.float32)


def _numbered(truth: dict[str, Any], findings: list[Finding]) -> tuple[dict[str, Any], list[Finding]]:
    """Both with ids from 1 on: COCO's scoring takes an annotation 0 for none, and of those with one id only the last.

    Images and categories keep their order, which decides between equal scores.
    """

    def numbers(name: str) -> dict[int, int]:
        return {old: new for new, old in enumerate(sorted(entry["id"] for entry in truth[name]), start=1)}

    images, categories = numbers("images"), numbers("categories")

    def renumbered(entry: dict[str, Any]) -> dict[str, Any]:
        return entry | {"image_id": images[entry["image_id"]], "category_id": categories[entry["category_id"]]}

    annotations = [renumbered(entry) | {"id": number} for number, entry in enumerate(truth["annotations"], start=1)]
    new = {
        "images": [entry | {"id": images[entry["id"]]} for entry in truth["images"]],
        "categories": [entry | {"id": categories[entry["id"]]} for entry in truth["categories"]],
        "annotations": annotations,
    }
    return new, [renumbered(finding) for finding in findings]


def _indexed(coco: Any, content: dict[str, Any]) -> Any:
    coco.dataset = content
    coco.createIndex()
    return coco


def gather_bytes(mine: bytes) -> list[bytes]:
    """The bytes of every worker, in the order of their ranks. Call it on every worker."""
    lengths = np.asarray(jaxhetero.all_gather(np.int32(len(mine))))
    padded_bytes = -(-int(lengths.max()) // _PIECE_BYTES) * _PIECE_BYTES
    padded = np.zeros(padded_bytes, np.uint8)
    padded[: len(mine)] = np.frombuffer(mine, np.uint8)
    pieces = [np.asarray(jaxhetero.all_gather(piece)) for piece in padded.reshape(-1, _PIECE_BYTES)]
    everyone = np.concatenate(pieces, axis=1)
    return [part[:length].tobytes() for part, length in zip(everyone, lengths, strict=True)]
