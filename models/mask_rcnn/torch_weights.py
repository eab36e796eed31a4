"""Weights with torchvision's names: those of its Mask R-CNN with a feature pyramid, or of a ResNet to start from.

torch keeps a convolution as ``[outputs, inputs, height, width]`` and flattens ``[channels, rows, columns]``; NNX keeps
``[height, width, inputs, outputs]`` and flattens ``[rows, columns, channels]``. The last layers of torchvision's heads
are convolutions of 1x1, ours are linear layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from models.common.errors import CheckpointError
from models.mask_rcnn.model import BOX_BINS, MaskRCNN
from models.resnet.model import Frozen

# From our name to torchvision's, without the last part. Blocks of the backbone are counted through, hence not here.
_NAMES = [
    (r"backbone\.stem_conv", "backbone.body.conv1"),
    (r"backbone\.stem_norm", "backbone.body.bn1"),
    (r"pyramid\.inner\.(\d)", r"backbone.fpn.inner_blocks.\1.0"),
    (r"pyramid\.outer\.(\d)", r"backbone.fpn.layer_blocks.\1.0"),
    (r"proposal_head\.conv", "rpn.head.conv.0.0"),
    (r"proposal_head\.logits", "rpn.head.cls_logits"),
    (r"proposal_head\.deltas", "rpn.head.bbox_pred"),
    (r"box_head\.hidden1", "roi_heads.box_head.fc6"),
    (r"box_head\.hidden2", "roi_heads.box_head.fc7"),
    (r"box_head\.logits", "roi_heads.box_predictor.cls_score"),
    (r"box_head\.deltas", "roi_heads.box_predictor.bbox_pred"),
    (r"mask_head\.convs\.(\d)", r"roi_heads.mask_head.\1.0"),
    (r"mask_head\.upsampling", "roi_heads.mask_predictor.conv5_mask"),
    (r"mask_head\.logits", "roi_heads.mask_predictor.mask_fcn_logits"),
]
_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}
_PARTS = {"conv": "conv", "norm": "bn"}
_BODY = "backbone.body."
_LINEAR_HERE = ("cls_logits.weight", "rpn.head.bbox_pred.weight", "mask_fcn_logits.weight")


def torch_name(path: tuple[Any, ...], stage_sizes: tuple[int, ...]) -> str:
    """torchvision's name of the parameter or statistic at this path of an ``nnx.State``."""
    *parents, leaf = map(str, path)
    ours = ".".join(parents)
    if parents[:2] == ["backbone", "blocks"]:
        return f"{_BODY}{_block_name(int(parents[2]), stage_sizes)}.{_layer_name(parents[3:])}.{_LEAVES[leaf]}"
    for pattern, theirs in _NAMES:
        if match := re.fullmatch(pattern, ours):
            return f"{match.expand(theirs)}.{_LEAVES[leaf]}"
    raise CheckpointError(f"no torchvision name is known for {ours}.{leaf}")


def _block_name(block: int, stage_sizes: tuple[int, ...]) -> str:
    stage = 0
    while block >= stage_sizes[stage]:
        block -= stage_sizes[stage]
        stage += 1
    return f"layer{stage + 1}.{block}"


def _layer_name(parents: list[str]) -> str:
    if parents[0] == "shortcut":
        return f"downsample.{['conv', 'norm'].index(parents[1])}"
    return f"{_PARTS[parents[0][:-1]]}{parents[0][-1]}"


def from_torch_layout(name: str, value: Any) -> NDArray[np.float32]:
    """An array of the name ``name``, in our layout."""
    array = np.asarray(value, np.float32)
    if name == "roi_heads.box_head.fc6.weight":
        array = array.reshape(len(array), -1, BOX_BINS, BOX_BINS).transpose(0, 2, 3, 1).reshape(len(array), -1)
    if name.endswith(_LINEAR_HERE):
        array = array[:, :, 0, 0]
    if name == "roi_heads.mask_predictor.conv5_mask.weight":
        return array.transpose(2, 3, 0, 1)  # a transposed convolution has its inputs first
    return array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T


def load_torch_weights(model: MaskRCNN, weights: Mapping[str, Any], *, backbone_only: bool = False) -> None:
    """Copy weights and statistics into the model, in place.

    With ``backbone_only`` they are those of torchvision's ResNet, whose classifier is left out, and the model keeps its
    other weights.

    Raises:
      CheckpointError: one of them is missing or has another shape. Nothing has been copied then.
    """
    if backbone_only:
        weights = {name if name.startswith(_BODY) else _BODY + name: value for name, value in weights.items()}
    state = nnx.state(model, (nnx.Param, Frozen))
    loaded = []
    for path, variable in nnx.to_flat_state(state):
        name = torch_name(path, model.backbone.stage_sizes)
        if backbone_only and not name.startswith(_BODY):
            continue
        if name not in weights:
            raise CheckpointError(f"the weights have no {name}; they are of another model")
        value = from_torch_layout(name, weights[name])
        if value.shape != variable[...].shape:
            raise CheckpointError(
                f"{name} is {list(value.shape)} in the weights and {list(variable[...].shape)} in the model; "
                "they are of another model"
            )
        loaded.append((variable, jnp.asarray(value)))
    for variable, array in loaded:
        variable[...] = array
    nnx.update(model, state)
