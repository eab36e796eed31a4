"""The BERT trainer: text to records, recipes, and whole runs through the launcher."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tensorboardX.record_writer import RecordWriter

import jaxhetero
from jaxhetero.optimizers import named_schedule
from models.bert import __main__ as command
from models.bert.baselines import baselines
from models.bert.data import PreTrainingData
from models.bert.examples import ExampleConfig, PreTrainingExample, make_examples
from models.bert.model import PreTrainingModel
from models.bert.optimizer import make_optimizer
from models.bert.prepare import Options as PrepareOptions
from models.bert.prepare import encode_document, prepare
from models.bert.presets import PRESETS
from models.bert.text import Vocabulary, split_sentences
from models.common.batches import BatchPlan
from models.common.errors import DataError
from models.common.example import encode_example
from models.common.optimizer import weights_mask
from models.common.records import find_records

REPOSITORY = Path(__file__).parents[1]
RUN_TIMEOUT_S = 300

# Largest relative difference of two loss curves that differ only in which worker has which piece of the global batch:
# the rounding of float32 sums, which the steps feed back.
LOSS_CURVE_TOLERANCE = 1e-3

SMOKE = PRESETS["bert-smoke"]


# --- text to records -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real English: the documentation of some modules of Python's standard library."""
    folder = tmp_path_factory.mktemp("text")
    for name in ("argparse", "collections", "decimal", "doctest", "logging", "optparse", "pathlib", "statistics"):
        module = importlib.import_module(name)
        documented = [module, *(value for _, value in sorted(vars(module).items()) if isinstance(value, type))]
        texts = [value.__doc__ for value in documented if isinstance(value.__doc__, str)]
        (folder / f"{name}.txt").write_text("\n".join(texts), encoding="utf-8")
    return folder


def prepare_options(text: Path, output: Path, **changes: Any) -> PrepareOptions:
    examples = ExampleConfig(
        sequence_length=SMOKE.sequence_length, prediction_count=SMOKE.prediction_count, copies=2, **changes
    )
    return PrepareOptions(text, output, examples, vocabulary_size=500, held_out_share=0.2)


@pytest.fixture(scope="module")
def prepared(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared") / "records"
    facts = prepare(prepare_options(text, folder))
    assert facts["vocabulary_size"] == 500
    return folder


@pytest.mark.parametrize(
    ("document", "sentences"),
    [
        ("One ends. Another begins! Really? Yes.", ["One ends.", "Another begins!", "Really?", "Yes."]),
        ("first line\n\nsecond line\n", ["first line", "second line"]),
        ("It costs 3.50 e.g. here", ["It costs 3.50 e.g. here"]),
        (" \n ", []),
    ],
)
def test_sentences(document: str, sentences: list[str]) -> None:
    assert split_sentences(document) == sentences


def all_examples(text: Path, vocabulary: Vocabulary, **changes: Any) -> list[PreTrainingExample]:
    documents = [encode_document(path.read_text(), vocabulary) for path in sorted(text.iterdir())]
    return list(make_examples(documents, vocabulary, replace(ExampleConfig(), **changes)))


@pytest.fixture(scope="module")
def vocabulary(prepared: Path) -> Vocabulary:
    return Vocabulary(prepared / "vocab.txt")


@pytest.mark.parametrize(("length", "predictions"), [(128, 20), (512, 80), (32, 5)])
def test_examples_are_pairs_with_some_tokens_masked(
    text: Path, vocabulary: Vocabulary, length: int, predictions: int
) -> None:
    examples = all_examples(text, vocabulary, sequence_length=length, prediction_count=predictions)
    shown = {"mask": 0, "other": 0, "same": 0}
    for example in examples:
        tokens = list(example.token_ids)
        for position, answer in zip(example.positions, example.answers, strict=True):
            is_same, is_mask = tokens[position] == answer, tokens[position] == vocabulary.mask
            shown["same" if is_same else "mask" if is_mask else "other"] += 1
            tokens[position] = answer
        separators = [place for place, token in enumerate(tokens) if token == vocabulary.sep]
        assert tokens[0] == vocabulary.cls
        assert separators == [example.first_length - 1, len(tokens) - 1]
        assert vocabulary.mask not in tokens
        assert len(tokens) <= length
        wanted = min(predictions, max(1, round(0.15 * len(tokens))))
        assert len(set(example.positions)) == wanted
        assert not {0, *separators} & set(example.positions)
        assert np.sum(example.features(ExampleConfig(length, predictions))["masked_lm_weights"]) == wanted
    total = sum(shown.values())
    assert shown["mask"] / total == pytest.approx(0.8, abs=0.05)
    assert shown["other"] / total == pytest.approx(0.1, abs=0.04)
    # The random pairs include all stretches of one sentence, so there are more than half.
    assert 0.35 < np.mean([example.is_random for example in examples]) < 0.8


def test_pairs_that_are_not_random_follow_each_other(text: Path, vocabulary: Vocabulary) -> None:
    everything = [
        [token for sentence in encode_document(path.read_text(), vocabulary) for token in sentence]
        for path in sorted(text.iterdir())
    ]
    joined = [" ".join(map(str, tokens)) for tokens in everything]
    followed = 0
    for example in all_examples(text, vocabulary, sequence_length=64, short_share=0.0):
        if example.is_random:
            continue
        tokens = list(example.token_ids)
        for position, answer in zip(example.positions, example.answers, strict=True):
            tokens[position] = answer
        first, second = tokens[1 : example.first_length - 1], tokens[example.first_length : -1]
        assert any(" ".join(map(str, first)) in text for text in joined)
        if len(tokens) < 64:  # not truncated, so nothing is missing between the two
            followed += any(" ".join(map(str, first + second)) in text for text in joined)
    assert followed > 0


def test_whole_words_are_masked_together(text: Path, vocabulary: Vocabulary) -> None:
    for example in all_examples(text, vocabulary, whole_words=True, sequence_length=64):
        tokens = list(example.token_ids)
        for position, answer in zip(example.positions, example.answers, strict=True):
            tokens[position] = answer
        for position in example.positions:
            following = position + 1
            if vocabulary.is_continuation[tokens[following]]:
                assert following in example.positions
            if vocabulary.is_continuation[tokens[position]] and tokens[position - 1] not in (
                vocabulary.cls,
                vocabulary.sep,
            ):
                assert position - 1 in example.positions


def test_records_depend_on_the_seed_only(text: Path, prepared: Path, tmp_path: Path) -> None:
    again, other = tmp_path / "again", tmp_path / "other"
    prepare(prepare_options(text, again))
    prepare(prepare_options(text, other, seed=1))

    def contents(folder: Path) -> list[bytes]:
        return list(find_records(folder, "train"))

    assert contents(again) == contents(prepared)
    assert contents(other) != contents(prepared)
    assert not {*contents(prepared)} & {*find_records(prepared, "held-out")}


def test_the_usual_tfrecord_format_is_read(prepared: Path, tmp_path: Path) -> None:
    """The same records in files as TensorFlow writes them."""
    records = list(find_records(prepared, "train"))
    for shard in range(2):
        writer = RecordWriter(str(tmp_path / f"train_{shard}.tfrecord"))
        for record in records[shard::2]:
            writer.write(record)
        writer.close()
    ours, usual = PreTrainingData(prepared, SMOKE), PreTrainingData(tmp_path, SMOKE)
    assert len(usual.train) == len(ours.train)
    assert usual.held_out is None
    for place in range(0, len(records), 2):
        expected, actual = ours.load(ours.train, place), usual.load(usual.train, place // 2)
        assert all(np.array_equal(expected[name], actual[name]) for name in expected)


@pytest.mark.parametrize("worker_count", [1, 2, 4])
def test_every_worker_count_sees_the_same_pieces(prepared: Path, worker_count: int) -> None:
    """The pieces of a step by number; a later step starts where it would have come."""
    data = PreTrainingData(prepared, replace(SMOKE, step_count=3))

    def pieces(worker_count: int, first_step: int = 0) -> dict[int, Any]:
        found = {}
        for rank in range(worker_count):
            plan = BatchPlan.make(16, 4, rank=rank, worker_count=worker_count)
            for batch, _, number in data.train_batches(plan, first_step):
                found[int(number)] = np.asarray(batch.token_ids)
        return found

    alone, shared = pieces(1), pieces(worker_count)
    assert sorted(alone) == sorted(shared) == list(range(12))
    assert all(np.array_equal(alone[number], shared[number]) for number in alone)
    late = pieces(worker_count, first_step=2)
    assert sorted(late) == [8, 9, 10, 11]
    assert all(np.array_equal(alone[number], late[number]) for number in late)


def write_folder(folder: Path, **changes: Any) -> Path:
    """One record of the smoke preset's shape, with some features replaced."""
    length, predictions = SMOKE.sequence_length, SMOKE.prediction_count
    features: dict[str, Any] = {
        "input_ids": np.ones(length, np.int64),
        "input_mask": np.ones(length, np.int64),
        "segment_ids": np.zeros(length, np.int64),
        "masked_lm_positions": np.ones(predictions, np.int64),
        "masked_lm_ids": np.ones(predictions, np.int64),
        "masked_lm_weights": np.ones(predictions, np.float32),
        "next_sentence_labels": np.zeros(1, np.int64),
        **changes,
    }
    writer = RecordWriter(str(folder / "train.tfrecord"))
    writer.write(encode_example({name: value for name, value in features.items() if value is not None}))
    writer.close()
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": np.ones(8, np.int64)}, "input_ids has 8 values; sequence_length is 32"),
        ({"masked_lm_ids": np.ones(9, np.int64)}, "masked_lm_ids has 9 values; prediction_count is 5"),
        ({"input_ids": np.full(32, 500)}, "input_ids has the token 500; vocabulary_size is 500"),
        ({"next_sentence_labels": np.array([2])}, "next_sentence_labels is 2; it must be 0 or 1"),
        ({"segment_ids": None}, "record 0 of .* has no feature 'segment_ids'; it has input_ids"),
    ],
)
def test_records_that_do_not_fit_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        PreTrainingData(write_folder(tmp_path, **changes), SMOKE)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "there is no .txt file in"),
        (lambda folder: (folder / "a.txt").write_text(" \n"), "the 1 .txt files in .* are empty"),
        (lambda folder: (folder / "a.txt").write_bytes(b"caf\xe9 au"), r"a.txt is not UTF-8 text: .* at byte 3"),
    ],
)
def test_text_that_is_none_leaves_nothing_behind(make: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    make(tmp_path / "text")
    with pytest.raises(DataError, match=message):
        prepare(prepare_options(tmp_path / "text", tmp_path / "output"))
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_a_vocabulary_that_is_none(text: Path, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("the\n[PAD]\n")
    options = replace(prepare_options(text, tmp_path / "output"), vocabulary=tmp_path / "vocab.txt")
    with pytest.raises(DataError, match=r"is no BERT vocabulary: it has no \[UNK\], \[CLS\], \[SEP\], \[MASK\]"):
        prepare(options)
    assert [path.name for path in tmp_path.iterdir()] == ["vocab.txt"]


def test_baselines_count_words(tmp_path: Path) -> None:
    """Token 7 is the most frequent one, and follows itself most often; 5 always follows 6."""
    tokens = np.array([6, 5, 7, 7, 7, 6, 5, 8] + [0] * 24)
    mask = (np.arange(32) < 8).astype(np.int64)
    positions, weights = np.array([1, 3, 5, 0, 0]), np.array([1, 1, 1, 0, 0], np.float32)
    shown = tokens.copy()
    shown[positions[:3]] = 4
    answers = np.array([*tokens[positions[:3]], 0, 0])
    write_folder(
        tmp_path,
        input_ids=shown,
        input_mask=mask,
        masked_lm_positions=positions,
        masked_lm_ids=answers,
        masked_lm_weights=weights,
    )
    records = find_records(tmp_path, "train")
    found = baselines(records, records)
    assert found["unigram_accuracy"] == pytest.approx(1 / 3)
    assert found["bigram_accuracy"] == pytest.approx(2 / 3)
    assert found["masked_token_count"] == 3


# --- recipes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "schedule", "published"),
    [
        ("bert-large-phase1", "bert-large-phase1", (65536, 7038, 128, 20, 0.01, 0.9, 0.999)),
        ("bert-large-phase2", "bert-large-phase2", (32768, 1563, 512, 80, 0.01, 0.9, 0.999)),
        ("bert-base-aws", "bert-base-aws-phase1", (32768, 14064, 128, 20, 0.01, 0.9, 0.999)),
        ("bert-base-aws-phase2", "bert-base-aws-phase2", (8192, 6248, 512, 80, 0.01, 0.9, 0.999)),
        ("bert-mlperf-8k", "bert-mlperf-8k", (8192, 600, 512, 76, 0.0166629, 0.88, 0.88)),
    ],
)
def test_presets_have_the_published_hyperparameters(name: str, schedule: str, published: tuple[Any, ...]) -> None:
    preset, optimizer = PRESETS[name], PRESETS[name].optimizer
    sizes = (preset.global_batch, preset.step_count, preset.sequence_length, preset.prediction_count)
    assert (*sizes, optimizer.weight_decay, optimizer.b1, optimizer.b2) == published
    assert (optimizer.algorithm, optimizer.epsilon, optimizer.max_grad_norm) == ("lamb", 1e-6, 1.0)
    assert preset.schedule == named_schedule(schedule)
    assert preset.model.hidden_size == (768 if "base" in name else 1024)


@pytest.mark.parametrize(
    ("name", "peak", "warmup_share"),
    [
        ("bert-lamb-scaling-512", 6.25e-4, 1 / 320),
        ("bert-lamb-scaling-4096", 1.77e-3, 1 / 40),
        ("bert-lamb-scaling-8192", 2.5e-3, 1 / 20),
        ("bert-lamb-scaling", 5e-3, 1 / 5),
    ],
)
def test_lamb_scaling_has_the_published_table(name: str, peak: float, warmup_share: float) -> None:
    preset = PRESETS[name]
    schedule = preset.schedule
    assert schedule.peak == pytest.approx(peak, rel=2e-3)
    assert schedule.warmup_steps / schedule.total_steps == pytest.approx(warmup_share)
    assert preset.step_count * preset.global_batch == 512_000_000
    values = [float(schedule(step)) for step in (0, preset.step_count // 2, preset.step_count)]
    assert values == pytest.approx([0.0, schedule.peak / 2, 0.0], rel=1e-3, abs=1e-9)


@pytest.fixture
def world_of_one() -> Iterator[None]:
    jaxhetero.initialize()
    yield
    jaxhetero.shutdown()


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("name", ["bert-large-phase1", "bert-base-aws", "bert-mlperf-8k", "bert-lamb-scaling"])
def test_updates_of_the_presets_against_a_transcription(name: str) -> None:
    """The reference LAMB in NumPy, gradients times the loss scale: no decay and no trust ratio for the bias."""
    rng = np.random.default_rng(0)
    layer = {"kernel": rng.normal(size=(3, 2)).astype(np.float32), "bias": rng.normal(size=2).astype(np.float32)}
    config = PRESETS[name].optimizer
    scale = config.loss_scale if config.loss_scaling != "none" else 1.0
    rates = [0.1, 0.2, 0.05]
    optimizer = make_optimizer(config, lambda step: jnp.asarray(rates)[step])
    actual, state = layer, optimizer.init(layer)
    expected = dict(layer)
    first = {part: np.zeros_like(value) for part, value in layer.items()}
    second = {part: np.zeros_like(value) for part, value in layer.items()}

    for step, rate in enumerate(rates, start=1):
        grads = {part: rng.normal(size=value.shape).astype(np.float32) for part, value in layer.items()}
        updates, state = optimizer.update({part: grad * scale for part, grad in grads.items()}, state, actual)
        actual = optax.apply_updates(actual, updates)
        norm = np.sqrt(sum(np.sum(grad**2) for grad in grads.values()))
        for part, weight in expected.items():
            grad = grads[part] / max(norm, 1.0)
            first[part] = config.b1 * first[part] + (1 - config.b1) * grad
            second[part] = config.b2 * second[part] + (1 - config.b2) * grad**2
            mean, variance = first[part] / (1 - config.b1**step), second[part] / (1 - config.b2**step)
            update = mean / (np.sqrt(variance) + 1e-6)
            if part == "kernel":
                update = update + config.weight_decay * weight
                update = update * np.linalg.norm(weight) / np.linalg.norm(update)
            expected[part] = weight - rate * update

    for part in layer:
        np.testing.assert_allclose(actual[part], expected[part], rtol=2e-5)


def test_biases_and_norms_are_not_adapted() -> None:
    """Whatever their shape; the tied decoder's matrix is an embedding, its bias is a bias."""
    model = nnx.eval_shape(lambda: PreTrainingModel(SMOKE.model, rngs=nnx.Rngs(0)))
    mask = nnx.to_flat_state(weights_mask(nnx.state(model, nnx.Param)))
    assert {path[-1]: bool(jax.tree.leaves(value)[0]) for path, value in mask} == {
        "kernel": True,
        "embedding": True,
        "bias": False,
        "scale": False,
        "decoder_bias": False,
    }


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_runs_on_four_workers(name: str) -> None:
    preset = PRESETS[name]
    plan = BatchPlan.make(preset.global_batch, preset.micro_batch, rank=3, worker_count=4)
    assert 4 * plan.micro_batch * plan.accumulate_every == preset.global_batch


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "nope"], "there is no preset 'nope'; there are bert-base-aws, "),
        (["--data", "/nowhere"], "there is no folder /nowhere"),
        ([], "--data is missing"),
        (["--sequence-length", "1000"], "sequence_length is 1000; the model has 128 positions"),
        (["--head-count", "3"], "head_count is 3; it must divide hidden_size (128)"),
    ],
)
def test_bad_settings_are_named(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["models.bert", *arguments])
    assert command.main() in (1, 2)
    jaxhetero.shutdown()
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_a_vocabulary_of_another_size_is_refused(prepared: Path) -> None:
    preset = replace(SMOKE, model=replace(SMOKE.model, vocabulary_size=501))
    with pytest.raises(DataError, match=r"vocabulary_size is 500 in .*; prepare .*, or give --vocabulary-size 500"):
        PreTrainingData(prepared, preset)


def test_dry_run_shows_the_plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["models.bert", "--preset", "bert-large-phase1", "--dry-run"])
    assert command.main() == 0
    shown = capsys.readouterr().out
    # The published network, in buckets of at most 25 MB but for the embedding of 125 MB.
    for figure in ("336,226,108 in 398 arrays", "1,344,904,432 bytes", "1024 x 64", "125,018,112 bytes"):
        assert figure in shown


# --- whole runs ------------------------------------------------------------------------------------------------------


def run_trainer(folder: Path, *arguments: str, workers: int = 1, reducers: int = 0, code: int = 0) -> tuple[Any, str]:
    """The result and the output of one run, through the launcher when it has several workers."""
    program = [sys.executable, "-m", "models.bert", "--preset", "bert-smoke", "--output", str(folder), *arguments]
    if workers > 1:
        counts = ["--workers", str(workers), "--reducers", str(reducers)]
        logs = ["--log-dir", str(folder.with_suffix(".logs"))]
        program = [sys.executable, "-m", "jaxhetero", "launch", *counts, *logs, "--", *program]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("JAXHETERO_")}
    outcome = subprocess.run(
        program,
        cwd=REPOSITORY,
        env={**inherited, "PYTHONWARNINGS": "error"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert outcome.returncode == code, outcome.stdout
    result = folder / "result.json"
    return json.loads(result.read_text()) if result.exists() else None, outcome.stdout


@pytest.fixture(scope="module")
def alone(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("alone") / "run"
    return folder, run_trainer(folder, "--data", str(prepared))[0]


@pytest.mark.timeout(2 * RUN_TIMEOUT_S)  # the fixture's run counts
def test_four_workers_train_like_one(prepared: Path, alone: tuple[Path, Any], tmp_path: Path) -> None:
    """Four workers with one piece each, and one that accumulates four: the same dropout, the same loss curve."""
    _, one = alone
    four, output = run_trainer(tmp_path / "four", "--data", str(prepared), workers=4, reducers=2)
    assert len(one["losses"]) == 12
    assert one["losses"][-1] < one["losses"][0]
    np.testing.assert_allclose(four["losses"], one["losses"], rtol=LOSS_CURVE_TOLERANCE)
    assert [scores["step"] for scores in four["evaluations"]] == [6, 12]
    held_out = sum(1 for _ in find_records(prepared, "held-out"))
    assert held_out % (4 * SMOKE.micro_batch), "the last batches should be partial ones"
    for name, value in one["evaluations"][-1].items():
        assert four["evaluations"][-1][name] == pytest.approx(value, rel=0.01, abs=0.01), name
    assert 1.0 <= four["sent_bytes_ratio"] < 1.05
    assert "identical on 4 workers" in output


def test_a_run_leaves_curve_logs_and_checkpoints(alone: tuple[Path, Any]) -> None:
    folder, result = alone
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"6", "12"}
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert any(path.name.startswith("events.out") for path in (folder / "tensorboard").iterdir())
    assert result["is_complete"]
    assert result["settings"]["schedule"]["peak"] == 0.05


@pytest.mark.timeout(2 * RUN_TIMEOUT_S)
def test_a_resumed_run_ends_with_the_same_losses_and_weights(
    prepared: Path, alone: tuple[Path, Any], tmp_path: Path
) -> None:
    from shutil import copytree

    folder, one = alone
    copytree(folder / "checkpoints" / "6", tmp_path / "run" / "checkpoints" / "6")
    resumed, _ = run_trainer(tmp_path / "run", "--data", str(prepared), "--resume", "latest")
    assert resumed["first_step"] == 6
    assert resumed["step_count"] == 6
    assert resumed["losses"] == one["losses"]
    assert resumed["evaluations"] == one["evaluations"]
