"""What holds for all tests."""

import contextlib
import os
import signal
import subprocess
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxhetero
from tests.support.launcher import LAUNCH, TIMEOUT_S, Run, Start
from tests.support.programs_on_disk import compile_fast, share_programs

# Files that take minutes, or long and would come late. Of several processes, one that begins such a file last ends long
# after the others.
LONG_FILES = (
    *("mask_rcnn_runs", "meshes", "slurm", "ray", "pipeline", "offload", "bench", "bert_runs", "resnet_runs"),
    *("reducers_optimizers", "reducers_trainers", "table"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{name}": place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """All tests of a file run in one process, which makes the fixtures of the file once; files stay in their order."""
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Where time is short, as CI's is on a slow machine, the long files give way to all others."""
    until = os.environ.get("TESTS_LONG_UNTIL")
    if until and item.path.stem.removeprefix("test_") in LONG_FILES and time.time() > float(until):
        pytest.skip("takes long, and it is later than TESTS_LONG_UNTIL")


def pytest_configure(config: pytest.Config) -> None:
    """Whatever started pytest may ignore signals (nohup, a job in the background); what the tests start must not."""
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    compile_fast()
    share_programs(config)


@pytest.fixture(autouse=True)
def _strands(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the tests run with two strands in every process: nothing that a test promises may depend on it."""
    if "JAXHETERO_STRANDS" not in os.environ and zlib.crc32(request.node.nodeid.encode()) % 2:
        monkeypatch.setenv("JAXHETERO_STRANDS", "2")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A world of one worker and no reducer, in the test's own process."""
    for name in ("RANK", "WORKER_COUNT", "REDUCER_COUNT"):
        monkeypatch.delenv(f"JAXHETERO_{name}", raising=False)
    jaxhetero.initialize(alone=True)
    yield
    jaxhetero.shutdown()


@pytest.fixture
def start_launch(tmp_path: Path) -> Iterator[Start]:
    """Start a launcher in a folder of its own; it ends with the test."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: str, **options: Any) -> subprocess.Popen[Any]:
            defaults: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            command = [*LAUNCH, *arguments]
            process = stack.enter_context(subprocess.Popen(command, cwd=tmp_path, **defaults | options))
            stack.callback(process.kill)
            return process

        yield start


@pytest.fixture
def launch(start_launch: Start) -> Run:
    """Run a launcher to its end."""

    def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[Any]:
        process = start_launch(*arguments, **options)
        out, err = process.communicate(timeout=TIMEOUT_S)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    return run
