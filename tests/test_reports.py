"""What trainers show and leave behind: progress, tables, JSON, exit codes."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import jaxhetero
from models.common.command import finish, parse_options
from models.common.progress import TrainProgress
from models.common.report import Result
from models.resnet import __main__ as command
from models.resnet.presets import PRESETS


@pytest.fixture
def world_of_one() -> Iterator[None]:
    jaxhetero.initialize()
    yield
    jaxhetero.shutdown()


@pytest.mark.parametrize(("visible", "interval_s", "line_count"), [(True, 0, 4), (True, 1e9, 1), (False, 0, 0)])
def test_progress_in_a_pipe_is_a_few_plain_lines(
    visible: bool, interval_s: float, line_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.common.progress.LINE_INTERVAL_S", interval_s)
    output = io.StringIO()
    progress = TrainProgress(Console(file=output), unit="images", step_count=4, global_batch=10, visible=visible)
    with progress:
        for epoch in range(2):
            progress.start_part(f"epoch {epoch + 1}/2")
            for _ in range(2):
                progress.update(0.5, 0.01, 1.25)
    lines = output.getvalue().splitlines()
    assert len(lines) == line_count
    if lines:
        assert lines[-1].startswith("epoch 2/2 [####################] step 4/4 loss 0.500 lr 0.01 ")
        assert lines[-1].endswith(" images/s all-reduce 1.2 ms/step")


def result_of(**changes: Any) -> Result:
    fields: dict[str, Any] = {
        "worker_count": 4,
        "parameter_count": 100,
        "gradient_bytes": 400,
        "first_step": 0,
        "step_count": 10,
        "is_complete": True,
        "train_seconds": 2.0,
        "examples_per_second": 500.0,
        "all_reduce_ms_per_step": 1.25,
        "sent_bytes_per_step": 404.0,
        "differing_worker_count": 0,
        "losses": [1.0],
        "evaluations": [{"step": 10, "test_accuracy": 0.981, "test_correct_count": 981, "test_image_count": 1000}],
    }
    return Result(**(fields | changes))


def table_text(result: Result) -> str:
    console = Console(file=io.StringIO(), record=True, width=100)
    console.print(result.to_table("ResNet", "images"))
    return console.export_text()


def test_table_shows_what_was_measured() -> None:
    text = table_text(result_of())
    for shown in ("98.10%", "981", "500 images/s", "1.25 ms", "1.010x", "identical on 4 workers"):
        assert shown in text
    assert "DIFFERENT on 1 of 4 workers" in table_text(result_of(differing_worker_count=1))


def test_table_of_one_worker_claims_no_measurement() -> None:
    text = table_text(result_of(worker_count=1, all_reduce_ms_per_step=None, sent_bytes_per_step=None))
    assert text.count("n/a") == 4


@pytest.mark.parametrize(
    ("changes", "exit_code"), [({}, 0), ({"differing_worker_count": 2}, 1), ({"is_complete": False}, 130)]
)
@pytest.mark.usefixtures("world_of_one")
def test_exit_code_and_json_say_how_it_went(changes: dict[str, Any], exit_code: int, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    options = parse_options(command.Options, PRESETS, "mnist", ["--json", str(path)])
    outcome = finish(result_of(**changes), options, Console(file=io.StringIO()), "ResNet", "images")
    assert outcome == exit_code
    written = json.loads(path.read_text())
    assert written["preset"] == "mnist"
    assert written["settings"]["model"]["architecture"] == "tiny"
    assert written["sent_bytes_ratio"] == pytest.approx(1.01)
