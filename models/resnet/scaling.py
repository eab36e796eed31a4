"""``python -m models.resnet.scaling --data FOLDER --output FOLDER``: the accuracy of one recipe with growing batches.

Both recipes raise their learning rate in proportion to the batch, and see every image equally often. With large
batches, SGD takes steps that are too large for some layers. LARS (You et al., 2017) bounds the step of each layer by
its weights.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import tyro
from rich.console import Console

import jaxhetero
from models.common.command import RunOptions, run_command
from models.common.errors import require
from models.common.report import write_whole
from models.resnet.optimizer import peak_learning_rate
from models.resnet.presets import PRESETS
from models.resnet.train import train


@dataclass(frozen=True)
class Options:
    """Train with each recipe and each batch, and write scaling.json and scaling.png."""

    data: Path
    """The folder with MNIST's or Fashion-MNIST's idx files."""
    output: Path
    """An existing folder. Runs whose results it already has are not repeated."""
    batches: tuple[int, ...] = (64, 512, 4096)
    """Global batches."""
    recipes: tuple[str, ...] = field(default=("scaling-sgd", "scaling-lars"))
    """Presets of models.resnet."""

    def __post_init__(self) -> None:
        require(self.output.is_dir(), f"there is no folder {self.output}")


Points = dict[str, dict[str, dict[str, float]]]
"""Recipe -> batch -> name of a figure -> its value."""


def measure(options: Options, console: Console) -> Points:
    """Train every recipe with every batch. Call it on every worker. Rank 0 writes each result to scaling.json."""
    path = options.output / "scaling.json"
    points: Points = json.loads(path.read_text()) if path.is_file() else {}
    for recipe in options.recipes:
        for batch in options.batches:
            found = points.setdefault(recipe, {})
            if str(batch) in found:
                continue
            preset = replace(PRESETS[recipe], global_batch=batch)
            result = train(preset, options.data, RunOptions(), console)
            found[str(batch)] = {
                "test_accuracy": result.scores["test_accuracy"],
                "steps": result.step_count,
                "peak_learning_rate": peak_learning_rate(preset.optimizer, batch),
            }
            if jaxhetero.rank() == 0:
                write_whole(path, json.dumps(points, indent=2) + "\n")
    return points


def plot(path: Path, points: Points) -> None:
    """Draw accuracy against the batch, one curve per recipe."""
    from matplotlib.figure import Figure  # slow to import, and only rank 0 plots

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for recipe, found in points.items():
        batches = sorted(map(int, found))
        accuracies = [100 * found[str(batch)]["test_accuracy"] for batch in batches]
        axes.plot(batches, accuracies, "o-", label=recipe)
    axes.set(title="The same epochs with larger batches", xlabel="global batch", ylabel="test accuracy, %")
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def run(arguments: list[str]) -> int:
    """Measure and plot. Returns the exit code."""
    options = tyro.cli(Options, prog="python -m models.resnet.scaling", args=arguments)
    jaxhetero.initialize()
    points = measure(options, Console())
    if jaxhetero.rank() == 0:
        plot(options.output / "scaling.png", points)
    jaxhetero.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(run_command(run))
