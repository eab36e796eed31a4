"""Measures GPU workers with CPU reducers. The workers share this machine's GPU; the reducers share its CPUs.

    python -m bench.gpu                                # all parts; writes bench/results/gpu-NAME.json
    python -m bench.gpu --parts sums,kernels           # the first thing to run on a machine; a minute
    python -m bench.gpu --stand-in                     # without a GPU: a stand-in for the driver; measures nothing

It needs an NVIDIA GPU and JAX with CUDA, and builds the native module if there is none. The parts:

    sums           whether sums of several dtypes and sizes, and all collectives of a tree, are right
    kernels        the kernels that the GPU runs for a sum of one array, which should be none, and for a tree's
    all-reduces    GB/s of plain copies between the GPU and pinned memory, by all workers at once. For each size, the
                   time of an all-reduce of arrays on the GPU, and its rate as a share of the smaller of two limits:
                   the rate of copies both ways, and that of the same all-reduce of arrays on the CPU. The bar for
                   256 MB is 0.85
    nccl           the time of jax.lax.psum between the workers, over NCCL and sockets, for the largest size
    beside         time of a chain of matrix products during an all-reduce / their time alone; the bar is 1.03
    resnet50, bert-base, mask-rcnn
                   a train step at real size, the first two in bf16: without all-reduce ("alone"), with the all-reduce
                   of each gradient once it is computed ("overlap"), and with the all-reduce after the backward pass
                   ("after"). "all-reduce" is the all-reduce without a step. `hidden` is the share of the all-reduce
                   that "overlap" does not add to the step; for BERT-base and two workers the bar is 0.9. Then the same
                   steps with AdamW in a row, also "across", under the next step's forward pass as well:
                   `hidden_across` is what these do not add to the steps "alone"; the bar is 0.85

The figures are written after each part, and join those of other parts that the file has of the same machine. A part
that fails is named with its error, and the next one begins.

Workers that share one GPU take turns on it and share its link, so copies and steps are slower than on a GPU each. All
comparisons are between figures of the same workers under the same conditions. Figures of a stand-in mean nothing, and
the result marks them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

import jaxhetero
from bench.engines.specs import parse_size
from bench.gpu import nccl
from bench.harness.command import check_folders, run_command
from bench.harness.errors import BenchError
from jaxhetero._job.ports import reserve_port
from lab.fake_cuda import build as build_stand_in

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("sums", "kernels", "all-reduces", "nccl", "beside", "resnet50", "bert-base", "mask-rcnn")
_PROBE = "import jax; print(jax.devices('cuda')[0].device_kind)"


@dataclass(frozen=True)
class Options:
    """Measures GPU workers with CPU reducers."""

    workers: int = 2
    """Worker processes that share the GPU."""
    reducers: int = 2
    """Reducer processes on the CPUs."""
    sizes: str = "1MB,16MB,64MB,256MB"
    """The sizes of the all-reduces."""
    parts: str = ",".join(PARTS)
    """What to measure, in this order."""
    part_seconds: float = 300
    """The time that a part may take before it is ended."""
    repeats: int = 20
    """Measurements of each time. The result is their median."""
    memory_fraction: float = 0.9
    """The share of the GPU's memory that the workers may take together."""
    pinned: str = "2GiB"
    """Pinned host memory of each worker."""
    traces: Path | None = None
    """A folder for profiles of three steps of each kind. XProf and Perfetto show them."""
    stand_in: bool = False
    """Without a GPU: a stand-in for the driver, and small sizes. It shows that the benchmark runs, no more."""
    json: Path | None = None
    """Write all figures to this file. Default: bench/results/gpu-NAME.json for the GPU; none with --stand-in."""

    def __post_init__(self) -> None:
        if self.workers < 1 or self.reducers < 1 or self.repeats < 1:
            raise BenchError("--workers, --reducers and --repeats must be at least 1")
        self.size_list()
        if unknown := set(self.part_list()) - set(PARTS):
            raise BenchError(f"--parts has {min(unknown)!r}; there are: {', '.join(PARTS)}")
        check_folders(self.json, self.traces)

    def part_list(self) -> list[str]:
        return [word for word in self.parts.split(",") if word]

    def size_list(self) -> list[int]:
        return [parse_size(word) for word in self.sizes.split(",")]


def run(options: Options) -> dict[str, Any]:
    """Each part is a job of its own, so that none takes others along."""
    device = "stand-in" if options.stand_in else find_gpu()
    print(f"# {device}, {options.workers} workers, {options.reducers} reducers", flush=True)
    if options.stand_in:
        print("# a stand-in for the driver: none of what follows is a measurement", flush=True)
    from bench.harness.report import write_result

    _build()
    path = _path(options, device)
    content = _begin(options, device, path)
    for part in options.part_list():
        found, error = _run_part(part, options)
        content["parts"].pop(part, None)
        content["errors"].pop(part, None)
        if found is not None:
            content["parts"][part] = found
            _print(part, found)
        if error is not None:
            content["errors"][part] = error
            print(f"{part}: {error}", flush=True)
        if path is not None:
            path.parent.mkdir(exist_ok=True)
            write_result(path, content)
    if path is not None:
        print(f"# written to {path}")
    return content


def _begin(options: Options, device: str, path: Path | None) -> dict[str, Any]:
    """What the file has of an earlier run on the same machine, if there is one."""
    from bench.harness.report import describe_machine

    content: dict[str, Any] = {"benchmark": "gpu", "device": device, "is_measurement": not options.stand_in}
    content |= {"machine": describe_machine(), "workers": options.workers, "reducers": options.reducers}
    kept = json.loads(path.read_text()) if path is not None and path.exists() else {}
    is_same = all(kept.get(key) == value for key, value in content.items())
    return content | {key: kept[key] if is_same else {} for key in ("parts", "errors")}


def _run_part(part: str, options: Options) -> tuple[Any, str | None]:
    """What was measured, if anything, and what went wrong."""
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as name, reserve_port(0) as holder:
        folder = Path(name)
        result = folder / "result.json"
        request = {"part": part, "sizes": options.size_list(), "repeats": options.repeats, "result": str(result)}
        request |= {"traces": str(options.traces.resolve()) if options.traces else ""}
        request |= {"stand_in": options.stand_in, "jax_coordinator": "{}:{}".format(*holder.getsockname())}
        command = [sys.executable, "-m", "jaxhetero", "launch", "--workers", str(options.workers)]
        command += ["--reducers", str(options.reducers), "--log-dir", str(folder / "logs"), "--"]
        command += [sys.executable, "-m", "bench.gpu.worker", json.dumps(request)]
        settings = _settings(options, folder) | (nccl.SETTINGS if part == "nccl" else {})
        error = None
        with subprocess.Popen(command, cwd=ROOT, env=settings) as launcher:
            try:
                if code := launcher.wait(options.part_seconds):
                    error = f"a process ended with code {code}; its output is above"
            except subprocess.TimeoutExpired:
                launcher.terminate()  # it ends the processes of the job
                error = f"not over after {options.part_seconds:g} s"
        return json.loads(result.read_text()) if result.exists() else None, error


def find_gpu() -> str:
    """The name of the GPU. Another process asks JAX for it, because a process that uses the GPU keeps its memory."""
    found = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True)
    if found.returncode:
        reason = (found.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise BenchError(
            f"no GPU that JAX can use on this machine ({reason}); nothing was measured. `--stand-in` runs the "
            "benchmark without one"
        )
    return found.stdout.strip().splitlines()[-1]


def _build() -> None:
    sys.path_importer_cache.clear()
    try:
        print(f"# jaxhetero {jaxhetero.__version__}", flush=True)  # which only the native module knows
    except ImportError:
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", str(ROOT)]
        if subprocess.run(command).returncode:
            raise BenchError("the native module cannot be built; pip's output is above") from None


def _settings(options: Options, folder: Path) -> dict[str, str]:
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "JAXHETERO_PINNED_BYTES": str(parse_size(options.pinned))}
    if options.stand_in:
        return {
            **settings,
            "JAX_PLATFORMS": "cpu",
            "JAXHETERO_CUDA_STAND_IN": str(build_stand_in(folder)),
            "JAXHETERO_PINNED_BYTES": str(1 << 26),
        }
    share = options.memory_fraction / options.workers
    return {**settings, "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share:.3f}"}


def _path(options: Options, device: str) -> Path | None:
    if options.json or options.stand_in:
        return options.json
    return ROOT / "bench" / "results" / f"gpu-{device.lower().replace(' ', '-')}.json"


def _print(part: str, found: Any) -> None:
    if part == "sums":
        print(f"sums: {found['wrong_count']} wrong elements")
    elif part == "kernels":
        for name, row in found.items():
            print(
                f"{name}: {row['kernel_count']} kernels, {row['kernel_s'] * 1e6:.1f} us; copies {row['copy_s']:.4f} s"
            )
    elif part == "all-reduces":
        print("copy GB/s: " + ", ".join(f"{name} {rate / 1e9:.2f}" for name, rate in found["copy_bytes_per_s"].items()))
        for row in found["rows"]:
            print(
                f"all-reduce of {row['bytes'] / 1e6:g} MB: {row['median_s'] * 1e3:.2f} ms, "
                f"{row['bytes_per_s'] / 1e9:.2f} GB/s, on the CPU {row['cpu']['bytes_per_s'] / 1e9:.2f} GB/s; "
                f"{row['of_limit']:.2f} of the smaller limit"
            )
    elif part == "nccl":
        print(f"NCCL over sockets, {found['bytes'] / 1e6:g} MB: {found['median_s'] * 1e3:.2f} ms")
    elif part == "beside":
        print(f"matrix products beside an all-reduce: {found['ratio']:.3f} of their time alone")
    else:
        times = ", ".join(f"{name} {time * 1e3:.1f}" for name, time in found["median_s"].items())
        hidden = f"; hidden {found['hidden']:.2f}" if "hidden" in found else ""
        print(f"{part}, ms: {times}{hidden}")
        if "in_a_row_s" in found:
            times = ", ".join(f"{name} {time * 1e3:.1f}" for name, time in found["in_a_row_s"].items())
            hidden = f"; hidden across steps {found['hidden_across']:.2f}" if "hidden_across" in found else ""
            print(f"{part} in a row, ms: {times}{hidden}")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    def command() -> int:
        options = tyro.cli(Options, prog="python -m bench.gpu", args=arguments, description=__doc__)
        content = run(options)
        return 1 if content["errors"] or content["parts"].get("sums", {}).get("wrong_count") else 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
