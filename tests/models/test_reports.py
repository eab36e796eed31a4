"""What trainers show and leave behind: progress, tables, JSON, exit codes."""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console
from rich.text import Text

import jaxhetero
from models.common import compare
from models.common.command import finish, parse_options
from models.common.errors import DataError
from models.common.progress import TrainProgress
from models.common.report import Result, digest_of
from models.resnet import __main__ as command
from models.resnet import scaling
from models.resnet.presets import PRESETS, Preset


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
    progress = TrainProgress(Console(file=output), unit="images", step_count=4, global_batch=10, is_visible=visible)
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


@pytest.mark.parametrize(("columns", "shown"), [(66, 1), (80, 1), (105, 2), (180, 4)])
def test_a_narrow_terminal_keeps_epoch_bar_step_and_time(
    columns: int, shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.common.progress.LIVE_INTERVAL_S", 0)
    # A step takes 10 ms by this clock, so that the figures are as wide on any machine.
    steps = itertools.count()
    monkeypatch.setattr("models.common.progress.time", SimpleNamespace(monotonic=lambda: next(steps) / 100))
    console = Console(file=io.StringIO(), force_terminal=True, width=columns, legacy_windows=False)
    progress = TrainProgress(console, unit="images", step_count=800, global_batch=100, is_visible=True)
    with progress:
        progress.start_part("epoch 20/20")
        for _ in range(799):
            progress.update(0.013, 0.0123, 20.02)
    assert isinstance(console.file, io.StringIO)
    line = Text.from_ansi(console.file.getvalue().strip().split("epoch 20/20")[-1]).plain
    assert line.startswith(" ━━")
    assert " step 799/800 loss 0.013 " in line
    assert re.search(r" \d:\d\d:\d\d$", line.rstrip())
    assert "…" not in line
    figures = ["loss", "all-reduce 20.0 ms/step", "images/s", "lr 0.0123"]
    assert [figure in line for figure in figures] == [place < shown for place in range(4)], line


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


def test_table_of_a_run_without_a_step_has_no_rates() -> None:
    text = table_text(result_of(step_count=0, examples_per_second=0.0, all_reduce_ms_per_step=0.0))
    assert text.count("n/a") == 4
    assert "images/s" not in text


@pytest.mark.usefixtures("world_of_one")
def test_equal_weights_have_equal_digests() -> None:
    weights = {"a": np.arange(4, dtype=np.float32), "b": np.float32(1)}
    digests = [
        digest_of(weights),
        digest_of(jax.tree.map(jax.numpy.asarray, weights)),
        digest_of(weights | {"b": np.float32(-1)}),
    ]
    assert digests[0] == digests[1] != digests[2]
    assert digests[0] in table_text(result_of(weights_digest=digests[0]))


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


@pytest.mark.parametrize(("last", "exit_code"), [(1.0005, 0), (1.002, 1)])
def test_loss_curves_are_compared(
    last: float, exit_code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "one.json", tmp_path / "four.json"]
    result_of(worker_count=1, losses=[2.0, 1.0]).write_json(paths[0])
    result_of(losses=[2.0, last]).write_json(paths[1])
    assert compare.run([*map(str, paths), "--tolerance", "1e-3"]) == exit_code
    assert f"relative difference at most {last - 1:.2e}" in capsys.readouterr().out
    result_of(losses=[2.0]).write_json(paths[1])
    with pytest.raises(DataError, match=r"four.json has 1 losses and .*one.json 2; they are of other runs"):
        compare.run([*map(str, paths)])


def test_scaling_keeps_what_is_done_and_plots_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a trainer that only says which batch it was given."""
    seen: list[int] = []

    def train(preset: Preset, *arguments: Any) -> Result:
        seen.append(preset.global_batch)
        return result_of(evaluations=[{"step": 10.0, "test_accuracy": 1 / preset.global_batch}])

    monkeypatch.setattr(scaling, "train", train)
    arguments = ["--data", str(tmp_path), "--output", str(tmp_path), "--recipes", "scaling-lars"]
    assert scaling.run([*arguments, "--batches", "64"]) == 0
    assert scaling.run([*arguments, "--batches", "64", "512"]) == 0
    assert seen == [64, 512]
    points = json.loads((tmp_path / "scaling.json").read_text())["scaling-lars"]
    assert points["64"] == {"test_accuracy": 1 / 64, "steps": 10, "peak_learning_rate": 0.25}
    assert points["512"]["peak_learning_rate"] == 2.0
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
