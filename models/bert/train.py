"""Pre-training. Data parallelism is three calls: broadcast the parameters, all-reduce the gradients (inside the
optimizer), and sum the correct predictions of an evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from rich.console import Console

from models.bert.data import PreTrainingData
from models.bert.loss import PredictionCounts, Targets, count_predictions, pre_training_loss
from models.bert.model import Batch, PreTrainingModel
from models.bert.optimizer import OptimizerConfig, make_optimizer
from models.bert.presets import Preset
from models.common.batches import BatchSplit
from models.common.checkpoint import Checkpoints
from models.common.command import RunOptions
from models.common.errors import SettingsError
from models.common.first import from_first, total_of
from models.common.optimizer import init_state, scaled
from models.common.report import Result
from models.common.stages import StagedStep, require_plain_gradients, split_over_replicas, split_over_workers
from models.common.steps import Piece, data_parallel_step
from models.common.training import Scores, Training

State = nnx.State[Any, Any]


class TrainState(NamedTuple):
    """Everything that a step changes."""

    params: State
    opt_state: optax.OptState


def train(
    preset: Preset, folder: Path | None, options: RunOptions, console: Console, start_from: Path | None
) -> Result:
    """Train and evaluate as the preset says. Call it on every worker after ``jaxhetero.initialize()``."""
    if folder is None:
        raise SettingsError("--data is missing: the folder with the records")
    split = split_over_replicas(preset.global_batch, preset.micro_batch, options)
    data = PreTrainingData(folder, preset)
    identity = {"trainer": "bert", "model": dataclasses.asdict(preset.model)}
    graphdef, params = nnx.split(make_model(preset), nnx.Param)
    if start_from:
        params = Checkpoints(start_from / "checkpoints", identity).restore_params("latest", params)
    params = from_first(params)
    optimizer = make_optimizer(
        preset.optimizer,
        preset.schedule,
        accumulate_every=options.accumulated(split),
        is_reduced=options.is_exact,
        weights_from_reducers=options.weights_from_reducers,
        is_across_steps=options.across_steps,
    )
    count = make_count(graphdef)
    loss = make_loss(graphdef, preset.next_sentence_weight)
    train_step: Any = data_parallel_step(make_piece(loss, preset.seed), optimizer, preset.optimizer, split, options)
    if options.stages > 1:
        train_step = make_staged_step(loss, preset.optimizer, preset.schedule, preset.seed, options.stages, split)
    return Training(
        title="BERT pre-training",
        unit="sequences",
        split=split,
        step_count=preset.step_count,
        stretch_steps=preset.checkpoint_every,
        evaluate_every=preset.evaluate_every,
        label=lambda step: "",
        state=TrainState(params, init_state(optimizer, params)),
        train_step=train_step,
        batches=data.train_batches,
        learning_rate=preset.schedule,
        pull=optimizer.pull,
        push=optimizer.push,
        begin=optimizer.begin,
        settle=optimizer.settle,
        evaluate=lambda state: evaluate(count, state.params, data, split_over_workers(split)),
        identity=identity,
        advice="lower the learning rate (--peak) or give more --warmup-steps",
    ).run(options, console)


def make_model(preset: Preset) -> PreTrainingModel:
    """The network with its initial weights, drawn by one program."""

    @nnx.jit
    def initial_model() -> PreTrainingModel:
        return PreTrainingModel(preset.model, rngs=nnx.Rngs(jax.random.key(preset.seed, impl="rbg")))

    return initial_model()


Loss: TypeAlias = Callable[..., jax.Array]
"""``(params, rngs, *batch) -> float32[]``; ``rngs`` is for dropout."""


def make_loss(graphdef: nnx.GraphDef[PreTrainingModel], next_sentence_weight: float) -> Loss:
    """The loss of pre-training."""

    def loss(params: State, rngs: nnx.Rngs, batch: Batch, targets: Targets) -> jax.Array:
        logits = nnx.merge(graphdef, params, copy=True)(batch, targets.positions, rngs=rngs)
        return pre_training_loss(*logits, targets, next_sentence_weight)

    return loss


def make_piece(loss: Loss, seed: int) -> Piece:
    """The pass over one piece of the global batch."""

    def piece(state: TrainState, *batch_and_number: Any) -> dict[str, Any]:
        *batch, number = batch_and_number
        key = dropout_key(seed, number)

        def loss_fn(params: State) -> tuple[jax.Array, jax.Array]:
            value = loss(params, nnx.Rngs(dropout=key), *batch)
            return scaled(value, state.opt_state), value

        grads, value = jax.grad(loss_fn, has_aux=True)(state.params)
        return {"loss": value, "grads": grads}

    return piece


def make_staged_step(
    loss: Loss, config: OptimizerConfig, schedule: optax.Schedule, seed: int, stages: int, split: BatchSplit
) -> StagedStep:
    """The step of all pieces of a replica, over the stages of a pipeline."""
    require_plain_gradients(config, stages)

    def piece_loss(params: State, *batch_and_piece: Any) -> jax.Array:
        *batch, piece = batch_and_piece
        return loss(params, nnx.Rngs(dropout=dropout_key(seed, piece[0])), *batch)

    return StagedStep(
        piece_loss,
        lambda grad_fn: make_optimizer(config, schedule, clip_instead=grad_fn.clip_by_global_norm),
        stages,
        split.accumulate_every,
    )


def dropout_key(seed: int, piece: Any) -> jax.Array:
    """It follows from the number of the piece, so dropout does not depend on which worker has the piece."""
    return jax.random.fold_in(jax.random.key(seed, impl="rbg"), piece)


def make_count(graphdef: nnx.GraphDef[PreTrainingModel]) -> jax.stages.Wrapped:
    """The jitted function that counts the correct predictions of a batch."""

    @jax.jit
    def count(params: State, batch: Batch, targets: Targets, is_real: jax.Array) -> PredictionCounts:
        model = nnx.merge(graphdef, params, copy=True)
        return count_predictions(*model(batch, targets.positions), targets, is_real)

    return count


def evaluate(count: jax.stages.Wrapped, params: State, data: PreTrainingData, split: BatchSplit) -> Scores:
    """The exact scores over all held-out records, of which every worker takes a share. Empty without such records."""
    if data.held_out is None:
        return {}
    total = PredictionCounts(*[jnp.float32(0)] * len(PredictionCounts._fields))
    for batch in data.held_out_batches(split):
        total = jax.tree.map(jnp.add, total, count(params, *batch))
    token_loss, token_correct, token_count, next_correct, next_count = map(float, total_of(total))
    return {
        "mlm_loss": token_loss / token_count,
        "mlm_accuracy": token_correct / token_count,
        "next_sentence_accuracy": next_correct / next_count,
        "masked_token_count": token_count,
    }
