"""Staged input: one copy a host that its workers share, errors before the training, and nothing left behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem
from rich.console import Console

import jaxhetero
from models.bert import __main__ as pre_training
from models.common import staging
from models.common.errors import DataError, SettingsError, TrainerError
from models.common.host_folder import HostFolder
from models.common.manifest import MANIFEST_FILE, write_manifest
from models.common.room import cgroup_rooms
from models.common.staging import staged
from models.resnet.__main__ import run as run_resnet
from tests.support import trainers
from tests.support.cluster import ROOT, program_path
from tests.support.launcher import TIMEOUT_S, Run, Start, wait_for

ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}

# --- the folder of a host, in real processes -------------------------------------------------------------------------

Enter = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def enter(tmp_path: Path) -> Iterator[Enter]:
    """Start a process that enters the folder `stage`; it ends with the test."""
    with contextlib.ExitStack() as stack:

        def start(job: str = "job", content: str = "records") -> subprocess.Popen[str]:
            command = [sys.executable, str(program_path("share_folder.py")), str(tmp_path / "stage"), job, content]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            process = stack.enter_context(subprocess.Popen(command, text=True, env=ENVIRONMENT, **pipes))
            stack.callback(process.kill)
            return process

        yield start


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def lines_to_the_end(process: subprocess.Popen[str]) -> list[str]:
    """What the process still printed, once it has been told to leave."""
    return process.communicate(timeout=TIMEOUT_S)[0].splitlines()


def test_one_process_fills_and_the_last_one_removes(enter: Enter, tmp_path: Path) -> None:
    processes = [enter() for _ in range(4)]
    said: list[str] = []
    for process in processes:
        said.append(line(process))
        if said[-1] == "filling":
            said.append(line(process))
    assert sorted(said) == ["filling", *["records"] * 4]
    for process in processes[:3]:
        assert lines_to_the_end(process) == []
        assert (tmp_path / "stage" / "records" / "whole").read_text() == "records"
    assert lines_to_the_end(processes[3]) == []
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_dies_while_it_fills_is_replaced(enter: Enter, tmp_path: Path) -> None:
    """None of those that wait hangs, and none sees what the dead one left."""
    first = enter(content="wait")
    assert line(first) == "filling"
    others = [enter() for _ in range(3)]
    first.kill()
    said = [text for process in others for text in lines_to_the_end(process)]
    # A process may come after all others have left: then it fills again.
    assert said.count("records") == 3
    assert said.count("filling") == len(said) - 3 >= 1
    assert list(tmp_path.iterdir()) == []


def test_what_a_dead_job_left_is_removed_by_the_next(enter: Enter, tmp_path: Path) -> None:
    half, whole = enter(content="wait"), None
    assert line(half) == "filling"
    half.kill()
    half.wait()
    assert (tmp_path / "stage" / "records.part" / "half").is_file()
    whole = enter("first", "old")
    assert (line(whole), line(whole)) == ("filling", "old")
    whole.kill()
    whole.wait()
    assert (tmp_path / "stage" / "records" / "whole").read_text() == "old"
    again = enter("second", "new")
    assert lines_to_the_end(again) == ["filling", "new"]
    assert list(tmp_path.iterdir()) == []


def test_another_job_is_refused_while_the_first_runs(enter: Enter, tmp_path: Path) -> None:
    first = enter("first")
    assert (line(first), line(first)) == ("filling", "records")
    other = enter("other")
    assert lines_to_the_end(other) == [
        f"--stage {tmp_path}/stage: another job that is running has it; give another folder"
    ]
    assert (tmp_path / "stage" / "records" / "whole").is_file()
    assert lines_to_the_end(first) == []
    assert list(tmp_path.iterdir()) == []


def test_coming_and_going_at_once(tmp_path: Path) -> None:
    """Six processes enter and leave again and again: whoever is in has the whole, and the last leaves nothing."""
    program = (
        "import sys; from pathlib import Path; from models.common.host_folder import HostFolder\n"
        "for turn in range(40):\n"
        "    shared = HostFolder(Path(sys.argv[1]), 'job')\n"
        "    found = shared.enter(lambda part: (part / 'whole').write_text('records'), lambda: False)\n"
        "    assert (found / 'whole').read_text() == 'records'\n"
        "    shared.leave()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "stage")]
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(subprocess.Popen(command, env=ENVIRONMENT)) for _ in range(6)]
        for process in processes:
            stack.callback(process.kill)
        assert [process.wait(TIMEOUT_S) for process in processes] == [0] * 6
    assert list(tmp_path.iterdir()) == []


def test_nobody_waits_after_being_told_to_stop(enter: Enter, tmp_path: Path) -> None:
    first = enter(content="wait")
    assert line(first) == "filling"
    assert HostFolder(tmp_path / "stage", "job").enter(lambda part: None, lambda: True) is None


# --- the source, in a world of one worker ----------------------------------------------------------------------------


def write_source(folder: Path, *, manifest: bool = True) -> Path:
    folder.mkdir()
    for number in range(3):
        (folder / f"train-{number}").write_bytes(np.random.default_rng(number).bytes(10_000 * (number + 1)))
    (folder / "notes.txt").write_text("not for training")
    if manifest:
        write_manifest(folder)
    return folder


def stage(source: Path | str, folder: Path, prefixes: tuple[str, ...] = ("train",)) -> dict[str, bytes]:
    """The files that staging brings to ``folder``."""
    with staged(str(source), folder, prefixes, Console(file=io.StringIO())) as found:
        assert found is not None
        return {str(path.relative_to(found)): path.read_bytes() for path in found.rglob("*") if path.is_file()}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("train*")}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("manifest", [True, False])
def test_the_files_that_are_needed_are_there_in_the_block(tmp_path: Path, manifest: bool) -> None:
    source = write_source(tmp_path / "source", manifest=manifest)
    assert stage(source, tmp_path / "stage") == contents(source)
    assert not (tmp_path / "stage").exists()


@pytest.mark.usefixtures("alone")
def test_folders_of_photographs_and_links_keep_their_names(tmp_path: Path) -> None:
    for name in ("train/n1/1.jpg", "train/n2/2.jpg", "other/3.jpg"):
        (tmp_path / "source" / name).parent.mkdir(parents=True)
        (tmp_path / "source" / name).write_text(name)
    (tmp_path / "source" / "train" / "n3").symlink_to(tmp_path / "source" / "other")
    (tmp_path / "source" / "train" / "n1" / "4.jpg").symlink_to("1.jpg")
    staged_files = stage(tmp_path / "source", tmp_path / "stage")
    assert {name: content.decode() for name, content in staged_files.items()} == {
        "train/n1/1.jpg": "train/n1/1.jpg",
        "train/n1/4.jpg": "train/n1/1.jpg",
        "train/n2/2.jpg": "train/n2/2.jpg",
        "train/n3/3.jpg": "other/3.jpg",
    }


@pytest.mark.usefixtures("alone")
def test_a_manifest_may_name_files_in_folders(tmp_path: Path) -> None:
    for name in ("train/n1/1.jpg", "train/n2/2.jpg"):
        (tmp_path / "source" / name).parent.mkdir(parents=True)
        (tmp_path / "source" / name).write_text(name)
    subprocess.run(
        "find train -type f -exec sha256sum {} + > SHA256SUMS", shell=True, cwd=tmp_path / "source", check=True
    )
    assert set(stage(tmp_path / "source", tmp_path / "stage")) == {"train/n1/1.jpg", "train/n2/2.jpg"}
    (tmp_path / "source" / "train" / "n2" / "2.jpg").write_text("train/n2/3.jpg")
    with pytest.raises(DataError, match=r"train/n2/2.jpg .* has another checksum"):
        stage(tmp_path / "source", tmp_path / "stage")


def write_zip(path: Path, files: dict[str, bytes]) -> str:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return f"zip://::{path}"


@pytest.mark.usefixtures("alone")
def test_any_file_system_of_fsspec_is_a_source(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    assert stage(write_zip(tmp_path / "data.zip", files), tmp_path / "stage") == contents(source)


@pytest.mark.usefixtures("alone")
def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    url = write_zip(tmp_path / "data.zip", {"train/../../outside": b"x"})
    with pytest.raises(DataError, match="cannot be the name of a file here"):
        stage(url, tmp_path / "stage")
    assert not (tmp_path / "outside").exists()
    assert not (tmp_path / "stage").exists()


def remove_folder(source: Path) -> None:
    source.rename(source.with_name("elsewhere"))


def remove_files(source: Path) -> None:
    for path in source.glob("train*"):
        path.unlink()
    (source / MANIFEST_FILE).unlink()


def remove_one(source: Path) -> None:
    (source / "train-1").unlink()


def add_one(source: Path) -> None:
    (source / "train-9").write_text("new")


def cut(source: Path) -> None:
    os.truncate(source / "train-1", 15_000)


def damage(source: Path) -> None:
    path = source / "train-2"
    path.write_bytes(b"?" + path.read_bytes()[1:])


def spoil_manifest(source: Path) -> None:
    (source / MANIFEST_FILE).write_text("train-0 is fine\n")


def grow_beyond_any_room(source: Path) -> None:
    """A sparse file."""
    os.truncate(source / "train-0", 8 << 40)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove_folder, "there is no folder SOURCE"),
        (remove_files, "no file in SOURCE has a name that begins with train"),
        (remove_one, "SOURCE has no train-1, which its SHA256SUMS names"),
        (add_one, "SOURCE has train-9, which its SHA256SUMS does not name"),
        (cut, r"SOURCE/train-1 \(15,000 bytes\) has another checksum than SHA256SUMS says"),
        (damage, r"SOURCE/train-2 \(30,000 bytes\) has another checksum than SHA256SUMS says"),
        (spoil_manifest, "SOURCE/SHA256SUMS has the line 'train-0 is fine'"),
        (grow_beyond_any_room, r"SOURCE has 8.8 TB to stage, and only .* are free in the file system of"),
    ],
)
def test_a_bad_source_is_named_and_nothing_is_left(spoil: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    spoil(source)
    with pytest.raises(DataError, match=message.replace("SOURCE", str(source))):
        stage(source, tmp_path / "stage")
    assert not (tmp_path / "stage").exists()


class Changing(LocalFileSystem):
    """Local files that somebody changes between their listing and their end: `cut` or `grow` in the storage options."""

    protocol = "changing"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("changing://"))

    def _open(self, path: str, *arguments: Any, **options: Any) -> Any:
        file = super()._open(path, *arguments, **options)
        change = Path(path).with_name("change").read_text()
        if path.endswith("train-1"):
            if change == "cut":
                os.truncate(path, 123)
            elif change == "grow":
                os.truncate(path, 1 << 20)
            else:
                os.utime(path, (0, 0))
        return file


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("cut", "train-1 ended after 123 of 20,000 bytes: it was cut or replaced"),
        ("grow", "train-1 changed while it was copied"),
        ("touch", "train-1 changed while it was copied"),
    ],
)
def test_a_source_that_changes_is_named_and_nothing_is_left(change: str, message: str, tmp_path: Path) -> None:
    fsspec.register_implementation("changing", Changing, clobber=True)
    source = write_source(tmp_path / "source", manifest=False)
    (source / "change").write_text(change)
    with pytest.raises(DataError, match=message):
        stage(f"changing://{source}", tmp_path / "stage")
    assert not (tmp_path / "stage").exists()


class Silent(LocalFileSystem):
    """Local files that do not answer before `answers` is set."""

    protocol = "silent"
    answers = threading.Event()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("silent://"))

    def _open(self, path: str, *arguments: Any, **options: Any) -> Any:
        self.answers.wait()
        return super()._open(path, *arguments, **options)


@pytest.mark.usefixtures("alone")
def test_a_source_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And when it answers after that, nothing is made in the folder that has been removed."""
    fsspec.register_implementation("silent", Silent, clobber=True)
    monkeypatch.setattr(staging, "STALL_TIMEOUT_S", 0.1)
    monkeypatch.setattr(staging, "STOP_TIMEOUT_S", 0.1)
    source = write_source(tmp_path / "source")
    before = set(threading.enumerate())
    try:
        with pytest.raises(DataError, match=f"no byte came from silent://{source} for 0 s"):
            stage(f"silent://{source}", tmp_path / "stage")
    finally:
        Silent.answers.set()
        for thread in set(threading.enumerate()) - before:
            thread.join()
    assert not (tmp_path / "stage").exists()


@pytest.mark.usefixtures("alone")
def test_a_write_that_fails_is_told_from_a_read(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (25_000, before[1]))
    try:
        with pytest.raises(DataError, match=f"cannot write {tmp_path}/stage/records.part/train-2: File too large"):
            stage(source, tmp_path / "stage")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "stage").exists()


@pytest.mark.usefixtures("alone")
def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    with pytest.raises(SettingsError, match=f"there is no folder {tmp_path}/nowhere"):
        stage(source, tmp_path / "nowhere" / "stage")
    with pytest.raises(SettingsError, match="has other files in it, as SHA256SUMS: give a new folder"):
        stage(source, source)
    with pytest.raises(SettingsError, match="cannot be written: Not a directory"):
        stage(source, source / "notes.txt")
    assert (source / "notes.txt").read_text() == "not for training"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("data", "folder", "message"),
    [
        ("s3://bucket/records", None, "--data s3://bucket/records is no folder of this host: give --stage FOLDER"),
        (None, "stage", "--stage needs --data"),
        ("nosuch://bucket/records", "stage", "--data nosuch://bucket/records: Protocol not known: nosuch"),
    ],
)
def test_settings_that_do_not_fit(data: str | None, folder: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / folder if folder else None
    with pytest.raises(TrainerError, match=re.escape(message)), staged(data, path, ("train",), Console()):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_dataset_of_a_package_has_nothing_to_stage(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--stage has nothing to copy: mnist-5k comes with a package"):
        run_resnet(["--preset", "mnist-smoke", "--stage", str(tmp_path / "stage")])
    jaxhetero.shutdown()


def test_memory_limits_of_all_cgroups_around_count(tmp_path: Path) -> None:
    """The files are as the kernel writes them, of a pod with a limit whose container has one as well."""
    own = tmp_path / "cgroup"
    own.write_text("5:devices:/\n0::/pod/container\n")
    limits = {"pod": ("3000", "2500", 1000), "pod/container": ("1000", "400", 100), "": ("max", "9000", 0)}
    for name, (limit, used, inactive) in limits.items():
        folder = tmp_path / "groups" / name
        folder.mkdir(exist_ok=True, parents=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 7\ninactive_file {inactive}\nactive_file 3\n")
    assert list(cgroup_rooms(tmp_path / "groups", own)) == [700, 1500]


# --- jobs ------------------------------------------------------------------------------------------------------------


def job_arguments(source: Path | str, folder: Path, *more: str, workers: int) -> tuple[str, ...]:
    counts = ("--workers", str(workers), "--reducers", "1")
    return (*counts, "--", sys.executable, str(program_path("stage.py")), str(source), str(folder), *more)


def test_the_workers_of_a_host_share_one_copy(launch: Run, tmp_path: Path) -> None:
    """Four workers on two hosts, which are folders here: each file is there twice."""
    source = write_source(tmp_path / "source")
    job = launch(*job_arguments(source, tmp_path / "stage", "2", workers=4), env=ENVIRONMENT)
    assert job.returncode == 0, job.stdout + job.stderr
    found = re.findall(r"\[worker \d\] +(\S+/stage-\d/records/train-\d) (\d+) (\d+)", job.stdout)
    assert len(found) == 4 * 3
    assert len({inode for _, inode, _ in found}) == 2 * 3
    assert re.search(r"\[worker 0\] +staged 120.0 kB on 2 hosts at", job.stdout)
    assert not list(tmp_path.glob("stage*"))


def test_all_workers_end_when_one_cannot_stage(launch: Run, tmp_path: Path) -> None:
    """One tells the reason, and the launcher names it. The others may be stopped before they say anything."""
    source = write_source(tmp_path / "source")
    damage(source)
    job = launch(*job_arguments(source, tmp_path / "stage", workers=3), env=ENVIRONMENT)
    assert job.returncode == 1
    logs = [(tmp_path / "logs" / f"worker-{rank}.log").read_text() for rank in range(3)]
    (guilty,) = (rank for rank, log in enumerate(logs) if "train-2 (30,000 bytes) has another checksum" in log)
    for log in logs[:guilty] + logs[guilty + 1 :]:
        assert set(re.findall("^error: (.*) data", log, re.MULTILINE)) <= {"another worker could not stage its"}
    assert f"worker {guilty} (pid" in job.stderr.partition("; last lines of its log")[0].splitlines()[-1]
    assert not list(tmp_path.glob("stage*"))


@pytest.fixture
def gated(start_launch: Start, tmp_path: Path) -> tuple[subprocess.Popen[str], int]:
    """A job of three workers that is in the middle of staging, and the process that copies."""
    source = write_source(tmp_path / "source")
    job = start_launch(*job_arguments(f"gated://{source}", tmp_path / "stage", workers=3), env=ENVIRONMENT)
    wait_for((tmp_path / "reader.pid").exists, TIMEOUT_S)
    assert (tmp_path / "stage-0" / "records.part").is_dir()
    return job, int((tmp_path / "reader.pid").read_text())


def test_the_copying_worker_is_killed(gated: tuple[subprocess.Popen[str], int], tmp_path: Path) -> None:
    """The others do not wait for it, and remove what it left."""
    job, reader = gated
    os.kill(reader, signal.SIGKILL)
    _, errors = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode != 0
    assert f"(pid {reader}) was killed by SIGKILL" in errors
    assert not list(tmp_path.glob("stage*"))


def test_ctrl_c_while_staging(gated: tuple[subprocess.Popen[str], int], tmp_path: Path) -> None:
    job, _ = gated
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 130
    assert not list(tmp_path.glob("stage*"))


def test_a_slow_copy_keeps_no_round_waiting(gated: tuple[subprocess.Popen[str], int], tmp_path: Path) -> None:
    """The copy goes on once the source answers, and all workers get it."""
    job, _ = gated
    (tmp_path / "go").touch()
    output, errors = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 0, output + errors
    assert len(re.findall(r"/records/train-\d \d+ \d+", output)) == 3 * 3
    assert not list(tmp_path.glob("stage*"))


# --- the trainers ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text").mkdir()
    return trainers.prepare_records(trainers.write_text(folder / "text"), folder / "records")


@pytest.mark.timeout(2 * trainers.RUN_TIMEOUT_S)
def test_training_on_staged_records_and_ctrl_c(records: Path, tmp_path: Path) -> None:
    """The losses are those of a training without staging, and the copy is removed however the training ends."""
    assert pre_training.run(["--preset", "bert-smoke", "--data", str(records), "--json", str(tmp_path / "plain")]) == 0
    url = write_zip(tmp_path / "records.zip", {path.name: path.read_bytes() for path in records.iterdir()})
    arguments = ("--preset", "bert-smoke", "--step-count", "100000", "--data", url, "--stage", str(tmp_path / "stage"))
    output, log = tmp_path / "run", tmp_path / "output.txt"
    with log.open("w") as file:
        job = trainers.start(output, "models.bert", *arguments, workers=2, stdout=file)
    try:
        while not (output / "checkpoints" / "6").is_dir():
            assert job.poll() is None, log.read_text()
            time.sleep(0.05)
        assert (tmp_path / "stage" / "records" / "facts.json").is_file()
        job.send_signal(signal.SIGINT)
        assert job.wait(trainers.RUN_TIMEOUT_S) == 130, log.read_text()
    finally:
        job.kill()
        job.wait()
    assert not (tmp_path / "stage").exists()
    assert re.search(r"\[worker 0\] +staged \S+ kB at", log.read_text())
    plain = json.loads((tmp_path / "plain").read_text())["losses"]
    losses = trainers.result_of(output)["losses"][: len(plain)]
    np.testing.assert_allclose(losses, plain[: len(losses)], rtol=trainers.LOSS_CURVE_TOLERANCE)
