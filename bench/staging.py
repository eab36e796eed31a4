"""Epochs of a trainer that reads from a slow folder, with and without --stage.

    python -m bench.staging --rate-mb 20 --photos 500

The folder is a file system of its own on a loop device whose reads the kernel limits, so the trainer and the kernel's
cache of pages behave as with any other folder. It holds records of large files with small photographs. models.resnet
trains a small network on them, with real workers on one host. Batches are small, so that little of an epoch is read
ahead while the trainer compiles. This needs root and the blkio controller of cgroups version 1.

The rows:

    direct          the trainer reads the folder; what was read once, stays in the page cache
    direct, cold    the same, but the folder's pages are dropped twice a second, as where the memory is too small for
                    them, or the file system does not keep them
    staged          with --stage in /dev/shm

The columns:

    staging_s       from the start of the copy to its end
    epoch_N_s       an epoch with its evaluation on 100 photographs
    all_s           from the start of the job to the end of its last epoch. The job reads ahead while it compiles, so
                    a part of the first epoch's reading is here alone
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import tyro
from PIL import Image

from bench.errors import BenchError
from bench.harness.command import run_command
from models.common.records import write_records
from models.common.tf_example import encode_example
from models.resnet.photos import ENCODED, LABEL

_BLKIO = Path("/sys/fs/cgroup/blkio")
_STAGE = Path("/dev/shm/jaxhetero-bench-staging")
_HELD_OUT_PHOTOS = 100
_CLASSES = 10
_PHOTO_BYTES = 500_000


@dataclass(frozen=True)
class Options:
    """Epochs of a trainer that reads from a slow folder, with and without --stage."""

    rate_mb: float = 20.0
    """What the folder yields at most, in MB/s."""
    photos: int = 500
    """Photographs in an epoch, of half a megabyte each; a multiple of 100."""
    files: int = 8
    """Record files."""
    epochs: int = 2
    workers: int = 2

    def __post_init__(self) -> None:
        counts = (self.photos, self.files, self.epochs, self.workers)
        if min(counts) < 1 or self.rate_mb <= 0 or self.photos % 100:
            raise BenchError("--photos must be a multiple of 100, and the other options more than 0")
        if os.geteuid() != 0 or not (_BLKIO / "blkio.throttle.read_bps_device").exists():
            raise BenchError(f"this needs root and {_BLKIO}/blkio.throttle.read_bps_device, of cgroups version 1")


@dataclass(frozen=True)
class Row:
    name: str
    staging_s: float
    epoch_s: list[float]
    all_s: float


class SlowFolder:
    """An ext4 file system in a file of ``folder``, whose reads are limited for the processes of one cgroup."""

    def __init__(self, folder: Path, size_bytes: int, rate_mb: float) -> None:
        self.path = folder / "slow"
        self._image = folder / "image"
        self._rate = round(rate_mb * 1e6)
        self._group = _BLKIO / f"jaxhetero-bench-{os.getpid()}"
        with self._image.open("wb") as image:
            image.truncate(size_bytes)
        _call("mkfs.ext4", "-q", str(self._image))
        self.path.mkdir()

    def __enter__(self) -> Self:
        self._group.mkdir()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._group.rmdir()

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """Mount it. No page of it is in the cache then."""
        _call("mount", "-o", "loop", str(self._image), str(self.path))
        try:
            device = self.path.stat().st_dev
            limit = f"{os.major(device)}:{os.minor(device)} {self._rate}"
            (self._group / "blkio.throttle.read_bps_device").write_text(limit)
            yield
        finally:
            _call("umount", str(self.path))

    def limited(self, *command: str) -> list[str]:
        """The command, limited."""
        return ["sh", "-c", f'echo $$ > {self._group}/cgroup.procs && exec "$@"', "sh", *command]

    @contextmanager
    def without_cache(self) -> Iterator[None]:
        """Drop the folder's pages twice a second."""
        ended = threading.Event()

        def drop() -> None:
            while not ended.wait(0.5):
                for path in self.path.glob("*arrayrecord"):
                    file = os.open(path, os.O_RDONLY)
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(file)

        thread = threading.Thread(target=drop)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _call(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise BenchError(f"{' '.join(command)}: {done.stdout.strip()}")


def _write_photos(folder: Path, name: str, count: int, file_count: int) -> None:
    def records() -> Iterator[bytes]:
        rng = np.random.default_rng(count)
        for number in range(count):
            photo = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(photo, "JPEG")
            # A decoder does not look at what follows a JPEG: so reading costs much, and decoding little.
            photo.write(rng.bytes(_PHOTO_BYTES - photo.tell()))
            yield encode_example({ENCODED: [photo.getvalue()], LABEL: np.array([1 + number % _CLASSES])})

    paths = [folder / f"{name}-{number:05d}-of-{file_count:05d}.arrayrecord" for number in range(file_count)]
    write_records(paths, records())


def _train(options: Options, slow: SlowFolder, name: str, *more: str) -> Row:
    trainer = (
        *("-m", "models.resnet", "--preset", "cifar10", "--dataset", "photos", "--data", str(slow.path)),
        *("--image-size", "32", "--resize", "32", "--stem-kernel", "5", "--stem-stride", "4"),
        *("--color-jitter", "0", "--lighting-noise", "0"),
        *("--global-batch", str(2 * options.workers), "--train-image-count", str(options.photos)),
        *("--epochs", str(options.epochs)),
    )
    with tempfile.TemporaryDirectory(prefix="bench-") as logs:
        launch = ("-m", "jaxhetero", "launch", "--log-dir", logs, "--workers", str(options.workers), "--reducers", "1")
        command = slow.limited(sys.executable, *launch, "--", sys.executable, *trainer, *more)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
            assert job.stdout is not None
            start_s, staging_s, ends_s, lines = time.monotonic(), 0.0, [], []
            try:
                for line in job.stdout:
                    lines.append(line)
                    if found := re.search(r"staged .* in (\S+) s$", line.rstrip()):
                        staging_s = float(found[1])
                    if "compiled in" in line or re.search(r"epoch \d+/\d+ mean loss", line):
                        ends_s.append(time.monotonic())
            except BaseException:
                job.terminate()
                raise
    if job.returncode:
        raise BenchError(f"{name}: the trainer ended with {job.returncode}:\n{''.join(lines[-20:])}")
    return Row(name, staging_s, np.diff(ends_s).tolist(), ends_s[-1] - start_s)


def run(options: Options) -> list[Row]:
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        SlowFolder(Path(folder), options.photos * _PHOTO_BYTES * 5 // 4 + (64 << 20), options.rate_mb) as slow,
    ):
        with slow.mounted():
            _write_photos(slow.path, "train", options.photos, options.files)
            _write_photos(slow.path, "validation", _HELD_OUT_PHOTOS, 1)
            size_mb = sum(path.stat().st_size for path in slow.path.glob("*arrayrecord")) / 1e6
        print(
            f"# {size_mb:.1f} MB of records, {size_mb / options.rate_mb:.1f} s at {options.rate_mb:g} MB/s", flush=True
        )
        rows = []
        with slow.mounted():
            rows.append(_train(options, slow, "direct"))
        with slow.mounted(), slow.without_cache():
            rows.append(_train(options, slow, "direct, cold"))
        with slow.mounted():
            rows.append(_train(options, slow, "staged", "--stage", str(_STAGE)))
    print(format_table(rows), flush=True)
    return rows


def format_table(rows: Sequence[Row]) -> str:
    """The rows as a table in Markdown."""
    names = ["staging_s", *(f"epoch_{number + 1}_s" for number in range(len(rows[0].epoch_s))), "all_s"]
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for row in rows:
        figures = " | ".join(f"{seconds:.1f}" for seconds in (row.staging_s, *row.epoch_s, row.all_s))
        lines.append(f"| {row.name} | {figures} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(lambda: 0 if run(tyro.cli(Options, args=arguments, description=__doc__)) else 1)


if __name__ == "__main__":
    sys.exit(main())
