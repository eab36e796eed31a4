"""Named presets: every hyperparameter of a pre-training run, in one frozen and nested dataclass."""

from __future__ import annotations

from dataclasses import dataclass, replace

from models.bert.model import ModelConfig
from models.bert.optimizer import OptimizerConfig
from models.common.errors import require
from models.common.schedules import WarmupPoly, named_schedule, sqrt_scaling


@dataclass(frozen=True)
class Preset:
    """One pre-training run, or one of its phases."""

    model: ModelConfig
    optimizer: OptimizerConfig
    schedule: WarmupPoly
    """The learning rate, as a function of the step."""
    global_batch: int
    """Sequences per step over all workers; must be a multiple of the number of workers."""
    step_count: int
    """Updates of the parameters in the whole run."""
    sequence_length: int = 128
    """Tokens in a record, with padding."""
    prediction_count: int = 20
    """Masked positions in a record."""
    micro_batch: int = 0
    """Sequences in one forward and backward pass of a worker. Before the all-reduce a worker runs as many passes as its
    part of the global batch takes. 0: one pass. With one micro_batch, the loss curve is the same for any number of
    workers."""
    next_sentence_weight: float = 1.0
    """The weight of the next-sentence loss; the weight of the masked-token loss is 1. A sequence has only one
    next-sentence answer, so with few sequences per step the gradients of this loss are mostly noise: in bert-tiny 1.5
    to 1.9 times the noise of the masked-token loss."""
    checkpoint_every: int = 300
    """Steps between checkpoints."""
    evaluate_every: int = 1
    """Checkpoints between evaluations on the held-out records. There is always an evaluation after the last one."""
    seed: int = 0
    """The seed of the initial weights, of the order of the examples and of dropout."""

    def __post_init__(self) -> None:
        for name in ("global_batch", "step_count", "sequence_length", "prediction_count", "checkpoint_every"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be at least 1")
        require(self.evaluate_every >= 1, f"evaluate_every is {self.evaluate_every}; it must be at least 1")
        require(self.micro_batch >= 0, f"micro_batch is {self.micro_batch}; it must be at least 0")
        require(
            self.sequence_length <= self.model.position_count,
            f"sequence_length is {self.sequence_length}; the model has {self.model.position_count} positions "
            "(position_count)",
        )


LARGE = ModelConfig()
BASE = ModelConfig(hidden_size=768, layer_count=12, head_count=12, intermediate_size=3072)
TINY = ModelConfig(
    vocabulary_size=1024,
    hidden_size=128,
    layer_count=2,
    head_count=4,
    intermediate_size=256,
    position_count=128,
    dropout=0.0,
    attention_dropout=0.0,
    initial_std=0.08,
    position_init="sinusoid",
)

_NVIDIA = OptimizerConfig(loss_scaling="dynamic")


def _phase(schedule: str, model: ModelConfig, global_batch: int, micro_batch: int, **more: int) -> Preset:
    rate = named_schedule(schedule)
    return Preset(
        replace(model, dtype="float16"),
        _NVIDIA,
        rate,
        global_batch,
        step_count=int(rate.total_steps),
        micro_batch=micro_batch,
        **more,
    )


def lamb_scaling(global_batch: int) -> Preset:
    """Table 4 of You et al. (2020): the same epochs at any batch from 512 to 32,768 sequences.

    The learning rate grows with the square root of the batch, and the share of warm-up steps with the batch.
    """
    step_count = 1_000_000 * 512 // global_batch
    warmup_steps = step_count * global_batch / 512 / 320
    peak = sqrt_scaling(5e-3, global_batch, 32768)
    schedule = WarmupPoly(peak, warmup_steps, step_count, 1.0, "step_zero")
    return Preset(LARGE, OptimizerConfig(), schedule, global_batch, step_count, micro_batch=32)


_LONG = {"sequence_length": 512, "prediction_count": 80}
_BASE_AWS = _phase("bert-base-aws-phase1", BASE, 32768, 64)
_MLPERF = _phase("bert-mlperf-8k", LARGE, 8192, 16, sequence_length=512, prediction_count=76)

# For tests: bert-tiny in seconds.
SMOKE = Preset(
    replace(
        TINY,
        vocabulary_size=500,
        hidden_size=32,
        layer_count=1,
        intermediate_size=64,
        dropout=0.1,
        attention_dropout=0.1,
    ),
    OptimizerConfig(),
    WarmupPoly(5e-2, 2, 12, 1.0, "warmup_end"),
    global_batch=16,
    step_count=12,
    sequence_length=32,
    prediction_count=5,
    micro_batch=4,
    checkpoint_every=6,
)

PRESETS: dict[str, Preset] = {
    "bert-large-phase1": _phase("bert-large-phase1", LARGE, 65536, 64),
    "bert-large-phase2": _phase("bert-large-phase2", LARGE, 32768, 8, **_LONG),
    "bert-base-aws": _BASE_AWS,
    "bert-base-aws-phase2": _phase("bert-base-aws-phase2", BASE, 8192, 8, **_LONG),
    "bert-mlperf-8k": replace(_MLPERF, optimizer=replace(_NVIDIA, b1=0.88, b2=0.88, weight_decay=0.0166629)),
    "bert-lamb-scaling": lamb_scaling(32768),
    **{f"bert-lamb-scaling-{batch}": lamb_scaling(batch) for batch in (512, 1024, 2048, 4096, 8192, 16384)},
    # For the State of the Union speeches on two cores. In a step of 32 sequences the gradient of the attention layers
    # is a tenth of its noise, so the training needs many sequences.
    "bert-tiny": Preset(
        TINY,
        OptimizerConfig(algorithm="adam", b2=0.98),
        WarmupPoly(2e-3, 200, 8000, 1.0, "warmup_end"),
        global_batch=64,
        step_count=8000,
        sequence_length=64,
        prediction_count=20,
        next_sentence_weight=0.1,
        checkpoint_every=500,
    ),
    "bert-smoke": SMOKE,
}

DEFAULT_PRESET = "bert-tiny"
