"""The ResNet and its recipes against their definitions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxhetero
from models.common.batches import BatchSplit
from models.common.errors import SettingsError
from models.common.optimizer import init_state, weights_mask
from models.common.schedules import named_schedule
from models.common.steps import plain_step
from models.resnet.arrays import (
    Dataset,
    load_mnist_5k,
    normalize,
)
from models.resnet.data import ArrayData
from models.resnet.model import (
    BasicBlock,
    BottleneckBlock,
    Frozen,
    ModelConfig,
    ResNet,
    freeze,
    normalization,
    stage_channels,
    stage_strides,
)
from models.resnet.optimizer import OptimizerConfig, learning_rate_schedule, make_optimizer
from models.resnet.presets import PRESETS, Preset
from models.resnet.train import (
    TrainState,
    cross_entropy,
    evaluate,
    make_count_correct,
    make_model,
    make_piece,
    make_schedule,
)

TINY = PRESETS["mnist"].model
AWS = OptimizerConfig()  # lr .1 per 256 images, warm-up from .001 over 10 epochs, poly(2) to 0


@pytest.fixture
def world_of_one() -> Iterator[None]:
    jaxhetero.initialize()
    yield
    jaxhetero.shutdown()


@pytest.fixture(scope="module")
def digits() -> tuple[Dataset, Dataset]:
    return load_mnist_5k()


# --- network ---------------------------------------------------------------------------------------------------------


def abstract_resnet(config: ModelConfig) -> ResNet:
    """The network's shapes without its numbers."""
    return nnx.eval_shape(lambda: ResNet(config, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("resnet18", 11_689_512),
        ("resnet34", 21_797_672),
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        ("resnet152", 60_192_808),
    ],
)
def test_parameter_count_is_that_of_the_published_network(architecture: Any, expected: int) -> None:
    params = nnx.state(abstract_resnet(ModelConfig(architecture=architecture)), nnx.Param)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == expected


def test_resnet50_strides_on_the_3x3_convolution_and_the_shortcut() -> None:
    blocks = abstract_resnet(ModelConfig(architecture="resnet50")).blocks
    first_of_stage = {3, 7, 13}
    for index, block in enumerate(blocks):
        stride = 2 if index in first_of_stage else 1
        assert (block.conv1.strides, block.conv2.strides, block.conv3.strides) == (1, stride, 1)
        assert block.conv2.kernel_size == (3, 3)
        assert block.shortcut.is_identity == (index not in first_of_stage | {0})
        if index in first_of_stage:
            assert block.shortcut.conv.strides == 2


@pytest.mark.parametrize("block_type", [BasicBlock, BottleneckBlock])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_last_gamma_is_zero_so_a_block_starts_as_its_shortcut(block_type: Any, norm: Any) -> None:
    config = ModelConfig(norm=norm, group_count=4)
    block = block_type(8, 8, 2, config=config, rngs=nnx.Rngs(jax.random.key(0, impl="rbg")))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 6, 8)), jnp.float32)
    np.testing.assert_array_equal(block(x), nnx.relu(block.shortcut(x)))

    last = "norm3" if block_type is BottleneckBlock else "norm2"
    gammas = {name: getattr(block, name).scale[...] for name in ("norm1", "norm2", "norm3") if hasattr(block, name)}
    for name, gamma in gammas.items():
        np.testing.assert_array_equal(gamma, np.zeros(gamma.shape) if name == last else np.ones(gamma.shape))


@pytest.mark.parametrize(
    ("stem", "expected"),
    [({"stem_kernel": 7, "stem_stride": 2, "stem_pool": True}, 56), ({"stem_kernel": 3, "stem_stride": 1}, 224)],
)
def test_stem_resolution(stem: dict[str, Any], expected: int) -> None:
    config = ModelConfig(**{"architecture": "resnet18", "stem_pool": False, **stem})
    seen: list[tuple[int, ...]] = []

    def forward(images: jax.Array) -> jax.Array:
        model = ResNet(config, rngs=nnx.Rngs(0))
        first = model.blocks[0]
        model.blocks[0] = lambda x: (seen.append(x.shape), first(x))[1]
        return model(images)

    logits = jax.eval_shape(forward, jax.ShapeDtypeStruct((2, 224, 224, 3), jnp.float32))
    assert logits.shape == (2, 1000)
    assert seen == [(2, expected, expected, 64)]


def test_features_are_the_outputs_of_the_stages() -> None:
    config = ModelConfig(architecture="resnet50")
    images = jax.ShapeDtypeStruct((2, 64, 96, 3), jnp.float32)
    outputs = jax.eval_shape(lambda images: ResNet(config, rngs=nnx.Rngs(0)).features(images), images)
    assert [output.shape for output in outputs] == [
        (2, 16, 24, 256),
        (2, 8, 12, 512),
        (2, 4, 6, 1024),
        (2, 2, 3, 2048),
    ]
    assert [output.shape[-1] for output in outputs] == stage_channels(config)
    assert [64 // output.shape[1] for output in outputs] == stage_strides(config)


def test_frozen_normalisation_is_that_of_running_statistics_and_is_not_trained() -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 3, 3, 8)), jnp.float32)
    batch = normalization(8, config=ModelConfig(), rngs=nnx.Rngs(0))
    frozen = normalization(8, config=ModelConfig(norm="frozen"), rngs=nnx.Rngs(0))
    for name in ("scale", "bias", "mean", "var"):
        value = jnp.asarray(rng.uniform(0.5, 2, 8), jnp.float32)
        getattr(batch, name)[...] = getattr(frozen, name)[...] = value
    batch.eval()
    np.testing.assert_allclose(frozen(x), batch(x), rtol=1e-5, atol=1e-6)
    assert not jax.tree.leaves(nnx.state(frozen, nnx.Param))
    freeze(batch)
    assert not jax.tree.leaves(nnx.state(batch, nnx.Param))
    assert len(jax.tree.leaves(nnx.state(batch, Frozen))) == 2
    with pytest.raises(SettingsError, match="norm is frozen; a ResNet that trains needs batch or group"):
        replace(PRESETS["mnist"], model=replace(TINY, norm="frozen"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_computes_convolutions_only(dtype: Any) -> None:
    config = replace(TINY, dtype=dtype)

    def forward(images: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
        model = ResNet(config, rngs=nnx.Rngs(0))
        return model.stem_conv(images), model(images), nnx.state(model)

    convolved, logits, state = jax.eval_shape(forward, jax.ShapeDtypeStruct((2, 28, 28, 1), jnp.float32))
    assert convolved.dtype == jnp.dtype(dtype)
    assert logits.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("float32")}


@pytest.mark.usefixtures("world_of_one")
def test_evaluation_is_exact_whatever_the_batch(digits: tuple[Dataset, Dataset]) -> None:
    """An image's answer depends neither on the images beside it nor on the filling of the last batch."""
    train, held_out = digits
    preset = PRESETS["mnist-smoke"]
    graphdef, params, batch_stats = nnx.split(make_model(preset), nnx.Param, nnx.BatchStat)
    state = TrainState(params, batch_stats, ())
    count_correct = make_count_correct(graphdef)
    some = held_out.take(slice(110))
    data = ArrayData(train, some, preset)
    scores = evaluate(count_correct, state, data, BatchSplit.make(50, 0, rank=0, worker_count=1))
    assert scores == evaluate(count_correct, state, data, BatchSplit.make(33, 0, rank=0, worker_count=1))

    model = nnx.merge(graphdef, params, batch_stats)
    model.eval()
    order = np.argsort(-np.asarray(nnx.jit(lambda model, x: model(x))(model, normalize(some.images))), axis=1)
    assert scores["test_correct_count"] == np.sum(order[:, 0] == some.labels)
    assert scores["top5_accuracy"] == pytest.approx(np.mean(np.any(order[:, :5] == some.labels[:, None], axis=1)))
    assert scores["test_image_count"] == 110


def test_label_smoothing_spreads_a_share_over_all_classes() -> None:
    logits, labels = jnp.asarray([[2.0, 0.0, 1.0, -1.0]]), jnp.asarray([2])
    log_probabilities = jax.nn.log_softmax(logits)[0]
    expected = -(0.9 * log_probabilities[2] + 0.1 * jnp.mean(log_probabilities))
    np.testing.assert_allclose(cross_entropy(logits, labels, 0.1), expected, rtol=1e-6)


# --- recipes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epoch", "expected"),
    [(0, 0.001), (5, (0.001 + 6.4) / 2), (10, 6.4), (50, 6.4 / 4), (90, 0.0)],
    ids=["start", "middle of warm-up", "end of warm-up", "middle of decay", "end"],
)
def test_learning_rate_follows_the_published_recipe(epoch: int, expected: float) -> None:
    """Global batch 16,384 = 64 x 256, so the peak is 64 x 0.1."""
    schedule = learning_rate_schedule(AWS, global_batch=16_384, steps_per_epoch=78, epochs=90)
    assert float(schedule(78 * epoch)) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_learning_rate_without_warmup_starts_at_the_peak() -> None:
    schedule = learning_rate_schedule(replace(AWS, warmup_epochs=0), global_batch=256, steps_per_epoch=10, epochs=2)
    assert float(schedule(0)) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("name", "steps_per_epoch", "expected"),
    [
        # 64 x .1, from .001 over 10 epochs, then squared to 0 or 1e-5 over 80.
        ("resnet50-aws-mxnet", 78, {0: 0.001, 10: 6.4, 50: 1.6, 90: 0.0}),
        ("resnet50-aws-tf", 78, {0: 0.001, 10: 6.4, 50: 1e-5 + (6.4 - 1e-5) / 4, 90: 1e-5}),
        # .1 x 8192 / 256, from .1 over 5 epochs, a tenth from 30, 60 and 80 on.
        ("resnet50-goyal", 156, {0: 0.1, 5: 3.2, 29.9: 3.2, 30.1: 0.32, 60.1: 0.032, 80.1: 0.0032, 90: 0.0032}),
        # 8.5, from 0 over 5 epochs, then squared to 1e-4 at 41.
        ("resnet50-mlperf-lars", 625, {0: 0.0, 2.5: 4.25, 5: 8.5, 23: 1e-4 + (8.5 - 1e-4) / 4, 41: 1e-4}),
    ],
)
def test_presets_have_the_published_learning_rates(
    name: str, steps_per_epoch: int, expected: dict[float, float]
) -> None:
    preset = PRESETS[name]
    assert preset.steps_per_epoch == steps_per_epoch
    schedule = make_schedule(preset)
    actual = [float(schedule(int(epoch * steps_per_epoch))) for epoch in expected]
    assert actual == pytest.approx(list(expected.values()), rel=2e-3, abs=1e-6)


@pytest.mark.parametrize("name", ["resnet50-aws-mxnet", "resnet50-aws-tf", "resnet50-mlperf-lars"])
def test_presets_have_the_schedules_of_their_names(name: str) -> None:
    assert make_schedule(PRESETS[name]) == named_schedule(name, steps_per_epoch=PRESETS[name].steps_per_epoch)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("resnet50-aws-mxnet", ("sgd", True, 0.9, 1e-4, "float16", 16384, 90, 0.0)),
        ("resnet50-aws-tf", ("sgd", True, 0.9, 1e-4, "float16", 16384, 90, 0.0)),
        ("resnet50-goyal", ("sgd", True, 0.9, 1e-4, "float32", 8192, 90, 0.0)),
        ("resnet50-mlperf-lars", ("lars", False, 0.9, 2e-4, "bfloat16", 2048, 41, 0.1)),
    ],
)
def test_presets_have_the_published_hyperparameters(name: str, published: tuple[Any, ...]) -> None:
    preset, optimizer = PRESETS[name], PRESETS[name].optimizer
    recipe = (optimizer.algorithm, optimizer.nesterov, optimizer.momentum, optimizer.weight_decay)
    assert (*recipe, preset.model.dtype, preset.global_batch, preset.epochs, preset.label_smoothing) == published
    assert preset.model.architecture == "resnet50"
    photos = preset.photos
    assert (photos.smallest_area, photos.widest_aspect, photos.image_size, photos.resize) == (0.08, 4 / 3, 224, 256)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("name", ["resnet50-aws-mxnet", "resnet50-aws-tf", "resnet50-goyal", "resnet50-mlperf-lars"])
def test_updates_of_the_presets_against_a_transcription(name: str) -> None:
    """In NumPy, on a toy layer whose gradients come with the preset's loss scale; the bias does not decay."""
    rng = np.random.default_rng(0)
    layer = {"kernel": rng.normal(size=(3, 2)).astype(np.float32), "bias": rng.normal(size=2).astype(np.float32)}
    config = PRESETS[name].optimizer
    scale = 1.0 if config.loss_scaling == "none" else config.loss_scale
    rates = [0.1, 0.2, 0.05]
    optimizer = make_optimizer(config, lambda step: jnp.asarray(rates)[step])
    actual, state = layer, optimizer.init(layer)
    expected = dict(layer)
    velocity = {part: np.zeros_like(value) for part, value in layer.items()}

    for rate in rates:
        grads = {part: rng.normal(size=value.shape).astype(np.float32) for part, value in layer.items()}
        updates, state = optimizer.update({part: grad * scale for part, grad in grads.items()}, state, actual)
        actual = optax.apply_updates(actual, updates)
        for part, weight in expected.items():
            decay = config.weight_decay if part == "kernel" else 0.0
            grad = grads[part] + decay * weight
            if config.algorithm == "lars":
                norms = np.linalg.norm(weight), np.linalg.norm(grads[part])
                trust = 0.001 * norms[0] / (norms[1] + decay * norms[0]) if part == "kernel" else 1.0
                velocity[part] = 0.9 * velocity[part] + rate * trust * grad
                expected[part] = weight - velocity[part]
            else:
                velocity[part] = 0.9 * velocity[part] + grad
                expected[part] = weight - rate * (grad + 0.9 * velocity[part])

    for part in layer:
        np.testing.assert_allclose(actual[part], expected[part], rtol=1e-5)


def test_only_kernels_decay() -> None:
    mask = nnx.to_flat_state(weights_mask(nnx.state(abstract_resnet(TINY), nnx.Param)))
    assert {path[-1]: bool(jax.tree.leaves(value)[0]) for path, value in mask} == {
        "kernel": True,
        "bias": False,
        "scale": False,
    }


def test_preset_type_is_hashable() -> None:
    """Presets are values: equal ones are interchangeable, as static arguments of compiled programs need."""
    assert hash(PRESETS["mnist"]) == hash(replace(PRESETS["mnist"]))
    assert isinstance(PRESETS["mnist"], Preset)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16 with a loss scale"])
def test_train_step_learns_a_batch_by_heart(digits: tuple[Dataset, Dataset], half: bool) -> None:
    train, _ = digits
    smoke = PRESETS["mnist-smoke"]
    if half:
        smoke = replace(smoke, model=replace(smoke.model, dtype="float16"))
    faster = replace(
        smoke.optimizer, base_learning_rate=5.0, loss_scaling="dynamic" if half else "none"
    )  # linear scaling makes 20 images slow
    preset = replace(smoke, train_image_count=20, global_batch=20, epochs=30, optimizer=faster)
    graphdef, params, batch_stats = nnx.split(make_model(preset), nnx.Param, nnx.BatchStat)
    optimizer = make_optimizer(preset.optimizer, make_schedule(preset))
    state = TrainState(params, batch_stats, init_state(optimizer, params))
    train_step = plain_step(make_piece(graphdef, preset), optimizer)
    losses = []
    for _ in range(30):
        state, loss = train_step(state, normalize(train.images[:20]), train.labels[:20])
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
