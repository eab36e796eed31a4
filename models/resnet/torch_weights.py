"""Weights of the ResNet in torch's ``transformers``, as its ``state_dict`` or ``model.safetensors`` names them.

torch keeps a convolution as ``[outputs, inputs, height, width]``, NNX as ``[height, width, inputs, outputs]``.
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
from models.resnet.model import ARCHITECTURES, ModelConfig, ResNet

_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}
_KINDS = {"conv": "convolution", "norm": "normalization"}


def torch_name(path: tuple[Any, ...], config: ModelConfig) -> str:
    """The name in torch of the parameter or statistic at this path of an ``nnx.State``."""
    *parents, leaf = map(str, path)
    if parents == ["classifier"]:
        return f"classifier.1.{_LEAVES[leaf]}"
    kind = re.fullmatch(r"(?:stem_)?(conv|norm)(\d?)", parents[-1])
    assert kind, path
    last = f"{_KINDS[kind[1]]}.{_LEAVES[leaf]}"
    if parents[0] != "blocks":
        return f"resnet.embedder.embedder.{last}"
    stage, layer = _place(int(parents[1]), ARCHITECTURES[config.architecture].stage_sizes)
    part = "shortcut" if parents[2] == "shortcut" else f"layer.{int(kind[2]) - 1}"
    return f"resnet.encoder.stages.{stage}.layers.{layer}.{part}.{last}"


def _place(block: int, stage_sizes: tuple[int, ...]) -> tuple[int, int]:
    stage = 0
    while block >= stage_sizes[stage]:
        block -= stage_sizes[stage]
        stage += 1
    return stage, block


def _layout(value: NDArray[Any]) -> NDArray[Any]:
    """From torch's layout to ours."""
    return value.transpose(2, 3, 1, 0) if value.ndim == 4 else value.T


def load_torch_weights(model: ResNet, config: ModelConfig, weights: Mapping[str, Any]) -> None:
    """Copy weights and running statistics into the model, in place.

    Raises:
      CheckpointError: one of them is missing or has another shape. Nothing has been copied then.
    """
    state = nnx.state(model, (nnx.Param, nnx.BatchStat))
    loaded = []
    for path, variable in nnx.to_flat_state(state):
        name = torch_name(path, config)
        if name not in weights:
            raise CheckpointError(f"the weights have no {name}; they are of another model")
        value = _layout(np.asarray(weights[name]))
        if value.shape != variable[...].shape:
            raise CheckpointError(
                f"{name} is {list(value.shape)} in the weights and {list(variable[...].shape)} in the model; "
                "they are of another model"
            )
        loaded.append((variable, jnp.asarray(value, jnp.float32)))
    for variable, array in loaded:
        variable[...] = array
    nnx.update(model, state)


def from_torch_layout(weights: Mapping[str, Any], state: nnx.State[Any, Any], config: ModelConfig) -> dict[str, Any]:
    """The entries of ``weights`` for the leaves of ``state``, in our layout and by torch's names."""
    names = [torch_name(path, config) for path, _ in nnx.to_flat_state(state)]
    return {name: _layout(np.asarray(weights[name])) for name in names}
