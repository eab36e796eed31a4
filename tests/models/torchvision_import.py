"""Import torchvision for tests of parity, also where its C++ cannot be loaded, such as a CUDA build beside a CPU torch.

There the import fails because torchvision describes operators that do not exist, and transformers cannot import its
models either. With three of them declared, torchvision works except for them, and has a RoIAlign in Python.
"""

from __future__ import annotations

from typing import Any

import pytest

_MISSING = [
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
]
_kept: list[Any] = []  # a library's operators live as long as it does


def prepare_torchvision() -> Any:
    """torchvision, or None where it is not installed."""
    import torch

    try:
        import torchvision
    except ModuleNotFoundError:
        return None
    except RuntimeError as error:
        if "does not exist" not in str(error):
            raise
        library = torch.library.Library("torchvision", "DEF")
        _kept.append(library)
        for operator in _MISSING:
            library.define(operator)
        import torchvision
    return torchvision


def require_torchvision() -> Any:
    """torchvision, or a skip."""
    pytest.importorskip("torch", reason="parity needs torch: pip install '.[parity]'")
    torchvision = prepare_torchvision()
    if torchvision is None:
        pytest.skip("parity needs torchvision: pip install '.[parity]'", allow_module_level=True)
    return torchvision
