"""Files of tensors by their names, in the format safetensors: what other libraries write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from models.common.errors import CheckpointError


def read_safetensors(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """All tensors of a safetensors file."""
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}")
    try:
        return dict(load_file(path))
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a complete safetensors file: {error}") from None
