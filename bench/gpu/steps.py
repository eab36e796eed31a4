"""Train steps of the reference models on random data: the same step with and without its all-reduce."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxhetero
import jaxhetero.optimizers
from bench.harness.errors import BenchError
from models.bert import model as bert
from models.bert.loss import Targets, pre_training_loss
from models.bert.presets import BASE
from models.bert.presets import TINY as TINY_BERT
from models.mask_rcnn import model as mask_rcnn
from models.mask_rcnn.batch import MASK_SIZE
from models.mask_rcnn.batch import Batch as Scene
from models.mask_rcnn.loss import LossConfig, losses
from models.mask_rcnn.proposals import ProposalConfig
from models.mask_rcnn.targets import SampleConfig
from models.resnet import model as resnet

Programs = dict[str, Callable[..., Any]]
Loss = Callable[[Any, Any, Any], jax.Array]


@dataclass(frozen=True)
class Row:
    """Train steps one after the other, each with what the one before gave, as a program trains."""

    step: Callable[..., Any]
    """``(carry, others, batch) -> carry``."""
    carry: Any
    """Of the first step."""
    end: Callable[[Any], Any] = lambda carry: carry
    """What is to be done with the last one."""


def make_programs(model: str, small: bool) -> tuple[Programs, tuple[Any, ...]]:
    """The programs by name, and the arguments that each takes: parameters, optimizer state, other state, batch."""
    loss_fn, params, others, batch = _make_model(model, small)
    optimizer = optax.sgd(1e-4, momentum=0.9)
    state = optimizer.init(params)

    def update(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    def alone(params: Any, state: Any, others: Any, batch: Any) -> Any:
        return update(params, state, jax.grad(loss_fn)(params, others, batch))

    def overlap(params: Any, state: Any, others: Any, batch: Any) -> Any:
        def reduced(params: Any) -> jax.Array:
            return loss_fn(jaxhetero.replicated(params, mean=True, name=f"{model} overlap"), others, batch)

        return update(params, state, jax.grad(reduced)(params))

    def after(params: Any, state: Any, others: Any, batch: Any) -> Any:
        gradients = jax.lax.optimization_barrier(jax.grad(loss_fn)(params, others, batch))
        return update(params, state, jaxhetero.pmean(gradients, name=f"{model} after"))

    def all_reduce(params: Any, state: Any, others: Any, batch: Any) -> Any:
        del state, others, batch
        return jaxhetero.pmean(params, name=f"{model} all-reduce")

    programs: Programs = {"alone": alone, "all-reduce": all_reduce, "overlap": overlap, "after": after}
    return programs, (params, state, others, batch)


def make_rows(model: str, small: bool) -> tuple[dict[str, Row], tuple[Any, ...]]:
    """Steps with AdamW by name, and what each takes beside its carry.

    ``alone`` reduces nothing, ``overlap`` each gradient once it is computed, ``across`` under the next step as well.
    """
    loss_fn, params, others, batch = _make_model(model, small)
    optimizer = optax.adamw(1e-4)
    training = jaxhetero.optimizers.across_steps(optimizer).named(f"{model} across")

    def ordinary(reduces: bool) -> Row:
        def step(carry: Any, others: Any, batch: Any) -> Any:
            def loss(params: Any) -> jax.Array:
                if reduces:
                    params = jaxhetero.replicated(params, mean=True, name=f"{model} in a row")
                return loss_fn(params, others, batch)

            params, state = carry
            updates, state = optimizer.update(jax.grad(loss)(params), state, params)
            return optax.apply_updates(params, updates), state

        return Row(jax.jit(step), (params, optimizer.init(params)))

    def across(carry: Any, others: Any, batch: Any) -> Any:
        params, state = training.weights(carry)
        return training.send(state, jax.grad(loss_fn)(params, others, batch))

    rows = {"alone": ordinary(False), "overlap": ordinary(True)}
    rows["across"] = Row(jax.jit(across), training.init(params), training.settle)
    return rows, (others, batch)


def _make_model(model: str, small: bool) -> tuple[Loss, Any, Any, Any]:
    makers = {"resnet50": _resnet, "bert-base": _bert, "mask-rcnn": _mask_rcnn}
    if model not in makers:
        raise BenchError(f"--models has {model!r}; there are: {', '.join(makers)}")
    return makers[model](small)


def _resnet(small: bool) -> tuple[Loss, Any, Any, Any]:
    config = resnet.ModelConfig(architecture="tiny" if small else "resnet50", dtype="bfloat16")
    images, size = (4, 32) if small else (128, 224)
    network = resnet.ResNet(config, rngs=nnx.Rngs(0))
    graph, params, others = nnx.split(network, nnx.Param, ...)  # type: ignore[misc]
    generator = np.random.default_rng(0)
    batch = (
        jnp.asarray(generator.standard_normal((images, size, size, 3)), jnp.float32),
        jnp.asarray(generator.integers(0, 1000, images)),
    )

    def loss_fn(params: Any, others: Any, batch: Any) -> jax.Array:
        logits = nnx.merge(graph, params, others, copy=True)(batch[0])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]))

    return loss_fn, params, others, batch


def _bert(small: bool) -> tuple[Loss, Any, Any, Any]:
    config = replace(TINY_BERT if small else BASE, dtype="bfloat16", dropout=0.0, attention_dropout=0.0)
    sequences, length, predictions = (2, 32, 4) if small else (512, 128, 20)
    network = bert.PreTrainingModel(config, rngs=nnx.Rngs(0))
    graph, params, others = nnx.split(network, nnx.Param, ...)  # type: ignore[misc]
    generator = np.random.default_rng(0)
    tokens = jnp.asarray(generator.integers(0, config.vocabulary_size, (sequences, length)), jnp.int32)
    places = jnp.asarray(generator.integers(0, length, (sequences, predictions)), jnp.int32)
    texts = bert.Batch(tokens, jnp.zeros_like(tokens), jnp.ones_like(tokens))
    weights = jnp.ones((sequences, predictions), jnp.float32)
    targets = Targets(places, tokens[:, :predictions], weights, jnp.zeros(sequences, jnp.int32))

    def loss_fn(params: Any, others: Any, batch: Any) -> jax.Array:
        network = nnx.merge(graph, params, others, copy=True)
        token_logits, next_logits = network(batch[0], batch[1].positions)
        return pre_training_loss(token_logits, next_logits, batch[1])

    return loss_fn, params, others, (texts, targets)


def _mask_rcnn(small: bool) -> tuple[Loss, Any, Any, Any]:
    config = mask_rcnn.SMALL if small else mask_rcnn.ModelConfig()
    few = LossConfig(ProposalConfig(level_count=64, image_count=64), SampleConfig(anchor_count=64, roi_count=16))
    loss, images, side, objects = (few, 1, 64, 4) if small else (LossConfig(), 2, 1344, 100)
    network = mask_rcnn.MaskRCNN(config, rngs=nnx.Rngs(0))
    graph, params, others = nnx.split(network, nnx.Param, ...)  # type: ignore[misc]
    generator = np.random.default_rng(0)
    corners = generator.uniform(0, side / 2, (images, objects, 2))
    boxes = np.concatenate([corners, corners + generator.uniform(side / 8, side / 2, corners.shape)], axis=-1)
    batch = Scene(
        image=jnp.asarray(generator.integers(0, 256, (images, side, side, 3)), jnp.uint8),
        size=jnp.full((images, 2), side, jnp.float32),
        boxes=jnp.asarray(boxes, jnp.float32),
        classes=jnp.asarray(generator.integers(1, config.class_count + 1, (images, objects)), jnp.int32),
        masks=jnp.ones((images, objects, MASK_SIZE, MASK_SIZE), jnp.uint8),
        number=jnp.arange(images, dtype=jnp.int32),
        epoch=jnp.zeros(images, jnp.int32),
    )

    def loss_fn(params: Any, others: Any, batch: Any) -> jax.Array:
        return losses(nnx.merge(graph, params, others, copy=True), batch, loss, 0).total

    return loss_fn, params, others, batch
