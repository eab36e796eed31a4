"""Rounds as a trace for Perfetto: complete, well-formed whatever happens, and in step with JAX's own profile."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import jaxhetero
from jaxhetero.errors import ConfigError
from jaxhetero.watching.rounds_file import join_files
from tests.support.cluster import ROOT, program_path
from tests.support.launcher import Run

Event = dict[str, Any]
JOB = ("--workers", "2", "--reducers", "2")


@pytest.fixture
def run(launch: Run) -> Run:
    """A launcher of the program of this file."""

    def start(*arguments: str) -> Any:
        *options, mode, argument = arguments
        program = (sys.executable, str(program_path("timeline.py")), mode, argument)
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        return launch(*JOB, *options, "--", *program, env=environment)

    return start


def read(path: Path) -> tuple[dict[str, list[Event]], dict[str, Any]]:
    """The slices of each process by its name, and what the trace says about itself; checks that slices nest."""
    trace = json.loads(path.read_text())
    names = {
        event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event.get("name") == "process_name"
    }
    slices: dict[str, list[Event]] = {names[pid]: [] for pid in names}
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            slices[names[event["pid"]]].append(event)
            tracks[event["pid"], event["tid"]].append(event)
    for track in tracks.values():
        if "cat" in track[0]:
            check_nesting(track)
    return slices, trace["otherData"]


def check_nesting(track: list[Event]) -> None:
    """Each slice lies within the one that it begins in."""
    ends: list[int] = []
    for event in sorted(track, key=lambda event: (event["ts"], -event["dur"])):
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        end = event["ts"] + event["dur"]
        assert event["dur"] >= 0, event
        assert not ends or end <= ends[-1], event
        ends.append(end)


def of_kind(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event.get("cat") == kind]


def total_bytes(events: list[Event]) -> int:
    return sum(event["args"]["bytes"] for event in events)


def test_a_trace_has_all_rounds_of_all_workers(run: Run, tmp_path: Path) -> None:
    """More than a worker keeps; as many rounds and bytes as the workers count themselves."""
    start_us = time.time() * 1e6
    done = run("--timeline", "trace.json", "rounds", "2500")
    assert done.returncode == 0, done.stderr
    assert "timeline in trace.json" in done.stderr
    slices, about = read(tmp_path / "trace.json")
    counted = {line[1:9]: json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines()}
    assert len(slices) == len(counted) == 2
    for process, events in slices.items():
        worker = process.removeprefix("jaxhetero ").partition(" (")[0]
        metrics, rounds = counted[worker], of_kind(events, "round")
        assert (
            metrics["round_count"]
            == 2 * 2500 + 1
            == len(rounds)
            == len({(e["name"], e["args"]["round"]) for e in rounds})
        )
        assert metrics["bucket_bytes"] == total_bytes(rounds) == total_bytes(of_kind(events, "part"))
        assert metrics["bucket_bytes"] == 2 * 2500 * 400 + 4_000_000 < metrics["sent_bytes"]
        assert {event["args"]["reducer"] for event in of_kind(events, "part")} == {0, 1}
        assert len(of_kind(events, "stage")) == 3 * len(rounds)
        assert start_us < min(event["ts"] for event in events), "wall-clock time"
        assert max(event["ts"] + event["dur"] for event in events) < time.time() * 1e6
        assert about[worker]["lost_count"] == 0
        assert about[worker]["metrics"]["round_count"] == metrics["round_count"]
    assert list((tmp_path / "logs").glob("*.rounds")) == []


def test_a_trace_after_a_failure_and_a_restart(run: Run, tmp_path: Path) -> None:
    done = run("--timeline", "trace.json", "--max-restarts", "1", "die", "300")
    assert done.returncode == 0, done.stderr
    assert "worker 1 (pid" in done.stderr
    slices, about = read(tmp_path / "trace.json")
    assert set(about) == {"worker 0", "worker 1", "worker 0, restart 1", "worker 1, restart 1"}
    assert len(slices) == 4
    for worker in about:
        (events,) = [events for process, events in slices.items() if process.startswith(f"jaxhetero {worker} (")]
        assert about[worker]["round_count"] == len(of_kind(events, "round"))
    assert 598 <= about["worker 0"]["round_count"] <= 600, "all, but maybe the last step"
    assert "metrics" not in about["worker 1"], "it was killed"
    assert about["worker 1, restart 1"]["round_count"] == about["worker 1, restart 1"]["metrics"]["round_count"] == 601


@pytest.mark.parametrize("target", ["no/such/folder.json", "."])
def test_a_trace_that_cannot_be_written(run: Run, tmp_path: Path, target: str) -> None:
    done = run("--timeline", target, "rounds", "1")
    assert done.returncode == 2
    assert re.search("cannot write the timeline|is a directory", done.stderr)
    assert not (tmp_path / "logs").exists(), "no process was started"


def test_a_torn_file_gives_what_it_has(tmp_path: Path) -> None:
    """That of a worker that was killed, one that is empty, and one that was never made."""
    whole = [json.dumps(["op", n, 4, 1.0 + n, 1.1 + n, 1.2 + n, 1.3 + n, [[0, 4, 1.3 + n]]]) for n in range(3)]
    lines = ['{"rank": 0, "host": "a", "offset_us": 0}', *whole]
    (tmp_path / "torn").write_text("\n".join(lines)[:-10])
    (tmp_path / "empty").touch()
    join_files(
        tmp_path / "trace.json", {f"worker {n}": tmp_path / name for n, name in enumerate(("torn", "empty", "none"))}
    )
    slices, about = read(tmp_path / "trace.json")
    assert about == {"worker 0": {"round_count": 2, "bucket_bytes": 8}}
    assert [event["ts"] for event in of_kind(slices["jaxhetero worker 0 (host a)"], "round")] == [1_000_000, 2_000_000]


def test_rounds_lie_in_the_steps_of_a_profile(run: Run, tmp_path: Path) -> None:
    done = run("profile", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        merged = json.loads((tmp_path / str(rank) / "merged.json").read_text())["traceEvents"]
        assert all(merged), "Perfetto calls an empty event an import error"
        steps = {event["name"]: event for event in merged if str(event.get("name")).startswith("step ")}
        rounds = [event for event in of_kind(merged, "round") if event["name"].startswith("sum")]
        assert [event["args"]["round"] for event in rounds] == [1, 2, 3, 4, 5], "those since the profile began"
        for number, event in enumerate(rounds):
            step, middle = steps[f"step {number}"], event["ts"] + event["dur"] / 2
            assert step["ts"] < middle < step["ts"] + step["dur"]
        slices, _ = read(tmp_path / str(rank) / "own.json")
        (events,) = slices.values()
        assert len(of_kind(events, "round")) == 12


def test_what_overlaps_gets_tracks_of_its_own(tmp_path: Path) -> None:
    times = [(0.0, 0.1, 0.2, 0.5), (0.3, 0.5, 0.6, 0.7), (0.4, 0.7, 0.8, 0.9), (1.0, 1.1, 1.2, 1.3)]
    lines = [json.dumps({"rank": 0, "host": "a", "offset_us": 0})]
    lines += [json.dumps(["op", n, 4, *each, [[0, 4, each[-1]]]]) for n, each in enumerate(times)]
    (tmp_path / "rounds").write_text("\n".join(lines))
    join_files(tmp_path / "trace.json", {"worker 0": tmp_path / "rounds"})
    (events,) = read(tmp_path / "trace.json")[0].values()
    tracks = [event["tid"] for event in of_kind(events, "round")]
    assert tracks == [tracks[0], tracks[1], tracks[2], tracks[0]]
    assert len(set(tracks)) == 3
    assert len({event["tid"] for event in of_kind(events, "part")}) == 1


@pytest.mark.usefixtures("alone")
def test_wrong_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write the timeline .*trace\.json: No such file or directory"):
        jaxhetero.write_timeline(tmp_path / "none" / "trace.json")
    with pytest.raises(ConfigError, match=r"no profile in .*give the folder that jax\.profiler\.trace\(\) wrote"):
        jaxhetero.write_timeline(tmp_path / "trace.json", profile=tmp_path)
    assert list(tmp_path.iterdir()) == []
