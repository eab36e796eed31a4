"""The trainers of models/ as whole programs, and text to train them on."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from models.bert.masking import ExampleConfig
from models.bert.prepare import Options as PrepareOptions
from models.bert.prepare import prepare
from models.bert.presets import PRESETS
from tests.support.patience import PATIENCE
from tests.support.programs_on_disk import WARNINGS_ARE_ERRORS

REPOSITORY = Path(__file__).parents[2]
RUN_TIMEOUT_S = 300 * PATIENCE

# Largest relative difference of two loss curves that differ only in how the global batch is shared out. The sums of
# float32 gradients then group differently; the steps feed that back, so it grows slowly from 1e-7.
LOSS_CURVE_TOLERANCE = 1e-3

SMOKE = PRESETS["bert-smoke"]


def start(
    folder: Path,
    module: str,
    *arguments: str,
    workers: int = 1,
    reducers: int = 0,
    max_restarts: int = 0,
    **more: Any,
) -> Any:
    """A run that leaves its results in ``folder``, through the launcher when it has several workers."""
    program = [sys.executable, "-m", module, "--output", str(folder), *arguments]
    if workers > 1:
        counts = ["--workers", str(workers), "--reducers", str(reducers), "--max-restarts", str(max_restarts)]
        logs = ["--log-dir", str(folder.with_suffix(".logs"))]
        timeout_ms = str(round(1000 * RUN_TIMEOUT_S))
        patience = ["--start-timeout-ms", timeout_ms, "--stop-timeout-ms", timeout_ms]
        program = [sys.executable, "-m", "jaxhetero", "launch", *counts, *logs, *patience, "--", *program]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("JAXHETERO_")}
    environment["PYTHONWARNINGS"] = WARNINGS_ARE_ERRORS
    return subprocess.Popen(program, cwd=REPOSITORY, env=environment, stderr=subprocess.STDOUT, text=True, **more)


def run(folder: Path, module: str, *arguments: str, workers: int = 1, reducers: int = 0) -> tuple[Any, str]:
    """The result and the output of such a run."""
    with start(folder, module, *arguments, workers=workers, reducers=reducers, stdout=subprocess.PIPE) as job:
        try:
            output, _ = job.communicate(timeout=RUN_TIMEOUT_S)
        finally:
            job.kill()
    assert job.returncode == 0, output
    return result_of(folder), output


def result_of(folder: Path) -> Any:
    return json.loads((folder / "result.json").read_text())


def write_text(folder: Path) -> Path:
    """Real English: the documentation of some modules of Python's standard library."""
    for name in ("argparse", "collections", "decimal", "doctest", "logging", "optparse", "pathlib", "statistics"):
        module = importlib.import_module(name)
        documented = [module, *(value for _, value in sorted(vars(module).items()) if isinstance(value, type))]
        texts = [value.__doc__ for value in documented if isinstance(value.__doc__, str)]
        (folder / f"{name}.txt").write_text("\n".join(texts), encoding="utf-8")
    return folder


def prepare_options(text: Path, output: Path, held_out_share: float = 0.2, **changes: Any) -> PrepareOptions:
    """Records of the smoke preset's shape."""
    shape = {"sequence_length": SMOKE.sequence_length, "prediction_count": SMOKE.prediction_count}
    examples = ExampleConfig(**{**shape, "copies": 2, **changes})
    return PrepareOptions(text, output, examples, vocabulary_size=500, held_out_share=held_out_share)


def prepare_records(text: Path, folder: Path, **changes: Any) -> Path:
    assert prepare(prepare_options(text, folder, **changes))["vocabulary_size"] == 500
    return folder
