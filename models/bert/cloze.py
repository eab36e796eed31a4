"""``python -m models.bert.cloze``: questions in SQuAD's format from plain text, for want of the original.

A question is a sentence with one word, or a few, taken out; the context is the paragraph around the sentence, in which
the model has to find what is missing. Words are taken out where they are long enough to matter and occur once more in
no other place of the paragraph.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from models.bert.prepare import choose_held_out
from models.bert.text import MASK, find_documents, read_text, split_sentences
from models.common.command import run_command
from models.common.errors import DataError, require
from models.common.records import new_folder

TRAIN_FILE, DEV_FILE = "train.json", "dev.json"
_LONG_WORDS = re.compile(r"[A-Za-z]{5,}(?: [A-Za-z]{5,})?")


@dataclass(frozen=True)
class Options:
    """Make cloze questions from the texts that `models.bert.prepare` held out with the same seed and share."""

    text: Path
    """The folder with UTF-8 .txt files."""
    output: Path
    """A new folder for train.json and dev.json."""
    held_out_share: float = 0.05
    """As given to `models.bert.prepare`."""
    seed: int = 0
    """As given to `models.bert.prepare`."""
    dev_share: float = 0.2
    """Of the held-out documents, for dev.json; the questions of the others are for train.json."""
    sentence_count: int = 3
    """Sentences in a context."""

    def __post_init__(self) -> None:
        require(0 < self.held_out_share < 1, f"held_out_share is {self.held_out_share}; it must be between 0 and 1")
        require(0 < self.dev_share < 1, f"dev_share is {self.dev_share}; it must be between 0 and 1")
        require(self.sentence_count >= 1, f"sentence_count is {self.sentence_count}; it must be at least 1")


def make_cloze(options: Options) -> dict[str, int]:
    """Write both files, or nothing; how many questions each has."""
    documents = find_documents(options.text)
    is_held_out = choose_held_out(len(documents), options.held_out_share, options.seed)
    held_out = [read_text(path) for path, chosen in zip(documents, is_held_out, strict=True) if chosen]
    dev_count = max(1, round(len(held_out) * options.dev_share))
    parts = {TRAIN_FILE: held_out[dev_count:], DEV_FILE: held_out[:dev_count]}
    counts = {}
    with new_folder(options.output) as folder:
        for name, texts in parts.items():
            rng = np.random.default_rng((options.seed, len(name)))
            articles = [_article(number, text, options.sentence_count, rng) for number, text in enumerate(texts)]
            counts[name] = sum(len(paragraph["qas"]) for article in articles for paragraph in article["paragraphs"])
            if counts[name] == 0:
                raise DataError(f"the {len(texts)} held-out documents for {name} make no question; hold out more")
            (folder / name).write_text(json.dumps({"version": "1.1", "data": articles}), encoding="utf-8")
    return counts


def _article(number: int, text: str, sentence_count: int, rng: np.random.Generator) -> dict[str, Any]:
    sentences = split_sentences(text)
    windows = (sentences[start : start + sentence_count] for start in range(0, len(sentences), sentence_count))
    paragraphs = [
        {"context": " ".join(window), "qas": list(_questions(f"{number}-{place}", window, rng))}
        for place, window in enumerate(windows)
    ]
    return {"title": str(number), "paragraphs": [paragraph for paragraph in paragraphs if paragraph["qas"]]}


def _questions(name: str, sentences: list[str], rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """One question for each sentence that has a word to take out."""
    context, begin = " ".join(sentences), 0
    for place, sentence in enumerate(sentences):
        choices = [match for match in _LONG_WORDS.finditer(sentence) if context.count(match.group()) == 1]
        if choices:
            match = choices[int(rng.integers(len(choices)))]
            yield {
                "id": f"{name}-{place}",
                "question": f"{sentence[: match.start()]}{MASK}{sentence[match.end() :]}",
                "answers": [{"text": match.group(), "answer_start": begin + match.start()}],
            }
        begin += len(sentence) + 1


def run(arguments: list[str]) -> int:
    """Write the questions; the exit code."""
    print(json.dumps(make_cloze(tyro.cli(Options, prog="python -m models.bert.cloze", args=arguments)), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(run))
