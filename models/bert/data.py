"""Pre-training records, as ``models.bert.prepare`` and the tools of the original BERT write them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from models.bert.loss import Targets
from models.bert.model import Batch
from models.bert.prepare import FACTS_FILE, HELD_OUT, TRAIN
from models.bert.presets import Preset
from models.common.batches import BatchSplit, Example, ExampleStream, evaluation_batches, read_pieces
from models.common.errors import DataError
from models.common.records import Records, find_records
from models.common.tf_example import decode_example

_SEQUENCE = ("input_ids", "input_mask", "segment_ids")
_PREDICTIONS = ("masked_lm_positions", "masked_lm_ids", "masked_lm_weights")
_NEXT = "next_sentence_labels"
_NAMES = (*_SEQUENCE, *_PREDICTIONS, _NEXT)


class PreTrainingData:
    """The records in a folder's ``train*`` files, and those in its ``held-out*`` files if there are any."""

    def __init__(self, folder: Path, preset: Preset) -> None:
        self._preset = preset
        self._check_facts(folder)
        self.train = find_records(folder, TRAIN)
        has_held_out = any(path.name.startswith(HELD_OUT) for path in folder.iterdir())
        self.held_out = find_records(folder, HELD_OUT) if has_held_out else None
        self.load(self.train, 0)

    def load(self, records: Records, index: int) -> Example:
        """One example: float32 for the weights, int32 arrays for the other features.

        Raises:
          DataError: the record does not fit the preset.
        """
        where = records.where(index)
        found = decode_example(records[index], _NAMES, where=where)
        lengths = dict.fromkeys(_SEQUENCE, self._preset.sequence_length) | dict.fromkeys(
            _PREDICTIONS, self._preset.prediction_count
        )
        for name, length in lengths.items():
            if len(found[name]) != length:
                setting = "sequence_length" if name in _SEQUENCE else "prediction_count"
                raise DataError(f"{where}: {name} has {len(found[name])} values; {setting} is {length}")
        vocabulary_size = self._preset.model.vocabulary_size
        for name in ("input_ids", "masked_lm_ids"):
            if not 0 <= found[name].min() <= found[name].max() < vocabulary_size:
                raise DataError(
                    f"{where}: {name} has the token {found[name].max()}; vocabulary_size is {vocabulary_size}, "
                    "so it was made with another vocabulary"
                )
        if found[_NEXT][0] not in (0, 1):
            raise DataError(f"{where}: {_NEXT} is {found[_NEXT][0]}; it must be 0 or 1")
        return {
            name: value.astype(np.float32 if name == "masked_lm_weights" else np.int32) for name, value in found.items()
        }

    def train_batches(self, split: BatchSplit, first_step: int) -> Iterator[tuple[Any, ...]]:
        """This worker's pieces from a step on: the batch, its targets, and the number of the piece."""
        preset = self._preset
        stream = ExampleStream(len(self.train), len(self.train), preset.step_count * preset.global_batch, preset.seed)
        pieces = read_pieces(stream, lambda place: self.load(self.train, place[0]), split, first_step=first_step)
        for count, piece in enumerate(pieces):
            step, index = divmod(count, split.accumulate_every)
            yield *to_model(piece), np.uint32(split.piece(first_step + step, index))

    def held_out_batches(self, split: BatchSplit) -> Iterator[tuple[Any, ...]]:
        """This worker's share of the held-out records: batch, targets, and a bool mask of the real examples."""
        records = self.held_out
        if records is None:
            return
        for example, is_real in evaluation_batches(
            len(records),
            lambda index: self.load(records, index),
            batch=split.micro_batch,
            rank=split.rank,
            worker_count=split.worker_count,
        ):
            yield *to_model(example), is_real

    def _check_facts(self, folder: Path) -> None:
        path = folder / FACTS_FILE
        if not path.is_file():
            return
        facts, preset = json.loads(path.read_text(encoding="utf-8")), self._preset
        wanted = {
            "vocabulary_size": preset.model.vocabulary_size,
            "sequence_length": preset.sequence_length,
            "prediction_count": preset.prediction_count,
        }
        differing = {name: value for name, value in wanted.items() if facts[name] != value}
        if differing:
            texts = (
                f"{name} is {facts[name]} in {path} and {value} in the settings" for name, value in differing.items()
            )
            options = " ".join(f"--{name.replace('_', '-')} {facts[name]}" for name in differing)
            raise DataError(f"{'; '.join(texts)}; prepare the text again with --preset, or give {options}")


def to_model(example: Example) -> tuple[Batch, Targets]:
    """A batch of records as the arguments of the model and of the loss."""
    return (
        Batch(example["input_ids"], example["segment_ids"], example["input_mask"]),
        Targets(
            example["masked_lm_positions"],
            example["masked_lm_ids"],
            example["masked_lm_weights"],
            example[_NEXT][:, 0],
        ),
    )
