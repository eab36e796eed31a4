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
from models.bert.prepare import FACTS_FILE, HELD_OUT, TRAIN
from models.bert.presets import DEFAULT_PRESET, PRESETS, Preset
from models.bert.train import train
from models.common.command import RunOptions, parse_options, run_command, run_trainer
from models.common.report import Result
from models.common.staging import StageFolder, staged


@dataclass(frozen=True)
class Options:
    """Pre-train BERT, data-parallel over the workers of `jaxhetero launch`, or on one worker.

    Every field of the preset is an option. The defaults shown are those of the preset that --preset names.
    """

    settings: Annotated[Preset, tyro.conf.arg(name="")]
    data: str | None = None
    """A folder with records: the output of `python -m models.bert.prepare`, or TFRecord files in the usual format
    whose names begin with "train" and, for evaluation, "held-out". With --stage also the URL of one, such as
    s3://bucket/records."""
    stage: StageFolder = None
    start_from: Path | None = None
    """The output folder of another run, such as one of phase 1. Training begins with the weights of its latest
    checkpoint."""
    preset: Literal[tuple(PRESETS)] = DEFAULT_PRESET  # type: ignore[valid-type]
    """The named set of hyperparameters to start from."""
    run: Annotated[RunOptions, tyro.conf.arg(name="")] = field(default_factory=RunOptions)


def run(arguments: list[str]) -> int:
    """Train, or print the dry run. Returns the exit code."""
    options = parse_options(Options, PRESETS, DEFAULT_PRESET, arguments, "python -m models.bert")
    preset = options.settings
    jaxhetero.initialize()

    def train_on_staged(console: Console) -> Result:
        with staged(options.data, options.stage, (TRAIN, HELD_OUT, FACTS_FILE), console) as folder:
            return train(preset, folder, options.run, console, options.start_from)

    return run_trainer(
        options,
        preset.step_count,
        lambda: PreTrainingModel(preset.model, rngs=nnx.Rngs(0)),
        train_on_staged,
        "BERT pre-training",
        "sequences",
    )


if __name__ == "__main__":
    sys.exit(run_command(run))
