"""Measures GPU workers with CPU reducers. The workers share this machine's GPU; the reducers share its CPUs.

    python -m bench.gpu                # needs an NVIDIA GPU and JAX with CUDA; writes bench/results/gpu-NAME.json
    python -m bench.gpu --stand-in     # no GPU: arrays on the CPU, and a stand-in for the driver; measures nothing

It builds the native module if there is none, checks sums of every kind against NumPy, and then measures:

    copy           GB/s of plain copies between the GPU and pinned memory, by all workers at once: each way alone, and
                   both ways
    all-reduce     time of one bucket, bytes / time in GB/s, and the share of this rate in the rate of copies both ways;
                   with 256 MB the bar is 0.85
    beside         time of a chain of matrix products during an all-reduce / their time alone; the bar is 1.03
    step           a train step of ResNet-50 and of BERT-base, bf16, real size: without all-reduce ("alone"), with the
                   all-reduce of each gradient once it is computed ("overlap"), and with the all-reduce after the
                   backward pass ("after"). "all-reduce" is the all-reduce without a step. `hidden` is the share of the
                   all-reduce that "overlap" does not add to the step; for BERT-base and two workers the bar is 0.9

Workers that share one GPU take turns on it and share its link, so copies and steps are slower than on a GPU each. All
comparisons are between figures of the same workers under the same conditions. Communication launches no kernel, so
there is no kernel to time: "beside" shows how much it slows down computation. Figures of a stand-in mean nothing, and
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
from bench.errors import BenchError
from bench.gpu.fake_cuda import build as build_stand_in
from bench.harness.command import check_folders, run_command

ROOT = Path(__file__).resolve().parents[2]
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
    models: str = "resnet50,bert-base"
    """The models of the train steps; empty for none."""
    repeats: int = 20
    """Measurements of each time. The result is their median."""
    memory_fraction: float = 0.9
    """The share of the GPU's memory that the workers may take together."""
    pinned: str = "2GiB"
    """Pinned host memory of each worker."""
    stand_in: bool = False
    """Without a GPU: a stand-in for the driver, and small sizes. It shows that the benchmark runs, no more."""
    json: Path | None = None
    """Write all figures to this file. Default: bench/results/gpu-NAME.json for the GPU; none with --stand-in."""

    def __post_init__(self) -> None:
        if self.workers < 1 or self.reducers < 1 or self.repeats < 1:
            raise BenchError("--workers, --reducers and --repeats must be at least 1")
        self.size_list()
        check_folders(self.json)

    def size_list(self) -> list[int]:
        return [parse_size(word) for word in self.sizes.split(",")]


def run(options: Options) -> dict[str, Any]:
    device = "stand-in" if options.stand_in else find_gpu()
    print(f"# {device}, {options.workers} workers, {options.reducers} reducers", flush=True)
    _build()
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as name:
        folder = Path(name)
        settings = _settings(options, folder)
        request = {"sizes": options.size_list(), "models": [word for word in options.models.split(",") if word]}
        request |= {"repeats": options.repeats, "stand_in": options.stand_in, "result": str(folder / "result.json")}
        command = [sys.executable, "-m", "jaxhetero", "launch", "--workers", str(options.workers)]
        command += ["--reducers", str(options.reducers), "--log-dir", str(folder / "logs"), "--"]
        command += [sys.executable, "-m", "bench.gpu.worker", json.dumps(request)]
        if code := subprocess.run(command, cwd=ROOT, env=settings).returncode:
            raise BenchError(f"a process ended with code {code}; its output is above")
        result = json.loads((folder / "result.json").read_text())
    from bench.harness.report import describe_machine

    content = {"benchmark": "gpu", "device": device, "is_measurement": not options.stand_in}
    content |= {"machine": describe_machine(), "workers": options.workers, "reducers": options.reducers, **result}
    _print(content)
    if path := _path(options, device):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
        print(f"# written to {path}")
    return content


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


def _print(content: dict[str, Any]) -> None:
    if not content["is_measurement"]:
        print("# a stand-in for the driver: none of these is a measurement")
    copy = content["copy_bytes_per_s"]
    print(f"correct: {content['wrong_count'] == 0}")
    print("copy GB/s: " + ", ".join(f"{name} {rate / 1e9:.2f}" for name, rate in copy.items()))
    for row in content["all_reduce"]:
        print(
            f"all-reduce of {row['bytes'] / 1e6:g} MB: {row['median_s'] * 1e3:.2f} ms, "
            f"{row['bytes_per_s'] / 1e9:.2f} GB/s, {row['of_copy_limit']:.2f} of the copy limit"
        )
    beside = content["beside"]
    print(f"matrix products beside an all-reduce: {beside['ratio']:.3f} of their time alone")
    for row in content["steps"]:
        times = ", ".join(f"{name} {time * 1e3:.1f}" for name, time in row["median_s"].items())
        print(f"{row['model']}, ms: {times}; hidden {row['hidden']:.2f}")


def main(arguments: Sequence[str] | None = None) -> int:
    def command() -> int:
        options = tyro.cli(Options, prog="python -m bench.gpu", args=arguments, description=__doc__)
        return 1 if run(options)["wrong_count"] else 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
