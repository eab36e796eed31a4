"""``python -m models.bert.cloze``: makes questions in SQuAD's format from plain text.

A context is a sequence of words of the text. A question is a part of its context in which ``[MASK]`` stands for one or
two words; these words are the answer. Only long words that occur once in the context are masked. Comparing the question
with the context, word by word, answers every question. A good score therefore shows that the model has learnt to
compare; it shows no knowledge of the world.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from models.bert.prepare import choose_held_out
from models.bert.squad import Question, exact_match, f1_score, read_squad
from models.bert.text import MASK, find_documents, read_text
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
    """The value given to `models.bert.prepare`."""
    seed: int = 0
    """The value given to `models.bert.prepare`."""
    dev_share: float = 0.2
    """The share of the held-out documents whose questions go to dev.json. The questions of the others go to
    train.json."""
    context_words: int = 20
    """Words in a context. A context and its question should fit into one window of `models.bert.finetune`. Otherwise
    most windows hold no answer, and a short training learns only to answer that there is none."""
    question_words: int = 4
    """Words that a question shows on each side of the mask."""
    question_count: int = 4
    """The most questions about one context."""

    def __post_init__(self) -> None:
        require(0 < self.held_out_share < 1, f"held_out_share is {self.held_out_share}; it must be between 0 and 1")
        require(0 < self.dev_share < 1, f"dev_share is {self.dev_share}; it must be between 0 and 1")
        for name in ("context_words", "question_words", "question_count"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be at least 1")


def make_cloze(options: Options) -> dict[str, int]:
    """Write both files, or nothing. Returns the number of questions of each file."""
    documents = find_documents(options.text)
    is_held_out = choose_held_out(len(documents), options.held_out_share, options.seed)
    held_out = [read_text(path) for path, chosen in zip(documents, is_held_out, strict=True) if chosen]
    dev_count = max(1, round(len(held_out) * options.dev_share))
    parts = {TRAIN_FILE: held_out[dev_count:], DEV_FILE: held_out[:dev_count]}
    counts = {}
    with new_folder(options.output) as folder:
        for name, texts in parts.items():
            rng = np.random.default_rng((options.seed, len(name)))
            articles = [_article(number, text, options, rng) for number, text in enumerate(texts)]
            counts[name] = sum(len(paragraph["qas"]) for article in articles for paragraph in article["paragraphs"])
            if counts[name] == 0:
                raise DataError(f"the {len(texts)} held-out documents for {name} make no question; hold out more")
            (folder / name).write_text(json.dumps({"version": "1.1", "data": articles}), encoding="utf-8")
    return counts


def _article(number: int, text: str, options: Options, rng: np.random.Generator) -> dict[str, Any]:
    words = text.split()
    starts = range(0, len(words), options.context_words)
    contexts = (" ".join(words[start : start + options.context_words]) for start in starts)
    paragraphs = [
        {"context": context, "qas": list(_questions(f"{number}-{place}", context, options, rng))}
        for place, context in enumerate(contexts)
    ]
    return {"title": str(number), "paragraphs": [paragraph for paragraph in paragraphs if paragraph["qas"]]}


def _questions(name: str, context: str, options: Options, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    choices = find_choices(context)
    for place in sorted(rng.permutation(len(choices))[: options.question_count].tolist()):
        start, end = choices[place].span()
        # The part directly beside the mask is not a word of its own, and may be empty: hence one more.
        before = context[:start].split(" ")[-options.question_words - 1 :]
        after = context[end:].split(" ")[: options.question_words + 1]
        yield {
            "id": f"{name}-{place}",
            "question": f"{' '.join(before)}{MASK}{' '.join(after)}",
            "answers": [{"text": context[start:end], "answer_start": start}],
        }


def find_choices(context: str) -> list[re.Match[str]]:
    """The words of a context that a question may mask."""
    return [match for match in _LONG_WORDS.finditer(context) if context.count(match.group()) == 1]


def guess_scores(questions: Sequence[Question]) -> dict[str, float]:
    """The baseline, in per cent: the expected scores of a random answer.

    It is drawn from the words of the context that a question may mask and that this question does not show.
    """
    exact, f1 = [], []
    for question in questions:
        truth = question.answers[0][0]
        choices = [match.group() for match in find_choices(question.context) if match.group() not in question.text]
        exact.append(np.mean([exact_match(choice, truth) for choice in choices]))
        f1.append(np.mean([f1_score(choice, truth) for choice in choices]))
    return {"guess_exact_match": 100 * float(np.mean(exact)), "guess_f1": 100 * float(np.mean(f1))}


def run(arguments: list[str]) -> int:
    """Write the questions; print their number and the baseline for dev.json. Returns the exit code."""
    options = tyro.cli(Options, prog="python -m models.bert.cloze", args=arguments)
    counts = make_cloze(options)
    print(json.dumps({**counts, **guess_scores(read_squad(options.output / DEV_FILE))}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(run))
