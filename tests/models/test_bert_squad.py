"""Question answering: the official scores on cases worked out by hand, windows, answers, and cloze questions."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.bert.cloze import Options as ClozeOptions
from models.bert.cloze import find_choices, guess_scores, make_cloze
from models.bert.finetune import PRESETS
from models.bert.squad import (
    AnswerConfig,
    Feature,
    FeatureConfig,
    Question,
    choose_answers,
    make_features,
    normalize_answer,
    read_squad,
    score_answers,
)
from models.bert.text import SPECIAL_TOKENS, Vocabulary
from models.common.errors import DataError, SettingsError

WORDS = "the cat sat on a mat while dogs ran around it rained . ? who".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    path.write_text("\n".join([*SPECIAL_TOKENS, *WORDS]) + "\n")
    return Vocabulary(path)


def squad_json(*asked: dict[str, Any], context: str) -> dict[str, Any]:
    return {"version": "2.0", "data": [{"title": "t", "paragraphs": [{"context": context, "qas": list(asked)}]}]}


CONTEXT = "The cat sat on a mat while dogs ran around. It rained."


@pytest.fixture
def questions(tmp_path: Path) -> list[Question]:
    content = squad_json(
        {"id": "q1", "question": "Who sat?", "answers": [{"text": "cat", "answer_start": 4}]},
        {"id": "q2", "question": "Who ran?", "answers": [{"text": "dogs", "answer_start": 27}]},
        {"id": "q3", "question": "Who?", "answers": [], "is_impossible": True},
        context=CONTEXT,
    )
    path = tmp_path / "dev.json"
    path.write_text(json.dumps(content))
    return read_squad(path)


# --- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "normalised"),
    [
        ("The  Cat!", "cat"),
        ("an apple, a day", "apple day"),
        ("U.S.A.", "usa"),
        ("the", ""),
        ("theatre", "theatre"),
        ("well-known", "wellknown"),
    ],
)
def test_answers_are_normalised_as_in_the_official_script(text: str, normalised: str) -> None:
    assert normalize_answer(text) == normalised


def question(name: str, *answers: str) -> Question:
    return Question(name, "?", "", tuple((answer, 0) for answer in answers))


@pytest.mark.parametrize(
    ("answers", "prediction", "exact", "f1"),
    [
        (["cat"], "The cat", 1, 1),
        (["black cat"], "cat", 0, 2 / 3),
        (["cat", "black cat"], "a black cat", 1, 1),
        (["red green blue"], "green blue yellow", 0, 2 / 3),
        (["to be or not to be"], "to to to", 0, 2 * 2 / 9),
        (["dog"], "cat", 0, 0),
        (["cat"], "", 0, 0),
        ([], "", 1, 1),
        ([], "cat", 0, 0),
        (["the"], "", 1, 1),
        (["the", "cat"], "", 0, 0),
    ],
)
def test_scores_of_one_question(answers: list[str], prediction: str, exact: float, f1: float) -> None:
    """The last two: an answer of an article alone is none, and does not count where there is a real one."""
    scores = score_answers([question("q", *answers)], {"q": prediction})
    assert scores == pytest.approx({"exact_match": 100 * exact, "f1": 100 * f1})


def test_scores_of_a_file_of_predictions() -> None:
    """Means over all questions, and over those with and without an answer; a missing prediction is wrong."""
    asked = [question("a", "cat"), question("b", "black cat"), question("c"), question("d")]
    scores = score_answers(asked, {"a": "cat", "b": "cat", "c": ""})
    assert scores == pytest.approx(
        {
            "exact_match": 50.0,
            "f1": 100 * (1 + 2 / 3 + 1) / 4,
            "answerable_exact_match": 50.0,
            "answerable_f1": 100 * (1 + 2 / 3) / 2,
            "unanswerable_exact_match": 50.0,
            "unanswerable_f1": 50.0,
        }
    )


# --- files and windows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no file"),
        ('{"data": [{"parag', "is no SQuAD JSON, or truncated: JSONDecodeError"),
        ('{"data": [{"title": ""}]}', "is no SQuAD JSON, or truncated: KeyError 'paragraphs'"),
        ('{"data": []}', "has no questions"),
        (
            json.dumps(
                squad_json(
                    {"id": "q", "question": "?", "answers": [{"text": "cat", "answer_start": 0}]}, context=CONTEXT
                )
            ),
            "question q: the answer 'cat' is not at character 0",
        ),
    ],
)
def test_bad_files_are_named(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=message):
        read_squad(path)


def test_windows_cover_the_context_and_know_their_answers(questions: list[Question], vocabulary: Vocabulary) -> None:
    config = FeatureConfig(sequence_length=14, stride=3, question_length=4)
    features = make_features(questions, vocabulary, config)
    context = vocabulary.encode([CONTEXT])[0]
    for number, asked in enumerate(questions):
        mine = [feature for feature in features if feature.question == number]
        shown = set()
        best = []
        for feature in mine:
            assert len(feature.token_ids) <= 14
            window = feature.token_ids[feature.context_begin : -1]
            texts = [CONTEXT[begin:end].lower() for begin, end in feature.spans]
            assert [vocabulary.tokens[token] for token in window] == texts
            shown |= set(feature.spans)
            best += [span for span, is_best in zip(feature.spans, feature.is_best_context, strict=True) if is_best]
            if feature.start:
                assert texts[feature.start - feature.context_begin] == asked.answers[0][0]
                assert feature.end == feature.start
        assert len(shown) == len(context)
        assert len(best) == len(set(best)) == len(context), "every token is best shown by one window"
        assert any(feature.start for feature in mine) == bool(asked.answers)
    assert len([feature for feature in features if feature.question == 0]) > 1


def test_a_stride_that_would_leave_tokens_out_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"stride is 318; it must be 1 to .* \(317\)"):
        FeatureConfig(stride=318)


# --- answers ---------------------------------------------------------------------------------------------------------


def logits_for(feature: Feature, **scores: float) -> tuple[Any, Any]:
    """Logits that are high for the words named, as beginning and as end."""
    logits = np.full(40, -10, np.float32)
    for word, score in scores.items():
        for place, (begin, end) in enumerate(feature.spans):
            if CONTEXT[begin:end] == word:
                logits[feature.context_begin + place] = score
    return logits, logits.copy()


@pytest.fixture
def one(questions: list[Question], vocabulary: Vocabulary) -> tuple[list[Question], list[Feature]]:
    asked = questions[:1]
    return asked, make_features(asked, vocabulary, FeatureConfig(sequence_length=40, stride=10, question_length=8))


def test_answers_are_spans_in_order_of_their_scores(one: tuple[list[Question], list[Feature]]) -> None:
    asked, features = one
    logits = [logits_for(features[0], cat=5, mat=4)]
    best = choose_answers(asked, features, logits, AnswerConfig())["q1"]
    assert [(answer.text, answer.score) for answer in best[:3]] == [("cat", 10), ("cat sat on a mat", 9), ("mat", 8)]
    short = choose_answers(asked, features, logits, AnswerConfig(answer_length=4, best_count=2))["q1"]
    assert [answer.text for answer in short] == ["cat", "mat"]


@pytest.mark.parametrize(("threshold", "chosen"), [(-1.0, ""), (0.0, ""), (2.5, "cat")])
def test_no_answer_must_beat_the_best_one_by_the_threshold(
    one: tuple[list[Question], list[Feature]], threshold: float, chosen: str
) -> None:
    asked, features = one
    starts, ends = logits_for(features[0], cat=5)
    starts[0] = ends[0] = 6
    config = AnswerConfig(has_unanswerable=True, null_threshold=threshold)
    best = choose_answers(asked, features, [(starts, ends)], config)["q1"]
    assert best[0].text == chosen
    assert {answer.text for answer in best[:2]} == {"", "cat"}
    # Version 1.1 has no such answer.
    assert choose_answers(asked, features, [(starts, ends)], AnswerConfig())["q1"][0].text == "cat"


def test_nothing_outside_the_context_is_an_answer(one: tuple[list[Question], list[Feature]]) -> None:
    asked, features = one
    starts, ends = logits_for(features[0], mat=1)
    starts[1] = ends[2] = 9
    assert choose_answers(asked, features, [(starts, ends)], AnswerConfig(best_count=3))["q1"][0].text == "mat"


# --- cloze -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Ten documents of 60 words, of which ten occur once."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(10):
        words = [f"{number} says it of an animal{chr(97 + place)}{'x' * place}." for place in range(10)]
        (folder / f"{number}.txt").write_text("\n".join(words))
    return folder


def test_cloze_questions_are_squad_files_from_held_out_texts(texts: Path, tmp_path: Path) -> None:
    options = ClozeOptions(texts, tmp_path / "cloze", held_out_share=0.4, dev_share=0.5)
    counts = make_cloze(options)
    documents = set()
    for name, count in counts.items():
        asked = read_squad(tmp_path / "cloze" / name)
        assert len(asked) == len({question.id for question in asked}) == count > 0
        for question in asked:
            (text, _), *_ = question.answers
            assert question.text.count("[MASK]") == 1
            assert question.text.replace("[MASK]", text) in question.context
            assert question.context.count(text) == 1
            documents |= {(name, word) for word in question.context.split() if word.isdigit()}
    assert len(documents) == 4, "each is for training or for evaluation"
    again = replace(options, output=tmp_path / "again")
    assert make_cloze(again) == counts
    assert all((tmp_path / "again" / n).read_text() == (tmp_path / "cloze" / n).read_text() for n in counts)


def test_a_cloze_question_shows_no_more_than_it_is_told_to(texts: Path, tmp_path: Path) -> None:
    options = ClozeOptions(texts, tmp_path / "cloze", 0.4, context_words=24, question_words=2, question_count=3)
    make_cloze(options)
    asked = read_squad(tmp_path / "cloze" / "train.json")
    assert {len(question.context.split()) for question in asked} == {24, 12}
    assert set(Counter(question.context for question in asked).values()) == {3, 2}
    for question in asked:
        words, (text, _) = question.context.split(), question.answers[0]
        (hole,) = [place for place, word in enumerate(words) if text in word]
        shown = words[max(0, hole - 2) : hole + 3]
        assert question.text.split() == [word.replace(text, "[MASK]") for word in shown]


def test_guessing_is_what_a_model_must_beat() -> None:
    """Of four choices one is in the question, and of the other three one is right and one is half right."""
    context = "an apple, a cherry, my black olive, his black raven"
    asked = Question("q", "cherry, my [MASK], his", context, (("black olive", context.index("black olive")),))
    assert [match.group() for match in find_choices(context)] == ["apple", "cherry", "black olive", "black raven"]
    assert guess_scores([asked]) == pytest.approx({"guess_exact_match": 100 / 3, "guess_f1": 50})


@pytest.mark.parametrize("name", ["context_words", "question_words", "question_count"])
def test_cloze_settings_are_checked(name: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"{name} is 0; it must be at least 1"):
        ClozeOptions(tmp_path, tmp_path / "cloze", **{name: 0})


@pytest.mark.parametrize(
    ("name", "batch", "expected", "has_unanswerable"),
    [
        # A linear rise over a share of the steps, then a linear fall from the rate that it would have without a rise.
        ("bert-large-squad11", 256, {0: 0.0, 100: 2.3e-5, 200: 4.6e-5 * 0.8, 1000: 0.0}, False),
        ("bert-large-squad20", 48, {0: 0.0, 50: 2.5e-5, 100: 5e-5 * 0.9, 550: 2.25e-5, 1000: 0.0}, True),
    ],
)
def test_fine_tuning_presets_are_those_of_the_published_recipes(
    name: str, batch: int, expected: dict[int, float], has_unanswerable: bool
) -> None:
    """Of 1,000 steps."""
    preset = PRESETS[name]
    assert (preset.global_batch, preset.epochs, preset.answers.has_unanswerable) == (batch, 2, has_unanswerable)
    assert (preset.features.sequence_length, preset.features.stride) == (384, 128)
    for step, rate in expected.items():
        assert float(preset.schedule(1000)(step)) == pytest.approx(rate, abs=1e-10), step
