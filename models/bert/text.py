"""From text to WordPieces: the documents in a folder, their sentences, and the vocabulary."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from tokenizers import BertWordPieceTokenizer

from models.common.errors import DataError

PAD, UNKNOWN, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUATION = "##"

# A sentence ends with a full stop, an exclamation or a question mark, perhaps quoted, before a capital or a digit.
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]*[A-Z0-9])")


def find_documents(folder: Path) -> list[Path]:
    """The ``.txt`` files below a folder that are not empty, in the order of their paths."""
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    paths = sorted(folder.rglob("*.txt"))
    if not paths:
        raise DataError(f"there is no .txt file in {folder} or below it")
    documents = [path for path in paths if read_text(path).strip()]
    if not documents:
        raise DataError(f"the {len(paths)} .txt files in {folder} are empty")
    return documents


def read_text(path: Path) -> str:
    """The text of a file, which is one document."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def split_sentences(document: str) -> list[str]:
    """The sentences of a document, none of them empty. They end at punctuation and at the end of a line."""
    sentences = (part.strip() for line in document.splitlines() for part in _SENTENCE_END.split(line))
    return [sentence for sentence in sentences if sentence]


_ALPHABET_SIZE = 1000


def train_vocabulary(texts: Callable[[], Iterable[str]], size: int, path: Path) -> None:
    """Write the ``size`` most useful WordPieces, lower case, one per line. ``texts()`` is called for each pass."""
    tokenizer = BertWordPieceTokenizer()
    # The tokenizer numbers the pieces in an order that changes from run to run, and the numbers decide between equally
    # useful pieces. The one-character pieces, from which the others are made, are given here, so their order is fixed.
    counts = Counter(character for text in texts() for character in tokenizer.normalizer.normalize_str(text))
    common = sorted(counts, key=lambda character: (-counts[character], character))[:_ALPHABET_SIZE]
    inner = [f"##{character}" for character in common if not character.isspace()]
    tokenizer.train_from_iterator(
        texts(),
        vocab_size=size,
        min_frequency=2,
        limit_alphabet=_ALPHABET_SIZE,
        special_tokens=[*SPECIAL_TOKENS, *inner],
        show_progress=False,
    )
    pieces = [*SPECIAL_TOKENS, *sorted(tokenizer.get_vocab().keys() - set(SPECIAL_TOKENS))]
    path.write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")


class Vocabulary:
    """WordPieces and their ids. A file has one piece per line; the first line has the id 0."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise DataError(f"there is no vocabulary file {path}")
        content = path.read_bytes()
        self.tokens = content.decode("utf-8").splitlines()
        missing = [token for token in SPECIAL_TOKENS if token not in self.tokens]
        if missing:
            raise DataError(f"{path} is no BERT vocabulary: it has no {', '.join(missing)}")
        self.digest = hashlib.sha256(content).hexdigest()[:16]
        self.tokenizer = BertWordPieceTokenizer(str(path), lowercase=True)
        self.pad, self.unknown, self.cls, self.sep, self.mask = (self.tokens.index(token) for token in SPECIAL_TOKENS)
        self.is_continuation = [token.startswith(CONTINUATION) for token in self.tokens]

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, without special tokens."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=False)]
