"""Training a ResNet. Data parallelism is four calls: broadcast the parameters, all-reduce the gradients (inside the
optimizer), average the batch statistics, and sum the correct predictions of an evaluation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from rich.console import Console

import jaxhetero
from models.common.batches import BatchSplit
from models.common.command import RunOptions
from models.common.first import from_first, total_of
from models.common.optimizer import init_state, scaled
from models.common.report import Result
from models.common.stages import StagedStep, require_plain_gradients, split_over_replicas, split_over_workers
from models.common.steps import Piece, data_parallel_step
from models.common.training import Scores, Training
from models.resnet.data import Data, open_data
from models.resnet.model import ResNet
from models.resnet.optimizer import learning_rate_schedule, make_optimizer
from models.resnet.presets import Preset

TOP = 5

State = nnx.State[Any, Any]


class TrainState(NamedTuple):
    """Everything that a step changes."""

    params: State
    batch_stats: State
    opt_state: optax.OptState


def train(preset: Preset, folder: Path | None, options: RunOptions, console: Console) -> Result:
    """Train and evaluate as the preset says. Call it on every worker after ``jaxhetero.initialize()``."""
    split = split_over_replicas(preset.global_batch, preset.micro_batch, options)
    data = open_data(preset, folder)
    graphdef, params, batch_stats = nnx.split(make_model(preset), nnx.Param, nnx.BatchStat)  # type: ignore[misc]
    params = from_first(params)
    schedule = make_schedule(preset)
    optimizer = make_optimizer(
        preset.optimizer,
        schedule,
        accumulate_every=options.accumulated(split),
        is_reduced=options.is_exact,
        weights_from_reducers=options.weights_from_reducers,
        is_across_steps=options.across_steps,
    )
    piece = make_piece(graphdef, preset)
    train_step: Any = data_parallel_step(piece, optimizer, preset.optimizer, split, options, ("batch_stats",))
    if options.stages > 1:
        train_step = make_staged_step(graphdef, preset, options.stages, split.accumulate_every)
    count_correct = make_count_correct(graphdef)
    return Training(
        title=f"{preset.model.architecture} ResNet",
        unit="images",
        split=split,
        step_count=preset.step_count,
        stretch_steps=preset.steps_per_epoch,
        evaluate_every=preset.evaluate_every,
        label=lambda step: f"epoch {step // preset.steps_per_epoch + 1}/{preset.epochs}",
        state=TrainState(params, batch_stats, init_state(optimizer, params)),
        train_step=train_step,
        batches=data.train_batches,
        learning_rate=schedule,
        synchronize=synchronize,
        pull=optimizer.pull,
        push=optimizer.push,
        begin=optimizer.begin,
        settle=optimizer.settle,
        evaluate=lambda state: evaluate(count_correct, state, data, split_over_workers(split)),
        identity={"trainer": "resnet", "model": dataclasses.asdict(preset.model)},
        advice="lower base_learning_rate or raise warmup_epochs",
    ).run(options, console)


def synchronize(state: TrainState) -> TrainState:
    """Make the statistics the same on every worker. While it trains, each worker has its own."""
    return state._replace(batch_stats=jaxhetero.pmean(state.batch_stats))


def make_model(preset: Preset) -> ResNet:
    """The network with its initial weights, drawn by one program and the random generator that compiles fastest."""

    @nnx.jit
    def initial_model() -> ResNet:
        return ResNet(preset.model, rngs=nnx.Rngs(jax.random.key(preset.seed, impl="rbg")))

    return initial_model()


def make_schedule(preset: Preset) -> optax.Schedule:
    """The preset's learning rate as a function of the step."""
    return learning_rate_schedule(
        preset.optimizer,
        global_batch=preset.global_batch,
        steps_per_epoch=preset.steps_per_epoch,
        epochs=preset.epochs,
    )


def make_piece(graphdef: nnx.GraphDef[ResNet], preset: Preset) -> Piece:
    """The pass over one piece of the global batch."""

    def piece(state: TrainState, images: jax.Array, labels: jax.Array) -> dict[str, Any]:
        def loss_fn(params: State) -> tuple[jax.Array, tuple[jax.Array, State]]:
            model = nnx.merge(graphdef, params, state.batch_stats, copy=True)
            loss = cross_entropy(model(images), labels, preset.label_smoothing)
            return scaled(loss, state.opt_state), (loss, nnx.state(model, nnx.BatchStat))

        grads, (loss, batch_stats) = jax.grad(loss_fn, has_aux=True)(state.params)
        return {"loss": loss, "grads": grads, "batch_stats": batch_stats}

    return piece


def make_staged_step(graphdef: nnx.GraphDef[ResNet], preset: Preset, stages: int, microbatches: int) -> StagedStep:
    """The step of all pieces of a replica, over the stages of a pipeline."""
    config = preset.optimizer
    require_plain_gradients(config, stages)

    def loss(params: State, batch_stats: State, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, State]:
        model = nnx.merge(graphdef, params, batch_stats, copy=True)
        value = cross_entropy(model(images), labels, preset.label_smoothing)
        return value, nnx.state(model, nnx.BatchStat)

    optimizer = make_optimizer(config, make_schedule(preset), is_reduced=True)
    return StagedStep(loss, lambda grad_fn: optimizer, stages, microbatches, statistics="batch_stats")


def cross_entropy(logits: jax.Array, labels: jax.Array, smoothing: float) -> jax.Array:
    """float32[]: the mean over the images, with the share ``smoothing`` of the target spread over all classes."""
    targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), smoothing)
    mean: jax.Array = optax.softmax_cross_entropy(logits, targets).mean()
    return mean


def make_count_correct(graphdef: nnx.GraphDef[ResNet]) -> jax.stages.Wrapped:
    """The jitted count of a batch's real images whose class is the first guess, and among the first five: int32[2]."""

    @jax.jit
    def count_correct(state: TrainState, images: jax.Array, labels: jax.Array, is_real: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, state.params, state.batch_stats, copy=True)
        model.eval()  # type: ignore[no-untyped-call]
        logits = model(images)
        # How many classes score higher than the right class. Of classes with equal scores, the first counts as higher.
        right = jnp.take_along_axis(logits, labels[:, None], axis=1)
        is_before = jnp.arange(logits.shape[1]) < labels[:, None]
        place = jnp.sum((logits > right) | ((logits == right) & is_before), axis=1)
        return jnp.stack([jnp.sum((place < first) & is_real) for first in (1, TOP)])

    return count_correct


def evaluate(count_correct: jax.stages.Wrapped, state: TrainState, data: Data, split: BatchSplit) -> Scores:
    """The scores over all held-out images, of which every worker takes a share. Every image counts once."""
    batches = data.held_out_batches(split)
    local_counts = sum((count_correct(state, *batch) for batch in batches), start=jnp.zeros(2, jnp.int32))
    first, among_five = total_of(local_counts).tolist()
    image_count = data.held_out_count
    return {
        "test_accuracy": first / image_count,
        "top5_accuracy": among_five / image_count,
        "test_correct_count": first,
        "test_image_count": image_count,
    }
