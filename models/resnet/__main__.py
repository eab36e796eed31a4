"""``python -m models.resnet --preset NAME [--FIELD VALUE ...] [--json FILE]``: alone, or under ``jaxhetero launch``."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from flax import nnx
from rich.console import Console

import jaxhetero
from models.common.command import RunOptions, finish, named_preset, run_command, show_plan
from models.resnet.model import ResNet
from models.resnet.presets import PRESETS, Preset
from models.resnet.train import train

DEFAULT_PRESET = "mnist"


@dataclass(frozen=True)
class Options:
    """Train a ResNet, data-parallel over the workers of `jaxhetero launch`, or alone.

    Every field of the preset can be overridden; the defaults shown are those of the preset named before --help.
    """

    settings: Annotated[Preset, tyro.conf.arg(name="")]
    preset: Literal[tuple(PRESETS)] = DEFAULT_PRESET  # type: ignore[valid-type]
    """The named set of hyperparameters to start from."""
    data: Path | None = None
    """The folder with the images. Fashion-MNIST is looked for where Debian's dataset-fashion-mnist puts it."""
    run: Annotated[RunOptions, tyro.conf.arg(name="")] = field(default_factory=RunOptions)


def parse_options(arguments: list[str]) -> Options:
    """The command line."""
    name = named_preset(PRESETS, arguments, DEFAULT_PRESET)
    return tyro.cli(
        Options,
        prog="python -m models.resnet",
        default=Options(settings=PRESETS[name], preset=name),
        args=arguments,
        config=(tyro.conf.OmitArgPrefixes,),
    )


def run(arguments: list[str]) -> int:
    """Train, or show the plan; the exit code."""
    options = parse_options(arguments)
    preset, console = options.settings, Console()
    jaxhetero.initialize()
    if options.run.dry_run:
        model = nnx.eval_shape(lambda: ResNet(preset.model, rngs=nnx.Rngs(0)))
        return show_plan(nnx.state(model, nnx.Param), preset, options.run, console, "ResNet", "images")
    result = train(preset, options.data, options.run, console)
    return finish(result, options.run, console, "ResNet", "images", preset=options.preset, settings=preset)


def main() -> int:
    """The command; its exit code."""
    return run_command(run)


if __name__ == "__main__":
    sys.exit(main())
