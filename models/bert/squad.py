"""SQuAD 1.1 and 2.0: questions from the original JSON, features, answers from logits, and the official scores."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.bert.text import Vocabulary
from models.common.errors import DataError, require

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Question:
    """One question about one paragraph."""

    id: str
    text: str
    context: str
    answers: tuple[tuple[str, int], ...]
    """Every accepted text and its first character in the context; empty if there is no answer (SQuAD 2.0)."""


@dataclass(frozen=True)
class FeatureConfig:
    """How questions become sequences. The defaults are those of the original BERT."""

    sequence_length: int = 384
    stride: int = 128
    """Tokens from one window to the next. A context that is too long for a sequence is cut into such windows."""
    question_length: int = 64
    """The most tokens of a question. Longer questions are cut."""

    def __post_init__(self) -> None:
        room = self.sequence_length - self.question_length - 3
        require(
            0 < self.stride <= room,
            f"stride is {self.stride}; it must be 1 to sequence_length - question_length - 3 ({room}), or tokens "
            "would be left out",
        )


@dataclass(frozen=True)
class Feature:
    """``[CLS] question [SEP] window of the context [SEP]``, and the positions of its parts."""

    question: int
    """The index of the question in the list of questions."""
    token_ids: list[int]
    context_begin: int
    """The token at which the window begins."""
    spans: list[tuple[int, int]]
    """For every token of the window: the first and the last plus one of its characters in the context."""
    is_best_context: list[bool]
    """For every token of the window: True if this window shows most around it, see ``_best_window``."""
    start: int
    """The first token of the answer; 0, that is ``[CLS]``, if the window does not contain all of it."""
    end: int
    """The last token of the answer, or 0."""


def read_squad(path: Path) -> list[Question]:
    """All questions of a file.

    Raises:
      DataError: the file is missing, is no SQuAD JSON, or has an answer that is not at its place in the context.
    """
    try:
        articles = json.loads(path.read_text(encoding="utf-8"))["data"]
        questions = [
            _question(asked, paragraph["context"], path)
            for article in articles
            for paragraph in article["paragraphs"]
            for asked in paragraph["qas"]
        ]
    except FileNotFoundError:
        raise DataError(f"there is no file {path}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no SQuAD JSON, or truncated: {type(error).__name__} {error}") from None
    if not questions:
        raise DataError(f"{path} has no questions")
    return questions


def _question(asked: dict[str, Any], context: str, path: Path) -> Question:
    answers = tuple((answer["text"], answer["answer_start"]) for answer in asked.get("answers", []))
    for text, start in answers:
        if context[start : start + len(text)] != text:
            raise DataError(f"{path}: question {asked['id']}: the answer {text!r} is not at character {start}")
    return Question(asked["id"], asked["question"], context, () if asked.get("is_impossible") else answers)


def make_features(questions: Sequence[Question], vocabulary: Vocabulary, config: FeatureConfig) -> list[Feature]:
    """The windows of all questions, in order."""
    return [
        feature
        for number, question in enumerate(questions)
        for feature in _features_of(number, question, vocabulary, config)
    ]


def _features_of(number: int, question: Question, vocabulary: Vocabulary, config: FeatureConfig) -> Iterable[Feature]:
    asked = vocabulary.encode([question.text])[0][: config.question_length]
    encoding = vocabulary.tokenizer.encode(question.context, add_special_tokens=False)
    room = config.sequence_length - len(asked) - 3
    windows = [(0, min(room, len(encoding.ids)))]
    while windows[-1][1] < len(encoding.ids):
        begin = windows[-1][0] + config.stride
        windows.append((begin, min(begin + room, len(encoding.ids))))
    answer = _answer_tokens(question, encoding.offsets)
    context_begin = len(asked) + 2
    for window, (begin, end) in enumerate(windows):
        tokens = [vocabulary.cls, *asked, vocabulary.sep, *encoding.ids[begin:end], vocabulary.sep]
        start = last = 0
        if answer and begin <= answer[0] and answer[1] < end:
            start, last = (context_begin + token - begin for token in answer)
        best = [_best_window(windows, token) == window for token in range(begin, end)]
        yield Feature(number, tokens, context_begin, encoding.offsets[begin:end], best, start, last)


def _answer_tokens(question: Question, offsets: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """The first and the last token that share a character with the first answer."""
    if not question.answers:
        return None
    text, begin = question.answers[0]
    inside = [token for token, (first, end) in enumerate(offsets) if first < begin + len(text) and end > begin]
    return (inside[0], inside[-1]) if inside else None


def _best_window(windows: Sequence[tuple[int, int]], token: int) -> int:
    """The window with the most tokens on both sides of the token: the shorter side counts.

    Of equal windows the longest one counts, then the first one.
    """

    def score(window: int) -> float:
        begin, end = windows[window]
        if not begin <= token < end:
            return -1.0
        return min(token - begin, end - 1 - token) + 0.01 * (end - begin)

    return max(range(len(windows)), key=score)


@dataclass(frozen=True)
class AnswerConfig:
    """How answers are chosen."""

    best_count: int = 20
    """How many answers of each question are kept, and how many beginnings and ends of each window are tried."""
    answer_length: int = 30
    """The most tokens of an answer."""
    has_unanswerable: bool = False
    """SQuAD 2.0: a question may have no answer."""
    null_threshold: float = 0.0
    """No answer is chosen if its score is higher than that of the best answer by more than this."""


@dataclass(frozen=True)
class Answer:
    """A text of the context, "" for none, and its score: the sum of its two logits."""

    text: str
    score: float


def choose_answers(
    questions: Sequence[Question],
    features: Sequence[Feature],
    logits: Sequence[tuple[Logits, Logits]],
    config: AnswerConfig,
) -> dict[str, list[Answer]]:
    """The best answers of each question by its id, the chosen one first; never an empty list.

    ``logits`` are those of the first and the last token of each feature, float32 ``[length]``.
    """
    found: dict[int, list[Answer]] = {number: [] for number in range(len(questions))}
    null_scores = dict.fromkeys(found, float("inf"))
    for feature, (starts, ends) in zip(features, logits, strict=True):
        found[feature.question] += _answers_in(feature, questions[feature.question].context, starts, ends, config)
        null_scores[feature.question] = min(null_scores[feature.question], float(starts[0] + ends[0]))
    return {question.id: _rank(found[number], null_scores[number], config) for number, question in enumerate(questions)}


def _answers_in(feature: Feature, context: str, starts: Logits, ends: Logits, config: AnswerConfig) -> Iterable[Answer]:
    window = range(feature.context_begin, feature.context_begin + len(feature.spans))
    for start in np.argsort(-starts, kind="stable")[: config.best_count].tolist():
        if start not in window or not feature.is_best_context[start - window.start]:
            continue
        for end in np.argsort(-ends, kind="stable")[: config.best_count].tolist():
            if end in window and start <= end < start + config.answer_length:
                begin = feature.spans[start - window.start][0]
                text = context[begin : feature.spans[end - window.start][1]]
                yield Answer(text, float(starts[start] + ends[end]))


def _rank(answers: list[Answer], null_score: float, config: AnswerConfig) -> list[Answer]:
    best: dict[str, Answer] = {}
    for answer in sorted(answers, key=lambda answer: -answer.score):
        best.setdefault(answer.text, answer)
    ranked = list(best.values())[: config.best_count]
    nothing = Answer("", null_score)
    if config.has_unanswerable:
        is_null = not ranked or null_score - ranked[0].score > config.null_threshold
        return [nothing, *ranked] if is_null else [ranked[0], nothing, *ranked[1:]]
    return ranked or [nothing]


# --- the official scores ---------------------------------------------------------------------------------------------

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation, articles and extra white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split())


def exact_match(prediction: str, truth: str) -> float:
    """1 if both are the same text when normalised."""
    return float(normalize_answer(prediction) == normalize_answer(truth))


def f1_score(prediction: str, truth: str) -> float:
    """The harmonic mean of precision and recall over words. If one has no words: 1 if both have none."""
    predicted, wanted = normalize_answer(prediction).split(), normalize_answer(truth).split()
    if not predicted or not wanted:
        return float(predicted == wanted)
    common = sum((Counter(predicted) & Counter(wanted)).values())
    return 2 * common / (len(predicted) + len(wanted))


def score_answers(questions: Sequence[Question], predictions: Mapping[str, str]) -> dict[str, float]:
    """The official figures, in per cent: the best over the accepted answers, averaged over all questions.

    For SQuAD 2.0 there are also the averages over the questions with and without an answer. A question without a
    prediction counts as wrong.
    """
    exact, f1 = {}, {}
    for question in questions:
        # Answers that normalise to nothing are not accepted, unless there is no other.
        truths = [text for text, _ in question.answers if normalize_answer(text)] or [""]
        prediction = predictions.get(question.id)
        exact[question.id] = 0.0 if prediction is None else max(exact_match(prediction, truth) for truth in truths)
        f1[question.id] = 0.0 if prediction is None else max(f1_score(prediction, truth) for truth in truths)

    def mean(values: Mapping[str, float], wanted: Iterable[Question]) -> float:
        chosen = [values[question.id] for question in wanted]
        return 100 * sum(chosen) / len(chosen)

    scores = {"exact_match": mean(exact, questions), "f1": mean(f1, questions)}
    groups = {
        "answerable": [q for q in questions if q.answers],
        "unanswerable": [q for q in questions if not q.answers],
    }
    if all(groups.values()):
        for name, group in groups.items():
            scores |= {f"{name}_exact_match": mean(exact, group), f"{name}_f1": mean(f1, group)}
    return scores
