"""The ResNet trainer: its network, recipe and data against their definitions, and whole runs through the launcher."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

import jaxhetero
from jaxhetero.optimizers import named_schedule
from models.common.batches import BatchPlan
from models.common.command import finish
from models.common.errors import SettingsError
from models.common.optimizer import init_state, weights_mask
from models.common.progress import TrainProgress
from models.common.report import Result
from models.resnet import __main__ as command
from models.resnet.arrays import (
    Dataset,
    held_out_batches,
    load_mnist_5k,
    normalize,
    stratified_split,
    train_batches,
)
from models.resnet.data import ArrayData
from models.resnet.model import BasicBlock, BottleneckBlock, ModelConfig, ResNet
from models.resnet.optimizer import OptimizerConfig, learning_rate_schedule, make_optimizer
from models.resnet.presets import PRESETS, Preset
from models.resnet.train import (
    TrainState,
    cross_entropy,
    evaluate,
    make_count_correct,
    make_model,
    make_schedule,
    make_train_step,
)

REPOSITORY = Path(__file__).parents[1]
RUN_TIMEOUT_S = 300

# Largest relative difference of two loss curves that differ only in how the global batch is shared out. The sums of
# float32 gradients then group differently; the steps feed that back, so it grows slowly from 1e-7.
LOSS_CURVE_TOLERANCE = 1e-3

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


def plan_of(global_batch: int, *, rank: int = 0, worker_count: int = 1, micro_batch: int = 0) -> BatchPlan:
    return BatchPlan.make(global_batch, micro_batch, rank=rank, worker_count=worker_count)


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
    scores = evaluate(count_correct, state, data, plan_of(50))
    assert scores == evaluate(count_correct, state, data, plan_of(33))

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


# --- recipe ----------------------------------------------------------------------------------------------------------


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


# --- data ------------------------------------------------------------------------------------------------------------


def test_split_is_stratified_disjoint_and_always_the_same(digits: tuple[Dataset, Dataset]) -> None:
    train, held_out = digits
    np.testing.assert_array_equal(np.bincount(train.labels), [400] * 10)
    np.testing.assert_array_equal(np.bincount(held_out.labels), [100] * 10)
    np.testing.assert_array_equal(np.bincount(train.labels[:50]), [5] * 10)
    both = np.concatenate([train.images, held_out.images]).reshape(5000, -1)
    assert len(np.unique(both, axis=0)) == 5000

    shuffled = np.random.default_rng(0).permutation(train.labels)
    train_index, held_out_index = stratified_split(shuffled)
    assert sorted([*train_index, *held_out_index]) == list(range(len(shuffled)))
    np.testing.assert_array_equal(np.bincount(shuffled[held_out_index]), [80] * 10)


def numbered_images(count: int) -> Dataset:
    """Images that carry their own number, so that a test can tell them apart."""
    numbers = np.arange(count, dtype=np.int32)
    images = np.zeros((count, 4, 4, 1), np.uint8)
    images[:, 1, 1, 0] = 255
    return Dataset(images, numbers)


def batches_of(dataset: Dataset, rank: int, worker_count: int, **changes: Any) -> list[tuple[Any, Any]]:
    settings: dict[str, Any] = {"seed": 3, "epoch": 0, "max_shift": 1, **changes}
    return list(train_batches(dataset, plan_of(20, rank=rank, worker_count=worker_count), **settings))


@pytest.mark.parametrize("worker_count", [1, 2, 4, 5])
def test_epoch_is_shared_out_without_repeats(worker_count: int) -> None:
    dataset = numbered_images(100)
    shares = [batches_of(dataset, rank, worker_count) for rank in range(worker_count)]
    assert {len(share) for share in shares} == {5}
    assert {len(labels) for share in shares for _, labels in share} == {20 // worker_count}
    seen = [label for share in shares for _, labels in share for label in labels]
    assert sorted(seen) == list(range(100))


@pytest.mark.parametrize("worker_count", [2, 4, 5])
def test_global_batches_do_not_depend_on_the_worker_count(worker_count: int) -> None:
    dataset = numbered_images(103)  # three images are left over
    alone = batches_of(dataset, 0, 1)
    shares = [batches_of(dataset, rank, worker_count) for rank in range(worker_count)]
    for step, (images, labels) in enumerate(alone):
        np.testing.assert_array_equal(np.concatenate([share[step][0] for share in shares]), images)
        np.testing.assert_array_equal(np.concatenate([share[step][1] for share in shares]), labels)


def test_order_changes_with_epoch_and_seed_only() -> None:
    dataset = numbered_images(100)

    def order(**changes: Any) -> list[int]:
        return [label for _, labels in batches_of(dataset, 0, 1, **changes) for label in labels]

    assert order() == order()
    assert order() != order(epoch=1)
    assert order() != order(seed=4)


def test_shift_moves_an_image_and_fills_with_background() -> None:
    dataset = numbered_images(100)
    places = set()
    for images, _ in batches_of(dataset, 0, 1, max_shift=1):
        for image in images:
            ((row, column),) = np.argwhere(image[..., 0] > 0)
            places.add((int(row), int(column)))
    assert places == {(row, column) for row in range(3) for column in range(3)}

    ((images, labels), *_) = batches_of(dataset, 0, 1, max_shift=0)
    np.testing.assert_array_equal(images, normalize(dataset.images[labels]))


@pytest.mark.parametrize("worker_count", [1, 3, 4])
@pytest.mark.parametrize("batch", [7, 64])
def test_evaluation_sees_every_held_out_image_once(worker_count: int, batch: int) -> None:
    dataset = numbered_images(100)
    seen: list[int] = []
    for rank in range(worker_count):
        for images, labels, is_real in held_out_batches(dataset, batch=batch, rank=rank, worker_count=worker_count):
            assert len(images) == len(labels) == len(is_real) == batch
            seen += labels[is_real].tolist()
    assert sorted(seen) == list(range(100))


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_runs_on_four_workers(name: str) -> None:
    preset = PRESETS[name]
    plan = plan_of(preset.global_batch, worker_count=4, micro_batch=preset.micro_batch)
    assert 4 * plan.micro_batch * plan.accumulate_every == preset.global_batch


def test_overrides_start_from_the_named_preset() -> None:
    options = command.parse_options(["--preset", "mnist-smoke", "--global-batch", "40", "--norm", "group"])
    smoke = PRESETS["mnist-smoke"]
    assert options.settings == replace(smoke, global_batch=40, model=replace(smoke.model, norm="group"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "nope"], "there is no preset 'nope'; there are cifar10, fashion-mnist, mnist, mnist-smoke"),
        (["--epochs", "0"], "epochs is 0; it must be at least 1"),
        (["--max-shift", "-1"], "max_shift is -1"),
        (["--warmup-epochs", "20"], "warmup_epochs is 20.0; it must be at least 0 and below epochs (20)"),
        (["--train-image-count", "50"], "train_image_count is 50; it must be at least the global batch (100)"),
        (["--train-image-count", "4001"], "there are 4000 training images; train_image_count is 4001"),
        (["--class-count", "9"], "the labels are 0 to 9; class_count is 9, so they must be 0 to 8"),
        (["--preset", "cifar10"], "--data is missing: the folder with the images of the dataset cifar10"),
        (["--preset", "cifar10", "--data", "/nowhere"], "there is no folder /nowhere"),
        (["--preset", "fashion-mnist", "--data", "/"], "there is no file train-images-idx3-ubyte or"),
        (["--resume", "latest"], "--resume needs --output"),
        (["--micro-batch", "3"], "micro_batch is 3; it must divide the 100 examples of a worker"),
        (["--norm", "group", "--group-count", "5"], "group_count is 5; it must divide the 16 channels"),
        (["--json", "/nowhere/result.json"], "cannot write /nowhere/result.json: there is no folder /nowhere"),
    ],
)
def test_bad_settings_are_named(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["models.resnet", *arguments])
    assert command.main() in (1, 2)
    jaxhetero.shutdown()
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_batch_that_workers_cannot_share_equally_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"global_batch 100 cannot be shared equally by 3 workers; .* is 102"):
        plan_of(100, worker_count=3)


# --- steps, reports --------------------------------------------------------------------------------------------------


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
    train_step = make_train_step(graphdef, optimizer, preset)
    losses = []
    for _ in range(30):
        state, loss = train_step(state, normalize(train.images[:20]), train.labels[:20])
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}


@pytest.mark.parametrize(("visible", "interval_s", "line_count"), [(True, 0, 4), (True, 1e9, 1), (False, 0, 0)])
def test_progress_in_a_pipe_is_a_few_plain_lines(
    visible: bool, interval_s: float, line_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.common.progress.LINE_INTERVAL_S", interval_s)
    output = io.StringIO()
    progress = TrainProgress(Console(file=output), unit="images", step_count=4, global_batch=10, visible=visible)
    with progress:
        for epoch in range(2):
            progress.start_part(f"epoch {epoch + 1}/2")
            for _ in range(2):
                progress.update(0.5, 0.01, 1.25)
    lines = output.getvalue().splitlines()
    assert len(lines) == line_count
    if lines:
        assert lines[-1].startswith("epoch 2/2 [####################] step 4/4 loss 0.500 lr 0.01 ")
        assert lines[-1].endswith(" images/s all-reduce 1.2 ms/step")


def result_of(**changes: Any) -> Result:
    fields: dict[str, Any] = {
        "worker_count": 4,
        "parameter_count": 100,
        "gradient_bytes": 400,
        "first_step": 0,
        "step_count": 10,
        "is_complete": True,
        "train_seconds": 2.0,
        "examples_per_second": 500.0,
        "all_reduce_ms_per_step": 1.25,
        "sent_bytes_per_step": 404.0,
        "differing_worker_count": 0,
        "losses": [1.0],
        "evaluations": [{"step": 10, "test_accuracy": 0.981, "test_correct_count": 981, "test_image_count": 1000}],
    }
    return Result(**(fields | changes))


def table_text(result: Result) -> str:
    console = Console(file=io.StringIO(), record=True, width=100)
    console.print(result.to_table("ResNet", "images"))
    return console.export_text()


def test_table_shows_what_was_measured() -> None:
    text = table_text(result_of())
    for shown in ("98.10%", "981", "500 images/s", "1.25 ms", "1.010x", "identical on 4 workers"):
        assert shown in text
    assert "DIFFERENT on 1 of 4 workers" in table_text(result_of(differing_worker_count=1))


def test_table_of_one_worker_claims_no_measurement() -> None:
    text = table_text(result_of(worker_count=1, all_reduce_ms_per_step=None, sent_bytes_per_step=None))
    assert text.count("n/a") == 4


@pytest.mark.parametrize(
    ("changes", "exit_code"), [({}, 0), ({"differing_worker_count": 2}, 1), ({"is_complete": False}, 130)]
)
@pytest.mark.usefixtures("world_of_one")
def test_exit_code_and_json_say_how_it_went(changes: dict[str, Any], exit_code: int, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    options = command.parse_options(["--json", str(path)])
    outcome = finish(
        result_of(**changes),
        options.run,
        Console(file=io.StringIO()),
        "ResNet",
        "images",
        preset=options.preset,
        settings=options.settings,
    )
    assert outcome == exit_code
    written = json.loads(path.read_text())
    assert written["preset"] == "mnist"
    assert written["settings"]["model"]["architecture"] == "tiny"
    assert written["sent_bytes_ratio"] == pytest.approx(1.01)


# --- whole runs ------------------------------------------------------------------------------------------------------


def run_trainer(path: Path, *arguments: str, workers: int = 1, reducers: int = 0) -> tuple[dict[str, Any], str]:
    """The result and the output of one run, through the launcher when it has several workers."""
    program = [sys.executable, "-m", "models.resnet", "--json", str(path), *arguments]
    if workers > 1:
        counts = ["--workers", str(workers), "--reducers", str(reducers)]
        logs = ["--log-dir", str(path.with_suffix(".logs"))]
        program = [sys.executable, "-m", "jaxhetero", "launch", *counts, *logs, "--", *program]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("JAXHETERO_")}
    outcome = subprocess.run(
        program,
        cwd=REPOSITORY,
        env={**inherited, "PYTHONWARNINGS": "error"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stdout
    return json.loads(path.read_text()), outcome.stdout


@pytest.fixture(scope="module")
def group_norm_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[dict[str, Any], str]]:
    """The same preset on one worker and on four, with a network that looks at one image at a time."""
    folder = tmp_path_factory.mktemp("runs")
    arguments = ("--preset", "mnist-smoke", "--norm", "group")
    return {
        1: run_trainer(folder / "one.json", *arguments),
        4: run_trainer(folder / "four.json", *arguments, workers=4, reducers=2),
    }


@pytest.mark.timeout(2 * RUN_TIMEOUT_S)  # the fixture's two runs count
def test_four_workers_train_like_one(group_norm_runs: dict[int, tuple[dict[str, Any], str]]) -> None:
    """Four workers of 25 images and one worker of 100 follow one loss curve."""
    (one, _), (four, _) = group_norm_runs[1], group_norm_runs[4]
    assert (one["worker_count"], four["worker_count"]) == (1, 4)
    assert len(one["losses"]) == one["step_count"] == 24
    assert np.mean(one["losses"][-8:]) < 0.95 * np.mean(one["losses"][:8])
    np.testing.assert_allclose(four["losses"], one["losses"], rtol=LOSS_CURVE_TOLERANCE)
    counts = [run["evaluations"][-1]["test_correct_count"] for run in (one, four)]
    assert abs(counts[0] - counts[1]) <= 5


def test_run_on_four_workers_reports_what_the_transport_measured(
    group_norm_runs: dict[int, tuple[dict[str, Any], str]],
) -> None:
    result, output = group_norm_runs[4]
    assert result["gradient_bytes"] == 4 * result["parameter_count"]
    assert 1.0 <= result["sent_bytes_ratio"] < 1.05
    assert result["all_reduce_ms_per_step"] > 0
    assert result["examples_per_second"] > 0
    assert result["evaluations"][-1]["test_image_count"] == 1000
    assert f"{result['evaluations'][-1]['test_accuracy']:.2%}" in output
    assert f"{result['sent_bytes_ratio']:.3f}x" in output
    assert "epoch 3/3 [####################] step 24/24 loss" in output
    assert "identical on 4 workers" in output
    assert output.count("step 24/24") == 1, "only rank 0 reports"


def test_run_alone_needs_no_launcher(group_norm_runs: dict[int, tuple[dict[str, Any], str]]) -> None:
    result, output = group_norm_runs[1]
    assert result["sent_bytes_ratio"] is None
    assert result["all_reduce_ms_per_step"] is None
    assert output.count("n/a") == 4


@pytest.mark.timeout(RUN_TIMEOUT_S)
def test_batch_normalisation_and_reducers_inside_the_workers(tmp_path: Path) -> None:
    """The preset as it is, on two workers that reduce for each other."""
    result, output = run_trainer(tmp_path / "two.json", "--preset", "mnist-smoke", workers=2)
    assert result["differing_worker_count"] == 0
    assert "identical on 2 workers" in output
    assert np.mean(result["losses"][-8:]) < 0.95 * np.mean(result["losses"][:8])
    assert len(result["evaluations"]) == 3


@pytest.mark.timeout(RUN_TIMEOUT_S)
def test_ctrl_c_on_a_job_saves_a_checkpoint_that_goes_on(tmp_path: Path) -> None:
    """The launcher passes the signal on; both workers stop after the same step."""
    output, log = tmp_path / "run", tmp_path / "output.txt"
    program = [sys.executable, "-m", "models.resnet", "--preset", "mnist-smoke", "--output", str(output)]
    launch = [sys.executable, "-m", "jaxhetero", "launch", "--workers", "2", "--log-dir", str(tmp_path / "logs"), "--"]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("JAXHETERO_")}
    environment = {**inherited, "PYTHONWARNINGS": "error"}
    with log.open("w") as file:
        job = subprocess.Popen(
            [*launch, *program, "--epochs", "1000"], cwd=REPOSITORY, env=environment, stdout=file, stderr=file
        )
    try:
        while not (output / "checkpoints" / "16").is_dir():
            assert job.poll() is None, log.read_text()
            time.sleep(0.05)
        job.send_signal(signal.SIGINT)
        assert job.wait(RUN_TIMEOUT_S) == 130, log.read_text()
    finally:
        job.kill()
        job.wait()
    result = json.loads((output / "result.json").read_text())
    last = len(result["losses"])
    assert not result["is_complete"]
    assert result["differing_worker_count"] == 0
    assert (output / "checkpoints" / str(last)).is_dir()
    assert f"stopped after step {last} of 8000; its checkpoint is saved" in log.read_text()


def test_preset_type_is_hashable() -> None:
    """Presets are values: equal ones are interchangeable, as static arguments of compiled programs need."""
    assert hash(PRESETS["mnist"]) == hash(replace(PRESETS["mnist"]))
    assert isinstance(PRESETS["mnist"], Preset)


@pytest.mark.timeout(RUN_TIMEOUT_S)
def test_gradients_in_half_the_bytes(tmp_path: Path) -> None:
    arguments = ("--preset", "mnist-smoke", "--wire-dtype", "bfloat16", "--error-feedback")
    result, _ = run_trainer(tmp_path / "half.json", *arguments, workers=2)
    assert result["differing_worker_count"] == 0
    assert 0.5 <= result["sent_bytes_ratio"] < 0.53
    assert np.mean(result["losses"][-8:]) < 0.95 * np.mean(result["losses"][:8])
