"""The command line that the trainers share: a preset, overrides for each of its fields, and where to write."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import jax
import tyro
from flax import nnx
from rich.console import Console

import jaxhetero
from models.common.batches import BatchSplit
from models.common.dry_run import DryRun
from models.common.errors import SettingsError, TrainerError, require
from models.common.first import is_first
from models.common.optimizer import WeightsDtype
from models.common.report import Result, plot_losses

INTERRUPTED = 130
CHECKPOINTS = "checkpoints"
"""The name of the folder of checkpoints in the output folder."""

Report = Callable[[int, Mapping[str, float], Path | None], None]
"""From the step, the scores of the last evaluation and, on rank 0, the folder of the checkpoint."""


@dataclass(frozen=True)
class RunOptions:
    """Where to write, what to resume, and how the work is shared out. None of these options changes what is trained,
    but that --microbatches sets the size of a piece, and --weights-dtype rounds."""

    output: Path | None = None
    """A folder for checkpoints, TensorBoard logs, result.json and pictures. Without it nothing is written."""
    json: Path | None = None
    """Also write the result, the settings and the loss curve to this file."""
    resume: str | None = None
    """Continue from a checkpoint in the output folder: the number of its step, or "latest". After a restart by
    `jaxhetero launch --max-restarts` the run always continues from the latest checkpoint, if there is one."""
    keep: int | None = None
    """How many checkpoints to keep: the latest ones. By default all."""
    stages: int = 1
    """Workers that hold the model together, each a part of it: see `jaxhetero.pipeline`. The number of workers must be
    a multiple of it."""
    microbatches: int = 0
    """Into how many microbatches a step is divided, in place of what micro_batch says: with --stages on each replica;
    without, on all workers together, and the weights then have the same bits on any number of workers. An elastic job
    always does this."""
    optimizer_on: Literal["workers", "reducers"] = "workers"
    """Where the optimizer runs and has its state: see `jaxhetero.optimizers.on_reducers`. A run can be resumed on the
    other."""
    weights_dtype: WeightsDtype = "float32"
    """With --optimizer-on reducers, the dtype of the weights that workers get. Checkpoints have float32."""
    across_steps: bool = False
    """Let the all-reduce run under the next forward pass as well: see `jaxhetero.optimizers.across_steps`. The curve is
    the same, and so are checkpoints."""
    dry_run: bool = False
    """Print the sizes of the run and the best possible all-reduce time, and stop."""
    network_gbps: float = 10.0
    """For --dry-run: the rate of every network interface, in Gbit/s."""
    report: tyro.conf.Suppress[tyro.conf.Fixed[Report | None]] = None
    """For programs that call a trainer: called on every worker after each stretch of steps, once its checkpoint is
    saved."""

    def __post_init__(self) -> None:
        require(self.output is not None or self.resume is None, "--resume needs --output, the folder of checkpoints")
        require(self.keep is None or self.keep >= 1, f"keep is {self.keep}; it must be at least 1")
        require(self.stages >= 1, f"stages is {self.stages}; it must be at least 1")
        require(self.microbatches >= 0, f"microbatches is {self.microbatches}; it must be at least 1")
        require(not self.microbatches or self.optimizer_on == "workers", "--microbatches needs --optimizer-on workers")
        require(
            self.stages == 1 or self.optimizer_on == "workers",
            "--stages needs --optimizer-on workers: every worker has other weights, and reducers have all of them",
        )
        require(
            self.weights_dtype == "float32" or self.optimizer_on == "reducers",
            f"--weights-dtype {self.weights_dtype} needs --optimizer-on reducers, which keep the weights in float32",
        )
        require(
            not self.across_steps or (self.stages == 1 and not self.microbatches),
            "--across-steps does not go with --stages and --microbatches, which reduce gradients while the step runs",
        )
        require(self.network_gbps > 0, f"network_gbps is {self.network_gbps}; it must be positive")
        for path in (self.output, self.json):
            if path is not None:
                _require_writable(path.absolute())

    def accumulated(self, split: BatchSplit) -> int:
        """Of how many pieces the optimizer itself takes the mean. A pipeline and an ``ExactStep`` give it one mean."""
        return 1 if self.stages > 1 or self.is_exact else split.accumulate_every

    @property
    def is_exact(self) -> bool:
        """Whether the weights have the same bits on any number of workers: see ``ExactStep``."""
        return self.stages == 1 and (self.microbatches > 0 or jaxhetero.elastic.is_elastic())

    @property
    def weights_from_reducers(self) -> WeightsDtype | None:
        """The dtype of the weights that reducers send; None if workers run the optimizer."""
        return self.weights_dtype if self.optimizer_on == "reducers" else None

    def file(self, name: str) -> Path | None:
        """The path of a file in the output folder on the first worker. None on others, which do not write."""
        return self.output / name if self.output and is_first() else None

    def checkpoint(self, step: int) -> Path | None:
        """The folder of a checkpoint on the first worker. None on others."""
        return self.file(f"{CHECKPOINTS}/{step}")


def _require_writable(path: Path) -> None:
    """Raise ``SettingsError`` if a file or folder cannot be written: its own folder is read-only, or its disk full."""
    require(path.parent.is_dir(), f"cannot write {path}: there is no folder {path.parent}")
    folder = path if path.is_dir() else path.parent
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(4096))
    except OSError as error:
        raise SettingsError(f"cannot write {path}: a file in {folder} failed: {error.strerror}") from None


class BatchSettings(Protocol):
    """The fields of every trainer's preset that say how a batch is split."""

    @property
    def global_batch(self) -> int: ...
    @property
    def micro_batch(self) -> int: ...


class Options(Protocol):
    """The fields of every trainer's command line."""

    @property
    def settings(self) -> Any: ...
    @property
    def preset(self) -> str: ...
    @property
    def run(self) -> RunOptions: ...


T = TypeVar("T")


def parse_options(
    kind: Callable[..., T],
    presets: Mapping[str, Any],
    default: str,
    arguments: list[str],
    program: str | None = None,
    *,
    with_prefixes: bool = False,
) -> T:
    """Parse the command line. --preset is read first, because it sets the defaults of all other options.

    An option has the name of its field; ``with_prefixes``, also those of the fields around it, unless those say no.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", default=default)
    name: str = parser.parse_known_args(arguments)[0].preset
    require(name in presets, f"there is no preset {name!r}; there are {', '.join(sorted(presets))}")
    filled = kind(settings=presets[name], preset=name)
    config = () if with_prefixes else (tyro.conf.OmitArgPrefixes,)
    return tyro.cli(type(filled), default=filled, prog=program, args=arguments, config=config)


def run_command(run: Callable[[list[str]], int]) -> int:
    """Call ``run`` with the command line's arguments, and return the exit code.

    A ``TrainerError`` becomes one line on standard error.
    """
    # rbg draws all bits in one pass, threefry in many: rbg is several times faster on a CPU.
    jax.config.update("jax_default_prng_impl", "rbg")
    try:
        return run(sys.argv[1:])
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def run_trainer(
    options: Options,
    step_count: int,
    make_model: Callable[[], nnx.Module],
    train: Callable[[Console], Result],
    title: str,
    unit: str,
) -> int:
    """Train, or with ``--dry-run`` print sizes. Returns the exit code. Call it after ``jaxhetero.initialize()``."""
    console = Console()
    if options.run.dry_run:
        params = nnx.state(nnx.eval_shape(make_model), nnx.Param)
        print_dry_run(params, options.settings, step_count, options.run, console, title, unit)
        return 0
    if jaxhetero.rank() == 0:
        workers = f"{jaxhetero.size()} worker{'s' if jaxhetero.size() > 1 else ''}"
        console.print(f"{title} on {workers}: reading the data and compiling", markup=False, highlight=False)
    return finish(train(console), options, console, title, unit)


def print_dry_run(
    params: Any, preset: BatchSettings, step_count: int, options: RunOptions, console: Console, title: str, unit: str
) -> None:
    """Print the dry run on rank 0 and end the job."""
    rank, worker_count = jaxhetero.rank(), jaxhetero.size()
    split = BatchSplit.make(preset.global_batch, preset.micro_batch, rank=rank, worker_count=worker_count)
    reducer_count = int(os.environ.get("JAXHETERO_REDUCER_COUNT") or 0)
    dry_run = DryRun(params, split, step_count, reducer_count, options.network_gbps, unit)
    if rank == 0:
        console.print(dry_run.to_table(title))
    jaxhetero.shutdown()


def finish(result: Result, options: Options, console: Console, title: str, unit: str) -> int:
    """Report on the first worker, end the job, and return the exit code.

    It is 1 if the workers ended with different weights, and ``INTERRUPTED`` if the run is not complete.
    """
    if is_first():
        console.print(result.to_table(title, unit))
        for path in (options.run.json, options.run.file("result.json")):
            if path:
                result.write_json(path, preset=options.preset, settings=dataclasses.asdict(options.settings))
        if plot := options.run.file("loss.png"):
            plot_losses(plot, result.losses, f"{title}, preset {options.preset}")
    jaxhetero.shutdown()
    if result.differing_worker_count:
        return 1
    return 0 if result.is_complete else INTERRUPTED
