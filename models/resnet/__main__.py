"""``python -m models.resnet --preset NAME [--FIELD VALUE ...] [--json FILE]``: alone, or under ``jaxhetero launch``."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from flax import nnx

import jaxhetero
from models.common.command import RunOptions, parse_options, run_command, run_trainer
from models.resnet.model import ResNet
from models.resnet.presets import PRESETS, Preset
from models.resnet.train import train

DEFAULT_PRESET = "mnist"


@dataclass(frozen=True)
class Options:
    """Train a ResNet, data-parallel over the workers of `jaxhetero launch`, or on one worker.

    Every field of the preset is an option. The defaults shown are those of the preset that --preset names.
    """

    settings: Annotated[Preset, tyro.conf.arg(name="")]
    preset: Literal[tuple(PRESETS)] = DEFAULT_PRESET  # type: ignore[valid-type]
    """The named set of hyperparameters to start from."""
    data: Path | None = None
    """The folder with the images. The default for idx files is the folder of Debian's package dataset-fashion-mnist."""
    run: Annotated[RunOptions, tyro.conf.arg(name="")] = field(default_factory=RunOptions)


def run(arguments: list[str]) -> int:
    """Train, or print the dry run. Returns the exit code."""
    options = parse_options(Options, PRESETS, DEFAULT_PRESET, arguments, "python -m models.resnet")
    preset = options.settings
    jaxhetero.initialize()
    return run_trainer(
        options,
        preset.step_count,
        lambda: ResNet(preset.model, rngs=nnx.Rngs(0)),
        lambda console: train(preset, options.data, options.run, console),
        "ResNet",
        "images",
    )


if __name__ == "__main__":
    sys.exit(run_command(run))
