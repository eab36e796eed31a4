"""``python -m models.bert.baselines --data FOLDER``: the accuracy of counting tokens on the masked tokens.

A trained model must beat two baselines on the held-out records. The *unigram* baseline always names the most frequent
token. The *bigram* baseline names the token that most often follows the true token on the left. It knows more than the
model, for which the token on the left is masked as often as any other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.bert.prepare import HELD_OUT, TRAIN
from models.common.command import run_command
from models.common.records import Records, find_records
from models.common.tf_example import decode_example

Tokens = NDArray[np.int64]


def baselines(train: Records, held_out: Records) -> dict[str, float]:
    """The accuracy of both baselines on the masked tokens of ``held_out``, with counts from ``train``."""
    left, right = _count_pairs(train)
    counts = np.bincount(right)
    most_frequent = int(counts.argmax())
    follower = _most_frequent_follower(left, right)
    tokens = [(tokens[positions - 1], tokens[positions]) for tokens, positions in _originals(held_out)]
    before, answers = (np.concatenate(arrays) for arrays in zip(*tokens, strict=True))
    guesses = np.array([follower.get(int(token), most_frequent) for token in before])
    return {
        "unigram_accuracy": float(np.mean(answers == most_frequent)),
        "bigram_accuracy": float(np.mean(answers == guesses)),
        "masked_token_count": float(len(answers)),
    }


def _originals(records: Records) -> Iterator[tuple[Tokens, Tokens]]:
    """Each sequence before masking, and its masked positions."""
    names = ("input_ids", "masked_lm_positions", "masked_lm_ids", "masked_lm_weights", "input_mask")
    for index in range(len(records)):
        found: dict[str, Any] = decode_example(records[index], names, where=records.where(index))
        is_used = found["masked_lm_weights"] > 0
        positions = found["masked_lm_positions"][is_used]
        tokens = found["input_ids"][: found["input_mask"].sum()]
        tokens[positions] = found["masked_lm_ids"][is_used]
        yield tokens, positions


def _count_pairs(records: Records) -> tuple[Tokens, Tokens]:
    """All pairs of neighbouring tokens: the left tokens, and the right tokens."""
    sequences = [tokens for tokens, _ in _originals(records)]
    left = np.concatenate([tokens[:-1] for tokens in sequences])
    right = np.concatenate([tokens[1:] for tokens in sequences])
    return left, right


def _most_frequent_follower(left: Tokens, right: Tokens) -> dict[int, int]:
    # Each pair becomes one number, because single numbers sort much faster than pairs.
    base = int(right.max()) + 1
    pairs, counts = np.unique(left * base + right, return_counts=True)
    order = np.argsort(counts, kind="stable")
    # Later entries of the dict replace earlier ones, so the most frequent follower stays.
    return {int(pair // base): int(pair % base) for pair in pairs[order]}


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m models.bert.baselines", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the output of python -m models.bert.prepare")
    folder = parser.parse_args(arguments).data
    for name, value in baselines(find_records(folder, TRAIN), find_records(folder, HELD_OUT)).items():
        print(f"{name} {value:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(run))
