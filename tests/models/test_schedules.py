"""Learning rates of large-batch training, against numbers that were worked out by hand."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxhetero.errors import ConfigError
from models.common import schedules


@pytest.mark.parametrize(
    ("rule", "base", "batch", "base_batch", "scaled"),
    [
        # Goyal et al. (2017), and the recipes for 64 workers of 256.
        (schedules.linear_scaling, 0.1, 8192, 256, 3.2),
        (schedules.linear_scaling, 0.1, 16384, 256, 6.4),
        (schedules.linear_scaling, 0.1, 64, 256, 0.025),
        # You et al. (2020), table 4: 5 / (2**k * 1000) for half powers k.
        (schedules.sqrt_scaling, 5e-3, 32768, 32768, 5e-3),
        (schedules.sqrt_scaling, 5e-3, 8192, 32768, 2.5e-3),
        (schedules.sqrt_scaling, 5e-3, 4096, 32768, 1.7677670e-3),
        (schedules.sqrt_scaling, 5e-3, 512, 32768, 6.25e-4),
    ],
)
def test_batch_scaling(rule: Any, base: float, batch: int, base_batch: int, scaled: float) -> None:
    assert rule(base, batch, base_batch) == pytest.approx(scaled, rel=1e-7)


# Step 0, in the warm-up, around its end, half of the decay, the end and after it. Worked out by hand, for example
# .006 * 2000 / 2000.9034, then .006 * sqrt(5037 / 7038).
VALUES = {
    "bert-large-phase1": {
        0: 0.0,
        1000: 0.0029986455,
        2000: 0.0059972910,
        2001: 0.0050758946,
        3519: 0.0042426407,
        7038: 0.0,
        9000: 0.0,
    },
    "bert-large-phase2": {0: 0.0, 100: 0.0019993602, 200: 0.0039987204, 201: 0.0037339548, 882: 0.0026403048, 1563: 0},
    "bert-base-aws-phase1": {0: 0.0, 1406: 0.0025, 2812: 0.005, 2813: 0.0049997911, 8438: 0.0036234019, 14064: 0.0003},
    "bert-base-aws-phase2": {0: 0.0, 100: 0.00064, 625: 0.004, 3500: 0.0028865808, 6248: 0.0003, 7000: 0.0003},
    "bert-mlperf-8k": {0: 0.00076342397, 210: 0.0028728849, 211: 0.0018690996, 405: 0.00093695225, 600: 0.0},
    # 79 steps per epoch.
    "resnet50-aws-mxnet": {0: 0.001, 395: 3.2005, 790: 6.4, 791: 6.3979748, 3950: 1.6, 7110: 0.0},
    "resnet50-aws-tf": {0: 0.001, 395: 3.2005, 790: 6.4, 3950: 1.6000075, 7110: 1e-5, 8000: 1e-5},
    # 626 steps per epoch.
    "resnet50-mlperf-lars": {0: 0.0, 1565: 4.25, 3130: 8.5, 14398: 2.125075, 25666: 1e-4},
}
STEPS_PER_EPOCH = {"resnet50-aws-mxnet": 79, "resnet50-aws-tf": 79, "resnet50-mlperf-lars": 626}


@pytest.mark.parametrize("name", schedules.SCHEDULE_NAMES)
def test_named_schedules(name: str) -> None:
    schedule = schedules.named_schedule(name, steps_per_epoch=STEPS_PER_EPOCH.get(name))
    steps = jnp.asarray(list(VALUES[name]), jnp.int32)
    np.testing.assert_allclose(jax.jit(schedule)(steps), list(VALUES[name].values()), rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize(("decay_from", "after"), [("warmup_end", 1.0), ("step_zero", 0.75)])
def test_where_the_decay_begins_to_count(decay_from: Any, after: float) -> None:
    schedule = schedules.WarmupPoly(1.0, 25, 100, 1.0, decay_from)
    assert [float(schedule(step)) for step in (24, 25, 100)] == pytest.approx([0.96, after, 0.0])


def test_a_schedule_without_warmup_starts_at_its_peak() -> None:
    assert float(schedules.WarmupPoly(2.0, 0, 10, 1.0, "warmup_end")(0)) == 2.0


def test_schedules_are_values() -> None:
    schedule = schedules.named_schedule("bert-mlperf-8k")
    assert schedule == schedules.named_schedule("bert-mlperf-8k")
    assert len({schedule, dataclasses.replace(schedule), dataclasses.replace(schedule, peak=1.0)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.peak = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.named_schedule("poly"), "no schedule 'poly'; there are bert-large-phase1, "),
        (lambda: schedules.named_schedule("resnet50-aws-tf"), "counts in epochs: give steps_per_epoch"),
        (lambda: schedules.named_schedule("bert-mlperf-8k", steps_per_epoch=9), "in steps: drop steps_per_epoch"),
        (lambda: schedules.WarmupPoly(1.0, 5, 5, 1.0, "step_zero"), "5 warmup_steps of 5 total_steps"),
        (lambda: schedules.WarmupPoly(1.0, 1, 5, 1.0, "nvidia"), "decay_from is 'nvidia'"),  # type: ignore[arg-type]
    ],
)
def test_what_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
