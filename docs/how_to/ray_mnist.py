"""The ResNet trainer of models/ on a Ray cluster. Arguments are those of `python -m models.resnet`."""

from __future__ import annotations

import logging
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import ray.train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer

from jaxhetero.cluster.ray import JaxheteroConfig


def train_on_worker(config: dict[str, list[str]]) -> int:
    """What Ray runs on every worker. Returns the step from which this attempt has trained."""
    # Imported here, because the driver's host need not have them.
    import jax
    from rich.console import Console

    import jaxhetero
    from models.common.command import parse_options
    from models.resnet.__main__ import DEFAULT_PRESET, PRESETS, Options
    from models.resnet.train import train

    jax.config.update("jax_default_prng_impl", "rbg")  # as the trainer's command does
    logging.getLogger("absl").setLevel("WARNING")  # orbax tells much
    options = parse_options(Options, PRESETS, DEFAULT_PRESET, config["arguments"])
    jaxhetero.initialize()  # finds its settings in the environment
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # Ray's own folder for this run
        latest = ray.train.get_checkpoint()
        run = replace(options.run, output=Path(folder), resume="latest" if latest else None, report=report)
        if latest and jaxhetero.rank() == 0:
            latest.to_directory(run.checkpoint(latest.get_metadata()["step"]))
        result = train(options.settings, options.data, run, Console())
    jaxhetero.shutdown()
    return result.first_step


def report(step: int, scores: dict[str, float], folder: Path | None) -> None:
    """Tell Ray after each epoch. It keeps the checkpoint, where any host finds it after a retry."""
    checkpoint = None
    if folder:
        checkpoint = Checkpoint.from_directory(folder)
        checkpoint.set_metadata({"step": step})
    ray.train.report({**scores, "step": step}, checkpoint=checkpoint)


if __name__ == "__main__":
    trainer = JaxTrainer(
        train_on_worker,
        train_loop_config={"arguments": sys.argv[1:]},
        jax_config=JaxheteroConfig(reducers=2, resources_per_reducer={"reducer": 1}),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name="mnist",
            storage_path=str(Path("ray-results").absolute()),  # shared by all hosts, or a bucket: s3://...
            failure_config=FailureConfig(max_failures=2),
        ),
    )
    result = trainer.fit()
    accuracy, step = result.metrics["test_accuracy"], result.metrics["step"]
    print(f"test accuracy {accuracy:.2%} after step {step}; the last attempt began after step {result.return_value}")
