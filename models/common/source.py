"""The place that training data is copied from: a folder, or an object store that fsspec reaches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from models.common.errors import DataError, SettingsError, TrainerError
from models.common.manifest import MANIFEST_FILE, parse_manifest

BLOCK_BYTES = 8 * 2**20


@dataclass(frozen=True)
class SourceFile:
    """A file as it was when the source was listed."""

    name: str
    """Its path below the source, with slashes."""
    size_bytes: int
    sha256: str | None
    """The checksum in hexadecimal digits; None if the source has no manifest."""


class Source:
    """The files of a folder, or of a URL, whose names begin with one of ``prefixes``; of folders, all that is in them.

    Raises:
      SettingsError: nothing that is installed can read such a URL.
    """

    def __init__(self, url: str, prefixes: tuple[str, ...]) -> None:
        self.url = url
        self._prefixes = prefixes
        try:
            with _reading(url):
                self._files, root = fsspec.core.url_to_fs(url)
        except DataError as error:
            if isinstance(error.__cause__, (ValueError, ImportError)):
                raise SettingsError(f"--data {url}: {error.__cause__}") from None
            raise
        self._root = str(root).rstrip("/")

    def list(self) -> list[SourceFile]:
        """All files, in the order of their names.

        Raises:
          DataError: the source is missing, empty, or has other files than its manifest says.
        """
        with _reading(self.url):
            if not self._files.isdir(self._root):
                raise DataError(f"there is no folder {self.url}")
            top = {self._name(info): info for info in self._files.ls(self._root, detail=True)}
            chosen = {name: info for name, info in top.items() if name.startswith(self._prefixes)}
            sizes = dict(pair for info in chosen.values() for pair in self._sizes(info))
            checksums = self._checksums() if MANIFEST_FILE in top else None
            # What was listed is not what will be there when a file is copied.
            self._files.invalidate_cache()
        if not sizes:
            raise DataError(f"no file in {self.url} has a name that begins with {' or '.join(self._prefixes)}")
        if checksums is not None:
            self._compare(set(sizes), {name for name in checksums if name.startswith(self._prefixes)})
        return [SourceFile(name, size, checksums[name] if checksums else None) for name, size in sorted(sizes.items())]

    def copy(self, file: SourceFile, target: Path, on_bytes: Callable[[int], None]) -> None:
        """Copy a file to the new file ``target``. ``on_bytes`` gets the size of each block; what it raises, ends this.

        Raises:
          DataError: what was read is not what was listed, or it cannot be written.
        """
        path, where = self._path(file.name), f"{self.url.rstrip('/')}/{file.name}"
        digest, copied = hashlib.sha256(), 0
        # The target first: if the source hangs, nothing is made in a folder that is removed meanwhile.
        with _new_file(target) as write, _reading(where):
            before = self._files.ukey(path)
            with self._files.open(path, "rb", block_size=BLOCK_BYTES) as source:
                while block := source.read(BLOCK_BYTES):
                    write(block)
                    if file.sha256:
                        digest.update(block)
                    copied += len(block)
                    on_bytes(len(block))
            after = self._files.ukey(path)
        if copied < file.size_bytes:
            raise DataError(f"{where} ended after {copied:,} of {file.size_bytes:,} bytes: it was cut or replaced")
        if copied > file.size_bytes or before != after:
            raise DataError(f"{where} changed while it was copied; start again when nobody writes to it")
        if file.sha256 and digest.hexdigest() != file.sha256:
            raise DataError(
                f"{where} ({copied:,} bytes) has another checksum than {MANIFEST_FILE} says: it is cut or damaged, or "
                f"was written anew without {MANIFEST_FILE}"
            )

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if self._root else name

    def _name(self, info: dict[str, Any]) -> str:
        name = str(info["name"]).rstrip("/").removeprefix(self._root).lstrip("/")
        # The name becomes a path on this host: an object store may have any string in its place.
        if ".." in name.split("/") or str(PurePosixPath(name)) != (name or "."):
            raise DataError(f"{self.url} has a file named {name!r}, which cannot be the name of a file here")
        return name

    def _sizes(self, info: dict[str, Any]) -> Iterator[tuple[str, int]]:
        """The names and sizes of the files at and below an entry of a listing."""
        if info["type"] == "other":  # a link, in a listing of a local folder
            info = self._files.info(info["name"])
        if info["type"] == "directory":
            path = info["name"].rstrip("/")
            for entry in self._files.ls(path, detail=True):
                if entry["name"].rstrip("/") != path:  # some object stores list a folder in itself
                    yield from self._sizes(entry)
        elif info["type"] == "file":
            if info["size"] is None:
                raise DataError(f"{self.url} does not tell the size of {self._name(info)}")
            yield self._name(info), int(info["size"])

    def _checksums(self) -> dict[str, str]:
        return parse_manifest(self._files.cat_file(self._path(MANIFEST_FILE)), f"{self.url}/{MANIFEST_FILE}")

    def _compare(self, found: set[str], wanted: set[str]) -> None:
        if missing := sorted(wanted - found):
            raise DataError(f"{self.url} has no {missing[0]}, which its {MANIFEST_FILE} names")
        if unknown := sorted(found - wanted):
            raise DataError(
                f"{self.url} has {unknown[0]}, which its {MANIFEST_FILE} does not name: remove one of them, or make "
                f"{MANIFEST_FILE} again with sha256sum"
            )


@contextmanager
def _reading(where: str) -> Iterator[None]:
    """Make a ``DataError`` of whatever a file system raises: those of object stores have errors of their own."""
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:
        raise DataError(f"cannot read {where}: {str(error) or type(error).__name__}") from error


@contextmanager
def _new_file(path: Path) -> Iterator[Callable[[bytes], None]]:
    """A function that writes to the new file, and tells errors of writing from those of reading."""

    def write(block: bytes) -> None:
        try:
            file.write(block)
            file.flush()
        except OSError as error:
            raise DataError(f"cannot write {path}: {error.strerror}") from error

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("xb")
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error
    with file:
        yield write
