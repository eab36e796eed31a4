"""Pre-training examples: pairs of texts with some tokens masked, as in the original BERT.

In half of the pairs the second text follows the first in its document; in the other half it does not. The model has to
name 15 % of the tokens. Of these, 80 % are replaced by ``[MASK]``, 10 % by a random token, and 10 % stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.bert.text import SPECIAL_TOKENS, Vocabulary
from models.common.errors import require

Sentences = list[list[int]]
"""A document: the token ids of each of its sentences."""


@dataclass(frozen=True)
class ExampleConfig:
    """How examples are made. The defaults are those of the first phase of pre-training."""

    sequence_length: int = 128
    prediction_count: int = 20
    """The most tokens of a sequence that the model has to name."""
    masked_share: float = 0.15
    """The share of the tokens that the model has to name."""
    short_share: float = 0.1
    """The share of sequences that are made shorter, because texts in use are shorter than those in training."""
    whole_words: bool = False
    """Mask all pieces of a word or none."""
    copies: int = 1
    """How often each document is used. Each copy has other pairs and other masks."""
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.sequence_length >= 8, f"sequence_length is {self.sequence_length}; it must be at least 8")
        require(self.prediction_count >= 1, f"prediction_count is {self.prediction_count}; it must be at least 1")
        require(0 < self.masked_share < 1, f"masked_share is {self.masked_share}; it must be between 0 and 1")
        require(self.copies >= 1, f"copies is {self.copies}; it must be at least 1")


@dataclass(frozen=True)
class PreTrainingExample:
    """One sequence without padding, ``[CLS] first [SEP] second [SEP]`` after masking, and the answers."""

    token_ids: list[int]
    first_length: int
    """Tokens of segment 0, with ``[CLS]`` and the first ``[SEP]``."""
    positions: list[int]
    answers: list[int]
    is_random: bool

    def features(self, config: ExampleConfig) -> dict[str, NDArray[np.int64] | NDArray[np.float32]]:
        """The features of the usual record, padded with zeros."""
        length, predictions = config.sequence_length, config.prediction_count

        def filled(values: list[int], size: int) -> NDArray[np.int64]:
            return np.pad(np.array(values, np.int64), (0, size - len(values)))

        real = len(self.token_ids)
        return {
            "input_ids": filled(self.token_ids, length),
            "input_mask": filled([1] * real, length),
            "segment_ids": filled([0] * self.first_length + [1] * (real - self.first_length), length),
            "masked_lm_positions": filled(self.positions, predictions),
            "masked_lm_ids": filled(self.answers, predictions),
            "masked_lm_weights": filled([1] * len(self.positions), predictions).astype(np.float32),
            "next_sentence_labels": np.array([self.is_random], np.int64),
        }


def make_examples(
    documents: list[Sentences], vocabulary: Vocabulary, config: ExampleConfig
) -> Iterator[PreTrainingExample]:
    """All examples of some documents, in the documents' order. The same arguments give the same examples."""
    for copy in range(config.copies):
        for number in range(len(documents)):
            rng = np.random.default_rng((config.seed, copy, number))
            for first, second, is_random in _pairs(documents, number, config, rng):
                yield _mask(first, second, is_random, vocabulary, config, rng)


def _pairs(
    documents: list[Sentences], number: int, config: ExampleConfig, rng: np.random.Generator
) -> Iterator[tuple[list[int], list[int], bool]]:
    """Cut a document into stretches of about one sequence each, and each stretch into two texts at a sentence's end."""
    room = config.sequence_length - 3
    document = documents[number]
    start = 0
    while start < len(document):
        target = room if rng.random() >= config.short_share else int(rng.integers(2, room + 1))
        end, length = start, 0
        while end < len(document) and length < target:
            length += len(document[end])
            end += 1
        middle = start + int(rng.integers(1, end - start)) if end - start > 1 else end
        first = _join(document[start:middle])
        # With one sentence there is nothing left to follow it.
        is_random = middle == end or rng.random() < 0.5
        if is_random:
            second = _random_text(documents, number, max(target - len(first), 1), rng)
            # The second half has not been used: the next pair begins with it.
            start = middle
        else:
            second = _join(document[middle:end])
            start = end
        _truncate(first, second, room, rng)
        if first and second:
            yield first, second, is_random


def _join(sentences: Sentences) -> list[int]:
    return [token for sentence in sentences for token in sentence]


def _random_text(documents: list[Sentences], number: int, target: int, rng: np.random.Generator) -> list[int]:
    """Sentences from a random place of another document (of this one if there is no other)."""
    other = int(rng.integers(0, len(documents) - 1)) if len(documents) > 1 else 0
    document = documents[other + (other >= number) if len(documents) > 1 else 0]
    start = int(rng.integers(0, len(document)))
    text: list[int] = []
    for sentence in document[start:]:
        text += sentence
        if len(text) >= target:
            break
    return text


def _truncate(first: list[int], second: list[int], room: int, rng: np.random.Generator) -> None:
    """Drop tokens from a random end of the longer text until both texts fit."""
    while len(first) + len(second) > room:
        longer = first if len(first) > len(second) else second
        del longer[0 if rng.random() < 0.5 else -1]


def _mask(
    first: list[int],
    second: list[int],
    is_random: bool,
    vocabulary: Vocabulary,
    config: ExampleConfig,
    rng: np.random.Generator,
) -> PreTrainingExample:
    tokens = [vocabulary.cls, *first, vocabulary.sep, *second, vocabulary.sep]
    units = _maskable_units(tokens, vocabulary, config)
    wanted = min(config.prediction_count, max(1, round(len(tokens) * config.masked_share)))
    chosen: list[int] = []
    for unit in rng.permutation(len(units)):
        if len(chosen) + len(units[unit]) <= wanted:
            chosen += units[unit]
        if len(chosen) == wanted:
            break
    chosen.sort()
    shown = list(tokens)
    for position in chosen:
        draw = rng.random()
        if draw < 0.8:
            shown[position] = vocabulary.mask
        elif draw < 0.9:
            shown[position] = int(rng.integers(len(SPECIAL_TOKENS), len(vocabulary)))
    return PreTrainingExample(shown, len(first) + 2, chosen, [tokens[position] for position in chosen], is_random)


def _maskable_units(tokens: list[int], vocabulary: Vocabulary, config: ExampleConfig) -> list[list[int]]:
    """The positions of ordinary tokens, in units that are masked together: single tokens, or whole words."""
    units: list[list[int]] = []
    for position, token in enumerate(tokens):
        if token in (vocabulary.cls, vocabulary.sep):
            continue
        if config.whole_words and units and units[-1][-1] == position - 1 and vocabulary.is_continuation[token]:
            units[-1].append(position)
        else:
            units.append([position])
    return units
