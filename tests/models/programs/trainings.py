"""Trainings one after the other in one job; prints the losses of each.

Arguments: a folder, and a JSON object with the trainings by name. Each has the name of its trainer, its command line,
and perhaps the name of a training and the step of its checkpoint from which to go on.
"""

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

import jaxhetero
from models.bert import __main__ as bert
from models.bert.train import train as train_bert
from models.common.command import parse_options
from models.resnet import __main__ as resnet
from models.resnet.train import train as train_resnet


def train(trainer: str, arguments: list[str]) -> Any:
    console = Console(file=io.StringIO())
    if trainer == "resnet":
        options = parse_options(resnet.Options, resnet.PRESETS, resnet.DEFAULT_PRESET, arguments)
        return train_resnet(options.settings, None, options.run, console)
    options = parse_options(bert.Options, bert.PRESETS, bert.DEFAULT_PRESET, arguments)
    return train_bert(options.settings, Path(options.data), options.run, console, None)


def main() -> None:
    folder = Path(sys.argv[1])
    jax.config.update("jax_default_prng_impl", "rbg")  # as the trainers' command does
    jaxhetero.initialize()
    losses = {}
    for name, training in json.loads(sys.argv[2]).items():
        output = folder / name
        arguments = [*training["arguments"], "--output", str(output)]
        if "step" in training:
            arguments += ["--resume", "latest"]
            if jaxhetero.rank() == 0:
                place = Path("checkpoints") / str(training["step"])
                shutil.copytree(folder / training["start"] / place, output / place)
        result = train(training["trainer"], arguments)
        assert result.differing_worker_count == 0
        losses[name] = result.losses
    jaxhetero.shutdown()
    print(json.dumps(losses))


main()
