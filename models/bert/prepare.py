"""``python -m models.bert.prepare --text FOLDER --output FOLDER``: text to records for pre-training."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro

from models.bert.masking import ExampleConfig, Sentences, make_examples
from models.bert.presets import DEFAULT_PRESET, PRESETS, Preset
from models.bert.text import Vocabulary, find_documents, read_text, split_sentences, train_vocabulary
from models.common.command import parse_options, run_command
from models.common.errors import DataError, require
from models.common.manifest import write_manifest
from models.common.records import ARRAY_RECORD_SUFFIX, new_folder, write_records
from models.common.tf_example import encode_example

TRAIN, HELD_OUT = "train", "held-out"
VOCABULARY_FILE, FACTS_FILE = "vocab.txt", "facts.json"


@dataclass(frozen=True)
class Options:
    """Make pre-training records from a folder of UTF-8 .txt files, each one document."""

    text: Path
    """The folder with the texts. The folders below it are searched as well."""
    output: Path
    """A new folder for records, vocabulary, facts and checksums."""
    examples: Annotated[ExampleConfig, tyro.conf.arg(name="")] = field(default_factory=ExampleConfig)
    vocabulary: Path | None = None
    """A WordPiece vocabulary, one piece per line. By default one is trained on the text."""
    vocabulary_size: int = 8192
    """The size of the vocabulary that is trained."""
    held_out_share: float = 0.05
    """The share of the documents that are for evaluation only. The seed chooses them."""
    shard_count: int = 1
    """Files for the training records."""
    preset: Literal[tuple(PRESETS)] = DEFAULT_PRESET  # type: ignore[valid-type]
    """The preset of `python -m models.bert` that the records are for: it sets the defaults of the vocabulary's size, of
    the sequence length and of the prediction count."""

    def __post_init__(self) -> None:
        require(0 <= self.held_out_share < 1, f"held_out_share is {self.held_out_share}; it must be 0 to below 1")
        require(self.shard_count >= 1, f"shard_count is {self.shard_count}; it must be at least 1")
        require(self.vocabulary_size >= 100, f"vocabulary_size is {self.vocabulary_size}; it must be at least 100")


def prepare(options: Options) -> dict[str, object]:
    """Write everything into the output folder, or nothing. Returns the facts."""
    documents = find_documents(options.text)
    is_held_out = choose_held_out(len(documents), options.held_out_share, options.examples.seed)
    with new_folder(options.output) as folder:
        vocabulary_path = folder / VOCABULARY_FILE
        if options.vocabulary:
            Vocabulary(options.vocabulary)  # raises if the file is no vocabulary
            shutil.copyfile(options.vocabulary, vocabulary_path)
        else:
            train = [path for path, held_out in zip(documents, is_held_out, strict=True) if not held_out]
            train_vocabulary(lambda: map(read_text, train), options.vocabulary_size, vocabulary_path)
        vocabulary = Vocabulary(vocabulary_path)
        encoded = [encode_document(read_text(path), vocabulary) for path in documents]
        counts = {}
        for name, wanted in ((TRAIN, False), (HELD_OUT, True)):
            chosen = [text for text, held_out in zip(encoded, is_held_out, strict=True) if held_out == wanted and text]
            counts[name] = _write(folder, name, chosen, vocabulary, options)
        facts: dict[str, object] = {
            "vocabulary_size": len(vocabulary),
            "vocabulary_digest": vocabulary.digest,
            "document_count": len(documents),
            "token_count": sum(len(sentence) for document in encoded for sentence in document),
            "example_counts": counts,
            **dataclasses.asdict(options.examples),
        }
        (folder / FACTS_FILE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        write_manifest(folder)
    return facts


def choose_held_out(document_count: int, share: float, seed: int) -> list[bool]:
    """Which documents are for evaluation."""
    chosen = np.random.default_rng(seed).permutation(document_count)[: round(document_count * share)]
    return [bool(value) for value in np.isin(np.arange(document_count), chosen)]


def encode_document(document: str, vocabulary: Vocabulary) -> Sentences:
    """The tokens of each sentence, without empty sentences."""
    return [tokens for tokens in vocabulary.encode(split_sentences(document)) if tokens]


def _write(folder: Path, name: str, documents: list[Sentences], vocabulary: Vocabulary, options: Options) -> int:
    if not documents:
        return 0
    shard_count = options.shard_count if name == TRAIN else 1
    records = (
        encode_example(example.features(options.examples))
        for example in make_examples(documents, vocabulary, options.examples)
    )
    paths = [folder / f"{name}-{shard:05d}-of-{shard_count:05d}{ARRAY_RECORD_SUFFIX}" for shard in range(shard_count)]
    count = write_records(paths, records)
    if count < shard_count:
        raise DataError(f"the text makes {count} examples for {name}, too few for {shard_count} files")
    return count


def make_options(settings: Preset, preset: str) -> Options:
    """What a preset chooses, before the command line is read."""
    examples = ExampleConfig(settings.sequence_length, settings.prediction_count)
    return Options(tyro.MISSING, tyro.MISSING, examples, None, settings.model.vocabulary_size, preset=preset)


def run(arguments: list[str]) -> int:
    options = parse_options(make_options, PRESETS, DEFAULT_PRESET, arguments, "python -m models.bert.prepare")
    print(json.dumps(prepare(options), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(run))
