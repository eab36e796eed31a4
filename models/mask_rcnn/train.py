"""Training Mask R-CNN. Data parallelism is three calls: broadcast the weights, all-reduce the gradients (inside the
optimizer), and gather what an evaluation finds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx
from rich.console import Console

import jaxhetero
from models.common.command import RunOptions
from models.common.errors import SettingsError, require
from models.common.first import from_first
from models.common.optimizer import init_state, scaled
from models.common.report import Result
from models.common.stages import StagedStep, require_plain_gradients, split_over_replicas, split_over_workers
from models.common.steps import Piece, data_parallel_step
from models.common.tensor_file import read_safetensors
from models.common.training import Training
from models.mask_rcnn.batch import Batch, Detections
from models.mask_rcnn.data import CocoData
from models.mask_rcnn.detect import detect
from models.mask_rcnn.draw import draw_findings
from models.mask_rcnn.evaluate import Evaluation
from models.mask_rcnn.loss import losses
from models.mask_rcnn.model import MaskRCNN
from models.mask_rcnn.optimizer import make_optimizer
from models.mask_rcnn.presets import Preset
from models.mask_rcnn.torch_weights import load_torch_weights
from models.resnet.model import Frozen

# The beginning of the names of a detector's own weights in torchvision.
HEADS = "roi_heads."
# Held-out images in the picture of what the model finds.
DRAWN_COUNT = 4

State = nnx.State[Any, Any]


class TrainState(NamedTuple):
    """What a checkpoint has. A step changes all but the frozen weights."""

    params: State
    frozen: State
    opt_state: optax.OptState


def train(
    preset: Preset, folder: Path | None, options: RunOptions, console: Console, start_from: Path | None = None
) -> Result:
    """Train and evaluate as the preset says. Call it on every worker after ``jaxhetero.initialize()``."""
    if folder is None:
        raise SettingsError("--data is missing: the COCO folder")
    require(
        start_from is not None or preset.model.backbone.norm != "frozen",
        "--start-from is missing: the normalisation is frozen, so the backbone's weights must be trained ones",
    )
    split = split_over_replicas(preset.global_batch, preset.micro_batch, options)
    data = CocoData(folder, preset)
    if jaxhetero.rank() == 0:
        console.print(str(data), markup=False, highlight=False, soft_wrap=True)
    graphdef, params, frozen = nnx.split(make_model(preset, start_from), nnx.Param, Frozen)  # type: ignore[misc]
    params, frozen = from_first((params, frozen))
    optimizer = make_optimizer(
        preset.optimizer,
        preset.schedule,
        accumulate_every=options.accumulated(split),
        is_reduced=options.is_exact,
        weights_from_reducers=options.weights_from_reducers,
        is_across_steps=options.across_steps,
    )
    train_step: Any = data_parallel_step(make_piece(graphdef, preset), optimizer, preset.optimizer, split, options)
    if options.stages > 1:
        train_step = make_staged_step(graphdef, frozen, preset, options.stages, split.accumulate_every)
    evaluation = Evaluation(make_detect(graphdef, preset), data, split_over_workers(split))
    return Training(
        title="Mask R-CNN",
        unit="images",
        split=split,
        step_count=preset.step_count,
        stretch_steps=preset.checkpoint_every,
        evaluate_every=preset.evaluate_every,
        label=lambda step: f"epoch {step * preset.global_batch // len(data.train_images) + 1}",
        state=TrainState(params, frozen, init_state(optimizer, params)),
        train_step=train_step,
        batches=data.train_batches,
        learning_rate=preset.schedule,
        pull=optimizer.pull,
        push=optimizer.push,
        begin=optimizer.begin,
        settle=optimizer.settle,
        evaluate=evaluation,
        draw=lambda: draw_findings(data.held_out.images[:DRAWN_COUNT], data.held_out, evaluation.findings),
        identity={"trainer": "mask_rcnn", "model": dataclasses.asdict(preset.model)},
        advice="lower the learning rate (--peak) or give more --warmup-steps",
    ).run(options, console)


def make_model(preset: Preset, start_from: Path | None = None) -> MaskRCNN:
    """The network with its initial weights, drawn by one program, and those of the file ``start_from``."""

    @nnx.jit
    def initial_model() -> MaskRCNN:
        return MaskRCNN(preset.model, rngs=nnx.Rngs(jax.random.key(preset.seed, impl="rbg")))

    model = initial_model()
    if start_from:
        weights = read_safetensors(start_from)
        load_torch_weights(model, weights, backbone_only=not any(name.startswith(HEADS) for name in weights))
    return model


def make_piece(graphdef: nnx.GraphDef[MaskRCNN], preset: Preset) -> Piece:
    """The pass over one piece of the global batch."""

    def piece(state: TrainState, batch: Batch) -> dict[str, Any]:
        def loss_fn(params: State) -> tuple[jax.Array, jax.Array]:
            model = nnx.merge(graphdef, params, state.frozen, copy=True)
            loss = losses(model, batch, preset.loss, preset.seed).total
            return scaled(loss, state.opt_state), loss

        grads, loss = jax.grad(loss_fn, has_aux=True)(state.params)
        return {"loss": loss, "grads": grads}

    return piece


def make_staged_step(
    graphdef: nnx.GraphDef[MaskRCNN], frozen: State, preset: Preset, stages: int, microbatches: int
) -> StagedStep:
    """The step of all pieces of a replica, over the stages of a pipeline. A stage holds the frozen weights it uses."""
    config = preset.optimizer
    require_plain_gradients(config, stages)

    def loss(params: State, batch: Batch) -> jax.Array:
        return losses(nnx.merge(graphdef, params, frozen, copy=True), batch, preset.loss, preset.seed).total

    return StagedStep(
        loss,
        lambda grad_fn: make_optimizer(
            config, preset.schedule, clip_instead=grad_fn.clip_by_global_norm, is_reduced=True
        ),
        stages,
        microbatches,
    )


def make_detect(graphdef: nnx.GraphDef[MaskRCNN], preset: Preset) -> jax.stages.Wrapped:
    """The jitted function from a batch to what the model finds in it."""

    @jax.jit
    def find(state: TrainState, batch: Batch) -> Detections:
        model = nnx.merge(graphdef, state.params, state.frozen, copy=True)
        return detect(model, batch.image, batch.size, preset.detection)

    return find
