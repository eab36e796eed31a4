"""``python -m models.bert --preset NAME --data FOLDER [--FIELD VALUE ...]``: alone, or under ``jaxhetero launch``."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from flax import nnx
from rich.console import Console

import jaxhetero
from models.bert.model import PreTrainingModel
from models.bert.presets import PRESETS, Preset
from models.bert.train import train
from models.common.command import RunOptions, finish, named_preset, run_command, show_plan
from models.common.errors import SettingsError

DEFAULT_PRESET = "bert-tiny"


@dataclass(frozen=True)
class Options:
    """Pre-train BERT, data-parallel over the workers of `jaxhetero launch`, or alone.

    Every field of the preset can be overridden; the defaults shown are those of the preset named before --help.
    """

    settings: Annotated[Preset, tyro.conf.arg(name="")]
    data: Path | None = None
    """A folder with records: the output of `python -m models.bert.prepare`, or TFRecord files in the usual format
    whose names begin with "train" and, for evaluation, "held-out"."""
    start_from: Path | None = None
    """The output folder of another run, for example of phase 1: begin with its last weights."""
    preset: Literal[tuple(PRESETS)] = DEFAULT_PRESET  # type: ignore[valid-type]
    """The named set of hyperparameters to start from."""
    run: Annotated[RunOptions, tyro.conf.arg(name="")] = field(default_factory=RunOptions)


def parse_options(arguments: list[str]) -> Options:
    """The command line."""
    name = named_preset(PRESETS, arguments, DEFAULT_PRESET)
    return tyro.cli(
        Options,
        prog="python -m models.bert",
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
        model = nnx.eval_shape(lambda: PreTrainingModel(preset.model, rngs=nnx.Rngs(0)))
        return show_plan(nnx.state(model, nnx.Param), preset, options.run, console, "BERT pre-training", "sequences")
    if options.data is None:
        raise SettingsError("--data is missing: the folder with the records")
    result = train(preset, options.data, options.run, console, options.start_from)
    return finish(result, options.run, console, "BERT", "sequences", preset=options.preset, settings=preset)


def main() -> int:
    """The command; its exit code."""
    return run_command(run)


if __name__ == "__main__":
    sys.exit(main())
