"""``python -m models.resnet --preset NAME [--FIELD VALUE ...] [--json FILE]``: alone, or under ``jaxhetero launch``."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Literal

import tyro
from flax import nnx
from rich.console import Console

import jaxhetero
from models.common.command import RunOptions, parse_options, run_command, run_trainer
from models.common.report import Result
from models.common.staging import StageFolder
from models.resnet.data import staged_data
from models.resnet.model import ResNet
from models.resnet.presets import ON_REDUCERS, PRESETS, Preset
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
    data: str | None = None
    """The folder with the images. The default for idx files is the folder of Debian's package dataset-fashion-mnist.
    With --stage also the URL of one, such as s3://bucket/imagenet."""
    stage: StageFolder = None
    run: Annotated[RunOptions, tyro.conf.arg(name="")] = field(default_factory=RunOptions)


def make_options(settings: Preset, preset: str, epochs: int | None = None) -> Options:
    """What a preset chooses, before the command line is read, but for ``epochs``.

    A run that is no longer than the preset's warm-up warms up for half of its time.
    """
    if epochs is not None and 0 < epochs <= settings.optimizer.warmup_epochs:
        optimizer = replace(settings.optimizer, warmup_epochs=epochs / 2)
        settings = replace(settings, epochs=epochs, optimizer=optimizer)
    return Options(settings, preset, run=RunOptions(optimizer_on="reducers" if preset in ON_REDUCERS else "workers"))


def read_options(arguments: list[str]) -> Options:
    """The options of a command line."""
    make = partial(make_options, epochs=_given_epochs(arguments))
    return parse_options(make, PRESETS, DEFAULT_PRESET, arguments, "python -m models.resnet")


def _given_epochs(arguments: list[str]) -> int | None:
    """The value of --epochs, if it is there and a number. What it must be is said where all options are read."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--epochs", default="")
    given: str = parser.parse_known_args(arguments)[0].epochs
    return int(given) if given.isdecimal() else None


def run(arguments: list[str]) -> int:
    """Train, or print the dry run. Returns the exit code."""
    options = read_options(arguments)
    preset = options.settings
    jaxhetero.initialize()

    def train_on_staged(console: Console) -> Result:
        with staged_data(preset, options.data, options.stage, console) as folder:
            return train(preset, folder, options.run, console)

    return run_trainer(
        options,
        preset.step_count,
        lambda: ResNet(preset.model, rngs=nnx.Rngs(0)),
        train_on_staged,
        "ResNet",
        "images",
    )


if __name__ == "__main__":
    sys.exit(run_command(run))
