"""Whole runs of BERT's trainers: pre-training, its second phase, and question answering."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import jaxhetero
from models.bert import __main__ as pre_training
from models.bert import finetune
from models.bert.torch_weights import to_torch_names
from models.bert.train import make_model
from models.common.checkpoint import Checkpoints
from models.common.records import find_records
from tests.support import trainers

pytestmark = pytest.mark.timeout(trainers.RUN_TIMEOUT_S)

HELD_OUT_BATCH = 4 * trainers.SMOKE.micro_batch


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trainers.write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def prepared(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trainers.prepare_records(text, tmp_path_factory.mktemp("prepared") / "records")


def pre_train(data: Path, folder: Path, *arguments: str) -> Any:
    """The result of a run on one worker, in this process."""
    assert pre_training.run(["--preset", "bert-smoke", "--data", str(data), "--output", str(folder), *arguments]) == 0
    return trainers.result_of(folder)


def saved(folder: Path, step: int) -> dict[str, Any]:
    return Checkpoints(folder / "checkpoints", {}).read_arrays(step)


def assert_same_bits(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)


@pytest.fixture(scope="module")
def alone(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("alone") / "run"
    return folder, pre_train(prepared, folder)


def test_four_workers_train_like_one(prepared: Path, alone: tuple[Path, Any], tmp_path: Path) -> None:
    """Four workers with one piece each, and one that accumulates four: the same dropout, the same loss curve."""
    _, one = alone
    arguments = ("--preset", "bert-smoke", "--data", str(prepared))
    four, output = trainers.run(tmp_path / "four", "models.bert", *arguments, workers=4, reducers=2)
    assert len(one["losses"]) == 12
    assert one["losses"][-1] < one["losses"][0]
    np.testing.assert_allclose(four["losses"], one["losses"], rtol=trainers.LOSS_CURVE_TOLERANCE)
    assert [scores["step"] for scores in four["evaluations"]] == [6, 12]
    assert len(find_records(prepared, "held-out")) % HELD_OUT_BATCH, "the last batches should be partial ones"
    for name, value in one["evaluations"][-1].items():
        assert four["evaluations"][-1][name] == pytest.approx(value, rel=0.01, abs=0.01), name
    assert 1.0 <= four["sent_bytes_ratio"] < 1.05
    assert "identical on 4 workers" in output


def test_two_replicas_of_two_stages_train_like_one(prepared: Path, alone: tuple[Path, Any], tmp_path: Path) -> None:
    """The same dropout, and the norm of all gradients, although each worker has its own."""
    _, one = alone
    arguments = ("--preset", "bert-smoke", "--data", str(prepared), "--stages", "2")
    four, output = trainers.run(tmp_path / "four", "models.bert", *arguments, workers=4, reducers=2)
    np.testing.assert_allclose(four["losses"], one["losses"], rtol=trainers.LOSS_CURVE_TOLERANCE)
    assert "on 2 workers, 2 microbatches" in output
    assert "identical on 4 workers" in output


def test_a_run_leaves_curve_logs_and_checkpoints(alone: tuple[Path, Any]) -> None:
    folder, result = alone
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"6", "12"}
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert any(path.name.startswith("events.out") for path in (folder / "tensorboard").iterdir())
    assert result["is_complete"]
    assert result["settings"]["schedule"]["peak"] == 0.05


def test_a_resumed_run_ends_with_the_same_bits(prepared: Path, alone: tuple[Path, Any], tmp_path: Path) -> None:
    """Losses, scores, weights and the optimizer's moments."""
    folder, one = alone
    shutil.copytree(folder / "checkpoints" / "6", tmp_path / "run" / "checkpoints" / "6")
    resumed = pre_train(prepared, tmp_path / "run", "--resume", "latest")
    assert (resumed["first_step"], resumed["step_count"]) == (6, 6)
    assert resumed["losses"] == one["losses"]
    assert resumed["evaluations"] == one["evaluations"]
    assert_same_bits(saved(tmp_path / "run", 12), saved(folder, 12))


def test_a_second_phase_starts_with_the_weights_of_the_first(
    text: Path, alone: tuple[Path, Any], tmp_path: Path
) -> None:
    """With longer sequences. Its first step has the learning rate 0, so the weights after it are those before it."""
    longer = trainers.prepare_records(text, tmp_path / "records", sequence_length=64, prediction_count=10)
    shape = ("--sequence-length", "64", "--prediction-count", "10", "--step-count", "1")
    second = pre_train(longer, tmp_path / "second", "--start-from", str(alone[0]), *shape)
    assert second["losses"][0] < alone[1]["losses"][0]
    expected = {name: array for name, array in saved(alone[0], 12).items() if name.startswith(".params")}
    actual = saved(tmp_path / "second", 1)
    assert_same_bits({name: actual[name] for name in expected}, expected)
    assert any(name not in expected for name in actual), "the optimizer starts anew"


# --- question answering ----------------------------------------------------------------------------------------------

CONTEXTS = {
    "The logging module writes messages to a file.": [("What does it write?", "messages"), ("Who sings?", "")],
    "Return the sum of the numbers as a decimal.": [("What is returned?", "the sum"), ("Which colour?", "")],
    "A path names a file on the disk.": [("Where is the file?", "on the disk"), ("How old is it?", "")],
}


def pre_trained(folder: Path) -> Any:
    """The weights that a run ended with."""
    jaxhetero.initialize()
    weights = nnx.state(make_model(trainers.SMOKE), nnx.Param)
    weights = Checkpoints(folder / "checkpoints", {}).restore_params("latest", weights)
    jaxhetero.shutdown()
    return weights


def write_squad(path: Path) -> Path:
    """Version 2.0: half of the questions have no answer."""
    paragraphs = [
        {
            "context": context,
            "qas": [
                {
                    "id": question,
                    "question": question,
                    "is_impossible": not answer,
                    "answers": [{"text": answer, "answer_start": context.index(answer)}] if answer else [],
                }
                for question, answer in asked
            ],
        }
        for context, asked in CONTEXTS.items()
    ]
    path.write_text(json.dumps({"version": "v2.0", "data": [{"title": "all", "paragraphs": paragraphs}]}))
    return path


def questions(vocabulary: Path, start_from: Path, folder: Path) -> list[str]:
    """The arguments of fine-tuning on questions that are those of the evaluation as well."""
    squad = str(write_squad(folder.with_suffix(".json")))
    files = ("--train", squad, "--dev", squad, "--vocabulary", str(vocabulary), "--start-from", str(start_from))
    return ["--preset", "bert-smoke", "--has-unanswerable", *files]


def answer_questions(vocabulary: Path, start_from: Path, folder: Path, *arguments: str) -> Any:
    """The result of a fine-tuning on one worker."""
    assert finetune.run([*questions(vocabulary, start_from, folder), "--output", str(folder), *arguments]) == 0
    return trainers.result_of(folder) if (folder / "result.json").is_file() else None


def test_questions_with_and_without_an_answer_are_learnt(
    prepared: Path, alone: tuple[Path, Any], tmp_path: Path
) -> None:
    """SQuAD 2.0 as a whole, from the weights of pre-training and from the same in torch's names: the same losses."""
    vocabulary = prepared / "vocab.txt"
    result = answer_questions(vocabulary, alone[0], tmp_path / "squad")
    assert result["losses"][-1] < 0.5 * result["losses"][0]
    expected = {question: answer for asked in CONTEXTS.values() for question, answer in asked}
    assert json.loads((tmp_path / "squad" / "predictions.json").read_text()) == expected
    scores = result["evaluations"][-1]
    assert scores["exact_match"] == scores["f1"] == 100

    on_reducers = answer_questions(vocabulary, alone[0], tmp_path / "reducers", "--optimizer-on", "reducers")
    np.testing.assert_allclose(on_reducers["losses"], result["losses"], rtol=trainers.LOSS_CURVE_TOLERANCE)

    save_file(to_torch_names(pre_trained(alone[0])), tmp_path / "model.safetensors")
    again = answer_questions(vocabulary, tmp_path / "model.safetensors", tmp_path / "again", "--epochs", "1")
    assert again["losses"][0] == result["losses"][0]


def test_two_stages_are_fine_tuned_like_one_worker(prepared: Path, alone: tuple[Path, Any], tmp_path: Path) -> None:
    """With the same pieces, so the same dropout; and with the same scores."""
    pieces = ("--micro-batch", "2", "--epochs", "3")
    one = answer_questions(prepared / "vocab.txt", alone[0], tmp_path / "one", *pieces)
    arguments = questions(prepared / "vocab.txt", alone[0], tmp_path / "two")
    stages = (*pieces, "--stages", "2")
    two, output = trainers.run(tmp_path / "two", "models.bert.finetune", *arguments, *stages, workers=2, reducers=1)
    assert len(one["losses"]) == 3
    np.testing.assert_allclose(two["losses"], one["losses"], rtol=trainers.LOSS_CURVE_TOLERANCE)
    assert two["evaluations"][-1]["f1"] == pytest.approx(one["evaluations"][-1]["f1"], abs=0.01)
    assert "2 stages on 2 workers, 2 microbatches" in output


def test_dry_run_of_fine_tuning(
    prepared: Path, alone: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer_questions(prepared / "vocab.txt", alone[0], tmp_path / "dry-run", "--dry-run") is None
    shown = capsys.readouterr().out
    assert "dry-run.json: 6 questions in 6 windows, 3 of them without an answer\n" in shown
    assert "BERT fine-tuning" in shown
    assert "windows per step" in shown
