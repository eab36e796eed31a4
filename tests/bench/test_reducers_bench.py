"""The benchmark of optimizers on reducers: the limits that it compares with, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from bench import optimizer_steps
from bench.accelerator.schedule import Bucket
from bench.engines import build_native as native
from bench.optimizer_steps import Case
from tests.support.cluster import run

BYTES_PER_S = 4.0
# An element a second: the first bucket is in after 3 s, the second after 5, the third, which comes late, after 9.
FLOAT32 = [Bucket(1, 2.0), Bucket(2, 2.0), Bucket(3, 6.0)]


@pytest.mark.parametrize(
    ("optimizer", "backups", "limit_s"),
    [
        (None, None, 9.0),
        ("lamb", None, 9.0),  # sums alone, whatever the workers do with them
        ("adamw", 1, 9.0),
        ("lamb", 1, 12.0),  # the last bucket goes out when it is in
        ("lamb-clipped", 1, 15.0),  # all of them do
    ],
)
def test_limits(optimizer: str | None, backups: int | None, limit_s: float) -> None:
    assert Case(optimizer, backups, "float32").limit_s(FLOAT32, BYTES_PER_S) == limit_s


def test_half_the_bytes_take_half_the_time() -> None:
    halved = [Bucket(bucket.count, bucket.ready_s / 2) for bucket in FLOAT32]
    assert Case("lamb", 0, "bfloat16").limit_s(halved, BYTES_PER_S) == 6.0


def test_workers_and_reducers_compute_the_same_update(tmp_path: Path) -> None:
    library = native.build(optimizer_steps.WAIT_SOURCE, tmp_path, include=jax.ffi.include_dir())
    for differences in run("optimizer_steps.py", str(library), workers=2, reducers=2):
        assert set(differences) == {f"{name}, {backups}" for name in optimizer_steps.OPTIMIZERS for backups in (0, 1)}
        assert max(differences.values()) <= 1e-6  # XLA adds norms up in another order


def test_a_bad_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert optimizer_steps.main(["--optimizers", "adamw,muon"]) == 2
    assert "there is no muon, only adamw, lamb, lamb-clipped" in capsys.readouterr().err
