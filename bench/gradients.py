"""Gradients of a training, as the workers of a job would contribute them, and how short their codes are.

    python -m bench.gradients --data RECORDS --output FOLDER

trains ``bert-tiny`` of ``models.bert`` in this process, in steps of as many pieces as there are workers, and writes the
gradient of each piece of the last step to ``FOLDER/0.npy`` and so on, as float32, and rounded to bfloat16 to
``FOLDER/bfloat16/``. ``python -m bench.allreduce --values FOLDER`` contributes them. Instead of a training, ``--dtype
random`` writes random bits, which have no shorter code. It prints the bytes of codes over those of the values:

    pushed  of what the workers contribute
    total   of its sum in the order of the ranks, which comes back
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from rich.console import Console
from rich.table import Table

from bench import codes
from bench.engines.pattern import sum_of_files
from bench.harness.command import check_at_least, check_folders, run_command
from bench.harness.errors import BenchError
from models.bert.data import PreTrainingData
from models.bert.optimizer import make_optimizer
from models.bert.presets import PRESETS
from models.bert.train import TrainState, make_loss, make_model, make_piece
from models.common.batches import BatchSplit
from models.common.errors import DataError

_CHUNK_BYTES = 64 << 10


@dataclass(frozen=True)
class Options:
    """Gradients to measure with."""

    output: Path
    """A new folder for them."""
    data: Path | None = None
    """The records of python -m models.bert.prepare."""
    dtype: Literal["float32", "bfloat16", "random"] = "float32"
    """In which the model computes; its parameters are float32. Or random bits."""
    workers: int = 8
    """How many contribute."""
    steps: int = 60
    """The gradients are those of the step after so many."""

    def __post_init__(self) -> None:
        check_at_least(self, workers=1, steps=0)


def gradients(options: Options) -> list[np.ndarray]:
    """Those of each worker, leaf behind leaf."""
    if options.dtype == "random":
        random = np.random.default_rng(0)
        return [random.integers(0, 2**32, 1 << 20, dtype=np.uint32).view(np.float32) for _ in range(options.workers)]
    if options.data is None:
        raise BenchError("--data is missing: the folder with the records")
    preset = PRESETS["bert-tiny"]
    preset = replace(preset, model=replace(preset.model, dtype=options.dtype))
    graphdef, params = nnx.split(make_model(preset), nnx.Param)
    optimizer = make_optimizer(preset.optimizer, preset.schedule, is_reduced=True)
    piece = jax.jit(make_piece(make_loss(graphdef, preset.next_sentence_weight), preset.seed))
    split = BatchSplit.of_pieces(preset.global_batch, options.workers, rank=0, worker_count=1)
    batches = PreTrainingData(options.data, preset).train_batches(split, 0)
    state = TrainState(params, optimizer.init(params))

    @jax.jit
    def update(state: TrainState, *grads: Any) -> TrainState:
        mean = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *grads)
        updates, opt_state = optimizer.update(mean, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state)

    for step in range(options.steps + 1):
        grads = [piece(state, *next(batches))["grads"] for _ in range(options.workers)]
        if step < options.steps:
            state = update(state, *grads)
    return [np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]) for tree in grads]


def write(all_: Sequence[np.ndarray], folder: Path) -> None:
    """Files for ``--values``, in both types."""
    (folder / "bfloat16").mkdir(parents=True)
    for rank, values in enumerate(all_):
        np.save(folder / f"{rank}.npy", values)
        with np.errstate(invalid="ignore"):
            halves = values.astype(jnp.bfloat16)
        np.save(folder / "bfloat16" / f"{rank}.npy", halves.view(np.uint16))


def parts(folder: Path, dtype: str, workers: int, library: ctypes.CDLL) -> tuple[float, float]:
    """Of the contributions, and of their total."""
    each = [np.load(folder / f"{rank}.npy") for rank in range(workers)]
    with np.errstate(invalid="ignore", over="ignore"):
        total = sum_of_files(str(folder), each[0].size, dtype, workers)
    pushed = [codes.coded_part(library, dtype, values, _CHUNK_BYTES) for values in each]
    return float(np.mean(pushed)), codes.coded_part(library, dtype, total, _CHUNK_BYTES)


def run(options: Options) -> int:
    """Write the gradients, and show the table."""
    check_folders(options.output)
    if options.output.exists():
        raise BenchError(f"{options.output} is there already")
    try:
        write(gradients(options), options.output)
    except DataError as error:
        raise BenchError(str(error)) from error
    table = Table("values", "type", "pushed", "total")
    with tempfile.TemporaryDirectory() as folder:
        library = codes.load_library(Path(folder))
        for dtype, values in (("float32", options.output), ("bfloat16", options.output / "bfloat16")):
            shown = (f"{part:.3f}" for part in parts(values, dtype, options.workers, library))
            table.add_row(str(values), dtype, *shown)
    Console().print(table)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and run."""
    return run_command(lambda: run(tyro.cli(Options, args=arguments, description=__doc__)))


if __name__ == "__main__":
    sys.exit(main())
