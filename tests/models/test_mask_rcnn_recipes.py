"""Mask R-CNN's recipes against their published numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models.common.batches import BatchSplit
from models.common.errors import SettingsError
from models.mask_rcnn.optimizer import OptimizerConfig, Schedule, make_optimizer
from models.mask_rcnn.presets import PRESETS, ImageConfig

STAIRS = Schedule(0.02, 500, 0.02 / 3, step_count=900, drop_steps=(600, 800))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_runs_on_four_workers(name: str) -> None:
    preset = PRESETS[name]
    split = BatchSplit.make(preset.global_batch, preset.micro_batch, rank=0, worker_count=4)
    assert 4 * split.micro_batch * split.accumulate_every == preset.global_batch


@pytest.mark.parametrize(
    ("name", "step_count", "expected"),
    [
        # Detectron: .02 for 16 images, from a third of it in 500 steps, a tenth from 60,000 and 80,000 on.
        ("detectron-1x", 90_000, {0: 0.02 / 3, 250: 0.04 / 3, 500: 0.02, 59_999: 0.02, 60_000: 2e-3, 80_000: 2e-4}),
        ("mlperf-48", 36_000, {0: 0.0, 625: 0.06, 23_999: 0.06, 24_000: 6e-3, 32_000: 6e-4}),
        ("mlperf-96", 18_000, {0: 0.0, 625: 0.12, 11_999: 0.12, 12_000: 0.012, 16_000: 1.2e-3}),
        ("mlperf-128", 13_500, {125: 0.032, 625: 0.16, 9_000: 0.016, 12_000: 1.6e-3}),
        ("mlperf-256", 8_437, {900: 0.12, 1800: 0.24, 5_624: 0.24, 5_625: 0.024, 7_500: 2.4e-3}),
        # Epochs of 937 steps: a tenth after 9, a hundredth after 12, the end after 13.
        ("aws-tf-128", 12_181, {0: 0.0033, 500: 0.08165, 1000: 0.16, 8_432: 0.16, 8_433: 0.016, 11_244: 1.6e-3}),
        # .028 from a hundredth of it, then half a cosine to a thousandth.
        ("sagemaker-192", 9_000, {0: 2.8e-4, 625: 0.028, (625 + 9000) // 2: 0.014014, 9_000: 2.8e-5}),
        ("tpu-64", 22_500, {0: 0.0067, 250: 0.04335, 500: 0.08, 15_000: 8e-3, 20_000: 8e-4}),
    ],
)
def test_presets_have_the_published_learning_rates(name: str, step_count: int, expected: dict[int, float]) -> None:
    preset = PRESETS[name]
    assert preset.step_count == step_count
    for step, rate in expected.items():
        assert float(preset.schedule(step)) == pytest.approx(rate, rel=1e-3, abs=1e-9), step


def test_rates_grow_linearly_with_the_batch_except_with_the_largest() -> None:
    for name in ("detectron-1x", "mlperf-48", "mlperf-96", "mlperf-128", "aws-tf-128", "tpu-64"):
        preset = PRESETS[name]
        assert preset.schedule.peak == pytest.approx(0.00125 * preset.global_batch)
    assert PRESETS["mlperf-256"].schedule.peak == 0.24


def test_schedule_without_warmup_starts_at_the_peak() -> None:
    assert float(replace(STAIRS, warmup_steps=0)(0)) == pytest.approx(0.02)


def test_schedule_is_a_function_of_arrays_too() -> None:
    steps = np.array([0, 250, 600, 800])
    np.testing.assert_allclose(STAIRS(steps), [0.02 / 3, 0.04 / 3, 2e-3, 2e-4], rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(STAIRS, warmup_steps=901), r"warmup_steps is 901; it must be 0 to step_count \(900\)"),
        (lambda: replace(STAIRS, step_count=0), "step_count is 0; it must be at least 1"),
        (
            lambda: replace(PRESETS["detectron-1x"], images=ImageConfig(size=1376)),
            "size is 1376; it must be a multiple of 64, the coarsest stride of the network",
        ),
        (lambda: ImageConfig(size=1280), "long_side is 1333; it must be at most size, which is 1280"),
        (lambda: ImageConfig(short_sides=(800, 640)), "short_sides are 800 640; they must be in ascending order"),
        (lambda: ImageConfig(object_count=0), "object_count is 0; it must be at least 1"),
        (lambda: replace(PRESETS["nuclei"], evaluate_every=0), "evaluate_every is 0; it must be at least 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make()


# --- updates ---------------------------------------------------------------------------------------------------------

Tree = dict[str, Any]


def steps_of(config: OptimizerConfig, rate: float, params: Tree, gradients: list[Tree]) -> list[Tree]:
    """The parameters after each update."""
    optimizer = make_optimizer(config, lambda step: rate)
    state, seen = optimizer.init(params), []
    for gradient in gradients:
        updates, state = jax.jit(optimizer.update)(gradient, state, params)
        params = optax.apply_updates(params, updates)
        seen.append(params)
    return seen


def random_tree(seed: int) -> Tree:
    rng = np.random.default_rng(seed)
    return {"head": {"kernel": jnp.float32(rng.normal(size=(3, 4))), "bias": jnp.float32(rng.normal(size=4))}}


def as_float64(tree: Tree) -> Tree:
    return {name: np.asarray(leaf, np.float64) for name, leaf in tree["head"].items()}


def assert_equal(actual: Tree, expected: Tree) -> None:
    for name, leaf in expected.items():
        np.testing.assert_allclose(actual["head"][name], leaf, rtol=2e-6, atol=1e-7, err_msg=name)


@pytest.mark.usefixtures("alone")
def test_sgd_is_that_of_detectron() -> None:
    """Weights decay, biases do not and have twice the learning rate. Momentum is over decay and gradient."""
    config = PRESETS["detectron-1x"].optimizer
    assert (config.momentum, config.weight_decay, config.bias_rate) == (0.9, 1e-4, 2.0)
    params, gradients = random_tree(0), [random_tree(seed) for seed in (1, 2, 3)]
    expected = as_float64(params)
    momentum = {name: np.zeros_like(leaf) for name, leaf in expected.items()}
    for found, gradient in zip(steps_of(config, 0.02, params, gradients), map(as_float64, gradients), strict=True):
        total = {"kernel": gradient["kernel"] + 1e-4 * expected["kernel"], "bias": 2 * gradient["bias"]}
        momentum = {name: 0.9 * momentum[name] + total[name] for name in total}
        expected = {name: expected[name] - 0.02 * momentum[name] for name in total}
        assert_equal(found, expected)


@pytest.mark.usefixtures("alone")
def test_novograd_is_that_of_the_paper() -> None:
    """One second moment for each layer, which starts as the first gradient's norm; weight decay inside the momentum."""
    config = PRESETS["sagemaker-192"].optimizer
    assert (config.momentum, config.b2, config.weight_decay) == (0.9, 0.3, 1e-3)
    config = replace(config, loss_scaling="none")
    params, gradients = random_tree(0), [random_tree(seed) for seed in (1, 2, 3)]
    expected, moment = as_float64(params), {}
    momentum = {name: np.zeros_like(leaf) for name, leaf in expected.items()}
    for found, gradient in zip(steps_of(config, 0.028, params, gradients), map(as_float64, gradients), strict=True):
        for name, leaf in gradient.items():
            square = np.sum(leaf**2)
            moment[name] = 0.3 * moment[name] + 0.7 * square if name in moment else square
            decay = 1e-3 * expected[name] if name == "kernel" else 0
            momentum[name] = 0.9 * momentum[name] + leaf / (np.sqrt(moment[name]) + config.epsilon) + decay
            expected[name] = expected[name] - 0.028 * momentum[name]
        assert_equal(found, expected)


@pytest.mark.usefixtures("alone")
def test_large_gradients_are_clipped_over_all_layers() -> None:
    config = PRESETS["aws-tf-128"].optimizer
    assert (config.max_grad_norm, config.bias_rate) == (1.5, 1.0)
    config = replace(config, loss_scaling="none", weight_decay=0.0)
    params, gradient = random_tree(0), random_tree(1)
    norm = np.sqrt(sum(np.sum(leaf**2) for leaf in as_float64(gradient).values()))
    assert norm > 1.5
    (found,) = steps_of(config, 1.0, params, [gradient])
    before, move = as_float64(params), as_float64(gradient)
    assert_equal(found, {name: before[name] - 1.5 / norm * move[name] for name in before})
