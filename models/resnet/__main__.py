"""``python -m models.resnet --preset NAME [--FIELD VALUE ...] [--json FILE]``: alone, or under ``jaxhetero launch``."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

import jaxhetero
from models.resnet.presets import PRESETS, Preset, SettingsError, get_preset
from models.resnet.train import LossError, train

DEFAULT_PRESET = "mnist"


@dataclass(frozen=True)
class Options:
    """Train a ResNet, data-parallel over the workers of `jaxhetero launch`, or alone.

    Every field of the preset can be overridden; the defaults shown are those of the preset named before --help.
    """

    settings: Annotated[Preset, tyro.conf.arg(name="")]
    preset: Literal[tuple(PRESETS)] = DEFAULT_PRESET  # type: ignore[valid-type]
    """The named set of hyperparameters to start from."""
    json: Path | None = None
    """Write the result, the settings and the loss curve to this file."""


def parse_options(arguments: list[str]) -> Options:
    """The preset's name first, because it decides every other default."""
    preset_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    preset_parser.add_argument("--preset", default=DEFAULT_PRESET)
    name = preset_parser.parse_known_args(arguments)[0].preset
    options = tyro.cli(
        Options,
        prog="python -m models.resnet",
        default=Options(settings=get_preset(name), preset=name),
        args=arguments,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    if options.json and not options.json.parent.is_dir():
        raise SettingsError(f"cannot write {options.json}: there is no folder {options.json.parent}")
    return options


def run(options: Options) -> int:
    """Train, report on rank 0, and return the exit code: 1 when the workers ended with different weights."""
    jaxhetero.initialize()
    console = Console()
    result = train(options.settings, console)
    if jaxhetero.rank() == 0:
        console.print(result.to_table())
        if options.json:
            result.write_json(options.json, preset=options.preset, settings=dataclasses.asdict(options.settings))
    jaxhetero.shutdown()
    return 1 if result.differing_worker_count else 0


def main() -> int:
    try:
        return run(parse_options(sys.argv[1:]))
    except (SettingsError, LossError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
