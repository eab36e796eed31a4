"""``python -m models.resnet.convert``: makes records from ImageNet's tar files without unpacking them."""

from __future__ import annotations

import sys
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import tyro

from models.common.command import run_command
from models.common.errors import DataError, require
from models.common.manifest import write_manifest
from models.common.records import ARRAY_RECORD_SUFFIX, new_folder, write_records
from models.common.tf_example import encode_example
from models.resnet.photos import ENCODED, LABEL, TRAIN, VALIDATION

# The first class in the usual ImageNet TFRecords, where 0 is "background".
FIRST_LABEL = 1
_JPEG = b"\xff\xd8"


@dataclass(frozen=True)
class Options:
    """Make ArrayRecord files from the tar files of ILSVRC 2012."""

    train: Path
    """ILSVRC2012_img_train.tar: one tar file per class."""
    validation: Path
    """ILSVRC2012_img_val.tar: all photographs, named by number."""
    validation_labels: Path
    """A text file with one line per validation photograph, in their order: its class, for example n01751748."""
    output: Path
    """A new folder."""
    train_shard_count: int = 1024
    """Files for the training records."""
    validation_shard_count: int = 128
    """Files for the validation records."""

    def __post_init__(self) -> None:
        for name in ("train_shard_count", "validation_shard_count"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be at least 1")


def convert(options: Options) -> dict[str, int]:
    """Write everything or nothing. Returns the number of records of each part.

    Photographs go to the files in turn, so every file has all classes.
    """
    with _open_tar(options.train) as archive:
        classes = sorted(Path(member.name).stem for member in archive if member.name.endswith(".tar"))
    if not classes:
        raise DataError(f"{options.train} has no tar file per class in it")
    numbers = {name: number for number, name in enumerate(classes, start=FIRST_LABEL)}
    with new_folder(options.output) as folder:
        counts = {
            TRAIN: _write(folder, TRAIN, options.train_shard_count, _train_photos(options.train, numbers)),
            VALIDATION: _write(
                folder, VALIDATION, options.validation_shard_count, _validation_photos(options, numbers)
            ),
        }
        (folder / "classes.txt").write_text("".join(f"{name}\n" for name in classes), encoding="utf-8")
        write_manifest(folder)
    return counts


def _write(folder: Path, part: str, shard_count: int, photos: Iterable[bytes]) -> int:
    paths = [folder / f"{part}-{shard:05d}-of-{shard_count:05d}{ARRAY_RECORD_SUFFIX}" for shard in range(shard_count)]
    count = write_records(paths, photos)
    if count < shard_count:
        raise DataError(f"there are {count} photographs for {part}, too few for {shard_count} files")
    return count


def _train_photos(path: Path, numbers: dict[str, int]) -> Iterator[bytes]:
    with _open_tar(path) as archive:
        for member in archive:
            if not member.name.endswith(".tar"):
                continue
            with _open_tar(Path(f"{path}/{member.name}"), archive.extractfile(member)) as of_class:
                for photo in of_class:
                    yield _record(of_class, photo, numbers[Path(member.name).stem], path)


def _validation_photos(options: Options, numbers: dict[str, int]) -> Iterator[bytes]:
    try:
        labels = options.validation_labels.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {options.validation_labels}: {error}") from None
    unknown = sorted(set(labels) - numbers.keys())
    if unknown:
        raise DataError(f"{options.validation_labels}: {unknown[0]} is no class of {options.train}")
    with _open_tar(options.validation) as archive:
        members = sorted((member for member in archive if member.isfile()), key=lambda member: member.name)
        if len(members) != len(labels):
            raise DataError(
                f"{options.validation} has {len(members)} photographs, but "
                f"{options.validation_labels} has {len(labels)} classes"
            )
        for member, label in zip(members, labels, strict=True):
            yield _record(archive, member, numbers[label], options.validation)


def _record(archive: tarfile.TarFile, member: tarfile.TarInfo, label: int, path: Path) -> bytes:
    file = archive.extractfile(member)
    photo = file.read() if file else b""
    if len(photo) < member.size or not photo.startswith((_JPEG, b"\x89PNG")):
        raise DataError(f"{path}: {member.name} is truncated, or no JPEG or PNG")
    return encode_example({ENCODED: [photo], LABEL: np.array([label])})


def _open_tar(path: Path, file: IO[bytes] | None = None) -> tarfile.TarFile:
    try:
        return tarfile.open(path, fileobj=file)
    except FileNotFoundError:
        raise DataError(f"there is no file {path}") from None
    except tarfile.TarError as error:
        raise DataError(f"{path} is truncated, or no tar file: {error}") from None


def run(arguments: list[str]) -> int:
    """Convert. Returns the exit code."""
    counts = convert(tyro.cli(Options, prog="python -m models.resnet.convert", args=arguments))
    print(", ".join(f"{count:,} photographs for {part}" for part, count in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(run))
