"""The train loop. Data parallelism is four calls: broadcast the parameters, all-reduce the gradients (inside the
optimizer), average the batch statistics, and sum the correct answers of an evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console

import jaxhetero
from models.resnet.data import Dataset, Images, Labels, held_out_batches, load_mnist_5k, train_batches
from models.resnet.model import ResNet
from models.resnet.optimizer import distributed_sgd, learning_rate_schedule
from models.resnet.presets import Preset
from models.resnet.progress import TrainProgress
from models.resnet.report import Result, StepMeter

# How many steps are queued while the first of them runs: enough to keep the device busy while Python makes the next
# batch, few enough for the progress shown to be the progress made.
STEPS_AHEAD = 2

State = nnx.State[Any, Any]


class TrainState(NamedTuple):
    """All that a step changes."""

    params: State
    batch_stats: State
    opt_state: optax.OptState


class LossError(ArithmeticError):
    """The loss is no longer a number."""


def train(preset: Preset, console: Console) -> Result:
    """Train and evaluate as the preset says; call it on every worker after ``jaxhetero.initialize()``."""
    rank, worker_count = jaxhetero.rank(), jaxhetero.size()
    local_batch = preset.local_batch(worker_count)
    train_set, held_out_set = load_mnist_5k()
    train_set = train_set.take(slice(preset.train_image_count))
    epoch_batches = partial(
        train_batches,
        train_set,
        seed=preset.seed,
        global_batch=preset.global_batch,
        rank=rank,
        worker_count=worker_count,
        max_shift=preset.max_shift,
    )

    graphdef, params, batch_stats = nnx.split(make_model(preset), nnx.Param, nnx.BatchStat)
    params = jaxhetero.broadcast(params)
    optimizer = make_optimizer(preset)
    state = TrainState(params, batch_stats, optimizer.init(params))
    count_correct = make_count_correct(graphdef)
    compile_start = time.monotonic()
    train_step = compile_train_step(make_train_step(graphdef, optimizer), state, train_set, local_batch)
    compile_seconds = time.monotonic() - compile_start

    meter = StepMeter()
    losses: list[float] = []
    accuracies: list[float] = []
    with TrainProgress(
        console,
        epochs=preset.epochs,
        steps_per_epoch=preset.steps_per_epoch,
        global_batch=preset.global_batch,
        visible=rank == 0,
    ) as progress:
        progress.print(describe(preset, params, worker_count, compile_seconds))
        for epoch in range(preset.epochs):
            with meter.measure(preset.steps_per_epoch):
                state, local_losses = train_epoch(train_step, state, epoch_batches(epoch=epoch), progress, epoch)
            losses += global_losses(local_losses, epoch)
            if (epoch + 1) % preset.evaluate_every == 0 or epoch + 1 == preset.epochs:
                state = state._replace(batch_stats=jaxhetero.pmean(state.batch_stats))
                correct_count = evaluate(count_correct, state, held_out_set, local_batch)
                accuracies.append(correct_count / len(held_out_set))
                progress.print(
                    f"epoch {epoch + 1}/{preset.epochs} mean loss {np.mean(losses[-preset.steps_per_epoch :]):.3f} "
                    f"test accuracy {accuracies[-1]:.2%}"
                )

    return Result.collect(
        meter,
        global_batch=preset.global_batch,
        parameter_count=parameter_count(params),
        gradient_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
        test_correct_count=correct_count,
        test_image_count=len(held_out_set),
        differing_worker_count=int(count_differing_workers(state.params)),
        losses=losses,
        accuracies=accuracies,
    )


def make_model(preset: Preset) -> ResNet:
    """The network with its initial weights, drawn by one program and the random generator that compiles fastest."""

    @nnx.jit
    def initial_model() -> ResNet:
        return ResNet(preset.model, rngs=nnx.Rngs(jax.random.key(preset.seed, impl="rbg")))

    return initial_model()


def make_optimizer(preset: Preset) -> optax.GradientTransformation:
    """The preset's optimizer and learning rate, with the all-reduce of the gradients in front."""
    schedule = learning_rate_schedule(
        preset.optimizer,
        global_batch=preset.global_batch,
        steps_per_epoch=preset.steps_per_epoch,
        epochs=preset.epochs,
    )
    return distributed_sgd(preset.optimizer, schedule)


def make_train_step(graphdef: nnx.GraphDef[ResNet], optimizer: optax.GradientTransformation) -> jax.stages.Wrapped:
    """One step on this worker's part of the global batch. It is an ordinary jitted step: the optimizer all-reduces."""

    def loss_fn(params: State, batch_stats: State, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, State]:
        model = nnx.merge(graphdef, params, batch_stats, copy=True)
        loss = optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()
        return loss, nnx.state(model, nnx.BatchStat)

    @partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, images: jax.Array, labels: jax.Array) -> tuple[TrainState, jax.Array]:
        (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            state.params, state.batch_stats, images, labels
        )
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, batch_stats, opt_state), loss

    return train_step


def compile_train_step(
    train_step: jax.stages.Wrapped, state: TrainState, dataset: Dataset, local_batch: int
) -> jax.stages.Compiled:
    """Compile ahead of the first step, so that the first step can be timed like the others."""
    images = jax.ShapeDtypeStruct((local_batch, *dataset.images.shape[1:]), jnp.float32)
    labels = jax.ShapeDtypeStruct((local_batch,), jnp.int32)
    return train_step.lower(state, images, labels).compile()


def train_epoch(
    train_step: jax.stages.Compiled,
    state: TrainState,
    batches: Iterable[tuple[Images, Labels]],
    progress: TrainProgress,
    epoch: int,
) -> tuple[TrainState, list[jax.Array]]:
    """All steps of an epoch, and the loss of this worker's part of each."""
    local_losses: list[jax.Array] = []
    progress.start_epoch(epoch)
    for images, labels in batches:
        if len(local_losses) >= STEPS_AHEAD:
            local_losses[-STEPS_AHEAD].block_until_ready()
        state, loss = train_step(state, images, labels)
        local_losses.append(loss)
        progress.update(loss)
    jax.block_until_ready(state)
    return state, local_losses


def global_losses(local_losses: list[jax.Array], epoch: int) -> list[float]:
    """The losses of an epoch's steps, averaged over the workers in one all-reduce rather than one per step."""
    losses: list[float] = np.asarray(jaxhetero.pmean(jnp.stack(local_losses))).tolist()
    for step, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise LossError(
                f"the loss is {loss} at step {step + 1} of epoch {epoch + 1}; "
                "lower base_learning_rate or raise warmup_epochs"
            )
    return losses


def make_count_correct(graphdef: nnx.GraphDef[ResNet]) -> jax.stages.Wrapped:
    """How many real images of a batch the model names correctly."""

    @jax.jit
    def count_correct(state: TrainState, images: jax.Array, labels: jax.Array, is_real: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, state.params, state.batch_stats)
        model.eval()
        return jnp.sum((jnp.argmax(model(images), axis=-1) == labels) & is_real)

    return count_correct


def evaluate(count_correct: jax.stages.Wrapped, state: TrainState, dataset: Dataset, batch: int) -> int:
    """Correct answers over the whole dataset; every worker looks at its share, and every image counts once."""
    batches = held_out_batches(dataset, batch=batch, rank=jaxhetero.rank(), worker_count=jaxhetero.size())
    local_count = sum((count_correct(state, *batch_arrays) for batch_arrays in batches), start=jnp.int32(0))
    return int(jaxhetero.psum(local_count))


@jax.jit
def count_differing_workers(params: State) -> jax.Array:
    """How many workers hold other bits than rank 0. Compared as integers: -0.0 is not 0.0, and NaN is itself."""
    bits = jax.tree.map(lambda leaf: jax.lax.bitcast_convert_type(leaf, jnp.uint32), params)
    equal = jax.tree.map(jnp.array_equal, bits, jaxhetero.broadcast(bits))
    differs = ~jnp.all(jnp.stack(jax.tree.leaves(equal)))
    return jaxhetero.psum(differs.astype(jnp.int32))


def parameter_count(params: State) -> int:
    """Numbers that the optimizer learns."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def describe(preset: Preset, params: State, worker_count: int, compile_seconds: float) -> str:
    """One line that says what is about to run."""
    return (
        f"{preset.model.architecture} ResNet, {parameter_count(params):,} parameters; "
        f"{worker_count} x {preset.local_batch(worker_count)} images per step, "
        f"{preset.epochs} epochs of {preset.steps_per_epoch} steps; compiled in {compile_seconds:.1f} s"
    )
