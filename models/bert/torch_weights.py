"""Weights of the torch implementation of BERT, as its ``state_dict`` or ``model.safetensors`` names them.

torch keeps a linear layer's matrix as ``[outputs, inputs]``, NNX as ``[inputs, outputs]``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.common.errors import CheckpointError

# From our name to torch's, without the last part. The first pattern that matches the whole name is taken.
_NAMES = [
    (r"encoder\.embeddings\.norm", "embeddings.LayerNorm"),
    (r"encoder\.embeddings\.(token)", "embeddings.word_embeddings"),
    (r"encoder\.embeddings\.(position)", "embeddings.position_embeddings"),
    (r"encoder\.embeddings\.(segment)", "embeddings.token_type_embeddings"),
    (r"encoder\.layers\.(\d+)\.attention\.output", r"encoder.layer.\1.attention.output.dense"),
    (r"encoder\.layers\.(\d+)\.attention\.(\w+)", r"encoder.layer.\1.attention.self.\2"),
    (r"encoder\.layers\.(\d+)\.attention_norm", r"encoder.layer.\1.attention.output.LayerNorm"),
    (r"encoder\.layers\.(\d+)\.intermediate", r"encoder.layer.\1.intermediate.dense"),
    (r"encoder\.layers\.(\d+)\.output", r"encoder.layer.\1.output.dense"),
    (r"encoder\.layers\.(\d+)\.output_norm", r"encoder.layer.\1.output.LayerNorm"),
    (r"pooler\.dense", "pooler.dense"),
    (r"transform", "cls.predictions.transform.dense"),
    (r"transform_norm", "cls.predictions.transform.LayerNorm"),
    (r"next_sentence", "cls.seq_relationship"),
    (r"span", "qa_outputs"),
    (r"classifier", "classifier"),
]
_LEAVES = {"kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}
_HEADS = ("transform", "next_sentence", "span", "classifier", "decoder_bias", "pooler")


def torch_name(path: tuple[Any, ...]) -> str:
    """The name in torch of the parameter at this path of an ``nnx.State``, without the leading ``bert.``."""
    *parents, leaf = map(str, path)
    if leaf == "decoder_bias":
        return "cls.predictions.bias"
    ours = ".".join(parents)
    for pattern, theirs in _NAMES:
        if match := re.fullmatch(pattern, ours):
            return f"{match.expand(theirs)}.{_LEAVES[leaf]}"
    raise CheckpointError(f"no torch name is known for the parameter {ours}.{leaf}")


def load_torch_weights(model: nnx.Module, weights: Mapping[str, Any], *, missing_heads: bool = False) -> None:
    """Copy the weights into the model, in place.

    With ``missing_heads``, weights of the pooler and of the heads may be missing; the model keeps its own.

    Raises:
      CheckpointError: a weight is missing or of another shape. Nothing has been copied then.
    """
    given = {name.removeprefix("bert."): np.asarray(value) for name, value in weights.items()}
    state = nnx.state(model, nnx.Param)
    loaded = {}
    for path, param in nnx.to_flat_state(state):
        name = torch_name(path)
        if name not in given:
            if missing_heads and path[0] in _HEADS:
                continue
            raise CheckpointError(f"the weights have no {name}; they are of another model")
        value = given[name].T if path[-1] == "kernel" else given[name]
        if value.shape != param[...].shape:
            raise CheckpointError(
                f"{name} is {list(value.shape)} in the weights and {list(param[...].shape)} in the model; "
                "they are of another model"
            )
        loaded[path] = jnp.asarray(value, jnp.float32)
    for path, param in nnx.to_flat_state(state):
        if path in loaded:
            param[...] = loaded[path]
    nnx.update(model, state)


def to_torch_names(state: nnx.State[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Parameters or gradients with torch's names and layout, contiguous because safetensors ignores strides."""

    def to_torch(path: tuple[Any, ...], leaf: Any) -> np.ndarray[Any, Any]:
        value = np.asarray(jax.tree.leaves(leaf)[0])
        return np.ascontiguousarray(value.T if path[-1] == "kernel" else value)

    return {torch_name(path): to_torch(path, leaf) for path, leaf in nnx.to_flat_state(state)}
