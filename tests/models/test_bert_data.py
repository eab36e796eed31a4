"""BERT: text to pre-training records, and back."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboardX.record_writer import RecordWriter

from models.bert.baselines import baselines
from models.bert.data import PreTrainingData
from models.bert.masking import ExampleConfig, PreTrainingExample, make_examples
from models.bert.prepare import FACTS_FILE, encode_document, make_options, prepare
from models.bert.presets import DEFAULT_PRESET, PRESETS
from models.bert.text import Vocabulary, split_sentences
from models.common.batches import BatchSplit
from models.common.errors import DataError
from models.common.manifest import MANIFEST_FILE
from models.common.records import find_records
from models.common.tf_example import encode_example
from tests.support import trainers

SMOKE = PRESETS["bert-smoke"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trainers.write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def prepared(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trainers.prepare_records(text, tmp_path_factory.mktemp("prepared") / "records")


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
    prepare(trainers.prepare_options(text, again))
    prepare(trainers.prepare_options(text, other, seed=1))

    def contents(folder: Path) -> list[bytes]:
        return list(find_records(folder, "train"))

    assert contents(again) == contents(prepared)
    assert contents(other) != contents(prepared)
    assert not {*contents(prepared)} & {*find_records(prepared, "held-out")}


def test_sha256sum_accepts_the_checksums_of_what_is_prepared(prepared: Path) -> None:
    command = ["sha256sum", "--check", "--strict", MANIFEST_FILE]
    check = subprocess.run(command, cwd=prepared, stdout=subprocess.PIPE, text=True, check=True)
    checked = {line.removesuffix(": OK") for line in check.stdout.splitlines()}
    assert checked == {path.name for path in prepared.iterdir()} - {MANIFEST_FILE}


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
            split = BatchSplit.make(16, 4, rank=rank, worker_count=worker_count)
            for batch, _, number in data.train_batches(split, first_step):
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
        prepare(trainers.prepare_options(tmp_path / "text", tmp_path / "output"))
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_a_vocabulary_that_is_none(text: Path, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("the\n[PAD]\n")
    options = replace(trainers.prepare_options(text, tmp_path / "output"), vocabulary=tmp_path / "vocab.txt")
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


def test_a_vocabulary_of_another_size_is_refused(prepared: Path) -> None:
    preset = replace(SMOKE, model=replace(SMOKE.model, vocabulary_size=501))
    with pytest.raises(DataError, match=r"vocabulary_size is 500 in .*; prepare .*, or give --vocabulary-size 500"):
        PreTrainingData(prepared, preset)


def test_what_differs_from_the_settings_is_told_at_once(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    facts = {"vocabulary_size": 8192, "sequence_length": 128, "prediction_count": SMOKE.prediction_count}
    (folder / FACTS_FILE).write_text(json.dumps(facts))
    with pytest.raises(DataError, match=r"with --preset, or give --vocabulary-size 8192 --sequence-length 128$"):
        PreTrainingData(folder, SMOKE)


def test_records_are_prepared_for_a_preset() -> None:
    """The default is that of the trainer, so that the shortest commands work together."""
    tiny = make_options(PRESETS[DEFAULT_PRESET], DEFAULT_PRESET)
    assert tiny.vocabulary_size == PRESETS[DEFAULT_PRESET].model.vocabulary_size == 1024
    long = make_options(PRESETS["bert-large-phase2"], "bert-large-phase2")
    assert (long.examples.sequence_length, long.examples.prediction_count) == (512, 80)
