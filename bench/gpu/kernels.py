"""What a GPU runs during a function, by JAX's profiler."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

_COPIES = ("Memcpy", "Memset")


def profile(function: Callable[[], Any]) -> dict[str, Any]:
    """The events on the GPU's streams while ``function`` runs: how many of each name, and their seconds together."""
    with tempfile.TemporaryDirectory(prefix="bench-gpu-trace-") as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(function())
        (path,) = Path(folder).rglob("*.xplane.pb")
        return _read(jax.profiler.ProfileData.from_file(str(path)))


def _read(data: jax.profiler.ProfileData) -> dict[str, Any]:
    counts: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    lines = []
    for plane in data.planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            lines.append(f"{plane.name} {line.name}")
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                counts[event.name] += 1
                seconds[event.name] += event.duration_ns / 1e9
    kernels = [name for name in counts if not name.startswith(_COPIES)]
    return {
        "lines": lines,
        "counts": dict(counts),
        "seconds": dict(seconds),
        "kernel_count": sum(counts[name] for name in kernels),
        "kernel_s": sum(seconds[name] for name in kernels),
        "copy_s": sum(seconds.values()) - sum(seconds[name] for name in kernels),
    }
