"""Record files with random access: ArrayRecord, and TFRecord with an index that is made when the file is opened."""

from __future__ import annotations

import mmap
import shutil
import struct
import uuid
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Protocol

from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from models.common.errors import DataError

ARRAY_RECORD_SUFFIX = ".arrayrecord"
# A TFRecord frame: length, its checksum, the record, its checksum.
_LENGTH = struct.Struct("<QI")
_CHECKSUM_BYTES = 4


class _File(Protocol):
    def __len__(self) -> int: ...

    def read(self, index: int) -> bytes: ...


class _ArrayRecordFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._reader = ArrayRecordReader(str(path))
            self._count = int(self._reader.num_records())
        except (RuntimeError, ValueError) as error:
            raise DataError(f"{path} is truncated, or is no ArrayRecord file: {error}") from None

    def __len__(self) -> int:
        return self._count

    def read(self, index: int) -> bytes:
        try:
            record: bytes = self._reader.read([index])[0]
        except (RuntimeError, ValueError) as error:
            raise DataError(f"record {index} of {self._path} cannot be read: {error}") from None
        return record


class _TfRecordFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
        self._places = list(self._scan())

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int) -> bytes:
        start, end = self._places[index]
        return self._data[start:end]

    def _scan(self) -> Iterator[tuple[int, int]]:
        """Where each record begins and ends."""
        start, file_bytes = 0, len(self._data)
        while start < file_bytes:
            header = self._data[start : start + _LENGTH.size]
            length = _LENGTH.unpack(header)[0] if len(header) == _LENGTH.size else file_bytes
            end = start + _LENGTH.size + length
            if end + _CHECKSUM_BYTES > file_bytes:
                raise DataError(
                    f"{self._path} is truncated after {file_bytes} bytes, in the record that begins at {start}, "
                    "or is no TFRecord file"
                )
            yield start + _LENGTH.size, end
            start = end + _CHECKSUM_BYTES


class Records(Sequence[bytes]):
    """All records of some files, in the order of ``paths``."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._files: list[_File] = [
            _ArrayRecordFile(path) if path.suffix == ARRAY_RECORD_SUFFIX else _TfRecordFile(path) for path in paths
        ]
        for path, file in zip(paths, self._files, strict=True):
            # An ArrayRecord file has its index at its end, so a truncated file has no records.
            if len(file) == 0:
                raise DataError(f"{path} has no records: it is empty, truncated, or of another format")
        self._ends = list(accumulate(len(file) for file in self._files))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> bytes:  # type: ignore[override]
        file, place = self._locate(index)
        return self._files[file].read(place)

    def where(self, index: int) -> str:
        """A record's name in an error message."""
        file, place = self._locate(index)
        return f"record {place} of {self._paths[file]}"

    def _locate(self, index: int) -> tuple[int, int]:
        file = bisect_right(self._ends, index)
        return file, index - (self._ends[file - 1] if file else 0)


def find_records(folder: Path, prefix: str) -> Records:
    """The records of the files in ``folder`` whose names begin with ``prefix``.

    If some of them are ArrayRecord files, only those count. Otherwise all are TFRecord files.
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    files = sorted(path for path in folder.iterdir() if path.name.startswith(prefix) and path.is_file())
    array_records = [path for path in files if path.suffix == ARRAY_RECORD_SUFFIX]
    tf_records = [path for path in files if path not in array_records and path.suffix != ".json"]
    if not files:
        raise DataError(f"no file in {folder} has a name that begins with {prefix!r}")
    return Records(array_records or tf_records)


def write_records(paths: Sequence[Path], records: Iterable[bytes]) -> int:
    """Write the records to ArrayRecord files, one record to each file in turn. Returns the number of records."""
    count = 0
    with ExitStack() as stack:
        writers = []
        for path in paths:
            # One record per group: readers want single records, in any order.
            writers.append(ArrayRecordWriter(str(path), "group_size:1"))
            stack.callback(writers[-1].close)
        for record in records:
            writers[count % len(paths)].write(record)
            count += 1
    return count


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to ``path`` if the block succeeds, and is removed if it raises."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise DataError(f"{path} already exists; choose a new folder, or remove it first")
    if not path.parent.is_dir():
        raise DataError(f"cannot write {path}: there is no folder {path.parent}")
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    unfinished.mkdir()
    try:
        yield unfinished
        if path.exists():
            path.rmdir()
        unfinished.rename(path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
