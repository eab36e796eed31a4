"""BERT's recipes against their definitions, and its settings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxhetero
from models.bert import __main__ as command
from models.bert.model import PreTrainingModel
from models.bert.optimizer import make_optimizer
from models.bert.presets import PRESETS
from models.common.batches import BatchSplit
from models.common.command import run_command
from models.common.optimizer import weights_mask
from models.common.schedules import named_schedule

SMOKE = PRESETS["bert-smoke"]


@pytest.fixture
def world_of_one() -> Iterator[None]:
    jaxhetero.initialize()
    yield
    jaxhetero.shutdown()


@pytest.mark.parametrize(
    ("name", "schedule", "published"),
    [
        ("bert-large-phase1", "bert-large-phase1", (65536, 7038, 128, 20, 0.01, 0.9, 0.999)),
        ("bert-large-phase2", "bert-large-phase2", (32768, 1563, 512, 80, 0.01, 0.9, 0.999)),
        ("bert-base-aws", "bert-base-aws-phase1", (32768, 14064, 128, 20, 0.01, 0.9, 0.999)),
        ("bert-base-aws-phase2", "bert-base-aws-phase2", (8192, 6248, 512, 80, 0.01, 0.9, 0.999)),
        ("bert-mlperf-8k", "bert-mlperf-8k", (8192, 600, 512, 76, 0.0166629, 0.88, 0.88)),
    ],
)
def test_presets_have_the_published_hyperparameters(name: str, schedule: str, published: tuple[Any, ...]) -> None:
    preset, optimizer = PRESETS[name], PRESETS[name].optimizer
    sizes = (preset.global_batch, preset.step_count, preset.sequence_length, preset.prediction_count)
    assert (*sizes, optimizer.weight_decay, optimizer.b1, optimizer.b2) == published
    assert (optimizer.algorithm, optimizer.epsilon, optimizer.max_grad_norm) == ("lamb", 1e-6, 1.0)
    assert preset.schedule == named_schedule(schedule)
    assert preset.model.hidden_size == (768 if "base" in name else 1024)


@pytest.mark.parametrize(
    ("name", "peak", "warmup_share"),
    [
        ("bert-lamb-scaling-512", 6.25e-4, 1 / 320),
        ("bert-lamb-scaling-4096", 1.77e-3, 1 / 40),
        ("bert-lamb-scaling-8192", 2.5e-3, 1 / 20),
        ("bert-lamb-scaling", 5e-3, 1 / 5),
    ],
)
def test_lamb_scaling_has_the_published_table(name: str, peak: float, warmup_share: float) -> None:
    preset = PRESETS[name]
    schedule = preset.schedule
    assert schedule.peak == pytest.approx(peak, rel=2e-3)
    assert schedule.warmup_steps / schedule.total_steps == pytest.approx(warmup_share)
    assert preset.step_count * preset.global_batch == 512_000_000
    values = [float(schedule(step)) for step in (0, preset.step_count // 2, preset.step_count)]
    assert values == pytest.approx([0.0, schedule.peak / 2, 0.0], rel=1e-3, abs=1e-9)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("name", ["bert-large-phase1", "bert-base-aws", "bert-mlperf-8k", "bert-lamb-scaling"])
def test_updates_of_the_presets_against_a_transcription(name: str) -> None:
    """The reference LAMB in NumPy, gradients times the loss scale: no decay and no trust ratio for the bias."""
    rng = np.random.default_rng(0)
    layer = {"kernel": rng.normal(size=(3, 2)).astype(np.float32), "bias": rng.normal(size=2).astype(np.float32)}
    config = PRESETS[name].optimizer
    scale = config.loss_scale if config.loss_scaling != "none" else 1.0
    rates = [0.1, 0.2, 0.05]
    optimizer = make_optimizer(config, lambda step: jnp.asarray(rates)[step])
    actual, state = layer, optimizer.init(layer)
    expected = dict(layer)
    first = {part: np.zeros_like(value) for part, value in layer.items()}
    second = {part: np.zeros_like(value) for part, value in layer.items()}

    for step, rate in enumerate(rates, start=1):
        grads = {part: rng.normal(size=value.shape).astype(np.float32) for part, value in layer.items()}
        updates, state = optimizer.update({part: grad * scale for part, grad in grads.items()}, state, actual)
        actual = optax.apply_updates(actual, updates)
        norm = np.sqrt(sum(np.sum(grad**2) for grad in grads.values()))
        for part, weight in expected.items():
            grad = grads[part] / max(norm, 1.0)
            first[part] = config.b1 * first[part] + (1 - config.b1) * grad
            second[part] = config.b2 * second[part] + (1 - config.b2) * grad**2
            mean, variance = first[part] / (1 - config.b1**step), second[part] / (1 - config.b2**step)
            update = mean / (np.sqrt(variance) + 1e-6)
            if part == "kernel":
                update = update + config.weight_decay * weight
                update = update * np.linalg.norm(weight) / np.linalg.norm(update)
            expected[part] = weight - rate * update

    for part in layer:
        np.testing.assert_allclose(actual[part], expected[part], rtol=2e-5)


def test_biases_and_norms_are_not_adapted() -> None:
    """Whatever their shape; the tied decoder's matrix is an embedding, its bias is a bias."""
    model = nnx.eval_shape(lambda: PreTrainingModel(SMOKE.model, rngs=nnx.Rngs(0)))
    mask = nnx.to_flat_state(weights_mask(nnx.state(model, nnx.Param)))
    assert {path[-1]: bool(jax.tree.leaves(value)[0]) for path, value in mask} == {
        "kernel": True,
        "embedding": True,
        "bias": False,
        "scale": False,
        "decoder_bias": False,
    }


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_runs_on_four_workers(name: str) -> None:
    preset = PRESETS[name]
    split = BatchSplit.make(preset.global_batch, preset.micro_batch, rank=3, worker_count=4)
    assert 4 * split.micro_batch * split.accumulate_every == preset.global_batch


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "nope"], "there is no preset 'nope'; there are bert-base-aws, "),
        (["--data", "/nowhere"], "there is no folder /nowhere"),
        ([], "--data is missing"),
        (["--sequence-length", "1000"], "sequence_length is 1000; the model has 128 positions"),
        (["--head-count", "3"], "head_count is 3; it must divide hidden_size (128)"),
    ],
)
def test_bad_settings_are_named(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["models.bert", *arguments])
    assert run_command(command.run) in (1, 2)
    jaxhetero.shutdown()
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_dry_run_shows_the_figures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["models.bert", "--preset", "bert-large-phase1", "--dry-run"])
    assert run_command(command.run) == 0
    shown = capsys.readouterr().out
    # The published network, in buckets of at most 25 MB but for the embedding of 125 MB.
    for figure in ("336,226,108 in 398 arrays", "1,344,904,432 bytes", "1024 x 64", "125,018,112 bytes"):
        assert figure in shown
