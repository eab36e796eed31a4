"""Makes torchvision_operators.npz, the answers of torchvision's C++, for test_mask_rcnn_operators.py.

    pip install torch==2.13.0 torchvision==0.28.0 --index-url https://download.pytorch.org/whl/cpu
    python tests/models/programs/torchvision_table.py

The stored table is of torchvision 0.28.0 on a CPU. The boxes of RoIAlign include some that lie partly or wholly outside
of the map, boxes without area, and one that is narrower than a place of the map.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision

TABLE = Path(__file__).parents[1] / "torchvision_operators.npz"
SCALE = 0.25
THRESHOLDS = (0.3, 0.5, 0.7)


def roi_align_entries(rng: np.random.Generator) -> dict[str, Any]:
    """Two images of 12 x 16 places with 4 channels at stride 4, 10 boxes, both conventions, ratio 2."""
    features = rng.normal(size=(2, 4, 12, 16)).astype(np.float32)
    centers, sizes = rng.uniform(0, [64, 48], (6, 2)), rng.uniform(4, 40, (6, 2))
    edges = [[-9, -7, 20, 30], [50, 40, 75, 60], [70, 60, 90, 80], [10, 10, 10, 10]]
    boxes = np.concatenate([np.concatenate([centers - sizes / 2, centers + sizes / 2], axis=1), edges])
    boxes[5, 2] = boxes[5, 0] + 1.5
    images = np.arange(len(boxes)) % 2
    weights = rng.normal(size=(len(boxes), 4, 7, 7)).astype(np.float32)
    entries = {"features": features, "boxes": boxes.astype(np.float32), "images": images, "weights": weights}
    rois = torch.tensor(np.concatenate([images[:, None], boxes], axis=1), dtype=torch.float32)
    for aligned in (False, True):
        inputs = torch.tensor(features, requires_grad=True)
        outputs = torchvision.ops.roi_align(inputs, rois, (7, 7), SCALE, sampling_ratio=2, aligned=aligned)
        (outputs * torch.tensor(weights)).sum().backward()
        assert inputs.grad is not None
        entries[f"values_aligned_{aligned}"] = outputs.detach().numpy()
        entries[f"gradient_aligned_{aligned}"] = inputs.grad.numpy()
    return entries


def nms_entries(rng: np.random.Generator) -> dict[str, Any]:
    """400 boxes in crowds of about ten, some of them with equal scores and some of them twice."""
    centers = rng.uniform(0, 300, (40, 2)).repeat(10, axis=0) + rng.normal(size=(400, 2)) * 6
    sizes = rng.uniform(20, 60, (40, 2)).repeat(10, axis=0) * rng.uniform(0.7, 1.3, (400, 2))
    boxes = np.concatenate([centers - sizes / 2, centers + sizes / 2], axis=1).astype(np.float32)
    boxes[7::50] = boxes[6::50]
    scores = rng.uniform(0, 1, 400).round(2).astype(np.float32)
    entries = {"nms_boxes": boxes, "nms_scores": scores}
    for threshold in THRESHOLDS:
        kept = torchvision.ops.nms(torch.tensor(boxes), torch.tensor(scores), threshold)
        entries[f"kept_{threshold}"] = kept.numpy().astype(np.int16)
    return entries


if __name__ == "__main__":
    assert torchvision.extension._has_ops(), "this torchvision has no C++ operators for this torch"
    rng = np.random.default_rng(0)
    np.savez_compressed(TABLE, **roi_align_entries(rng), **nms_entries(rng))
    print(f"{TABLE}: {TABLE.stat().st_size:,} bytes, torchvision {torchvision.__version__}")
