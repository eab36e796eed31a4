"""Named presets: every hyperparameter of a run, in one frozen and nested dataclass."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from models.resnet.data import TRAIN_IMAGE_COUNT
from models.resnet.model import ARCHITECTURES, ModelConfig
from models.resnet.optimizer import OptimizerConfig


class SettingsError(ValueError):
    """A setting that cannot work. The message says which, why, and what would."""


@dataclass(frozen=True)
class Preset:
    """One training run."""

    model: ModelConfig
    optimizer: OptimizerConfig
    global_batch: int
    """Images per step over all workers; must be a multiple of the number of workers."""
    epochs: int
    max_shift: int
    """Augmentation: each image moves by up to this many pixels, each epoch anew. 0 turns it off."""
    train_image_count: int = TRAIN_IMAGE_COUNT
    """How many of the training images to use."""
    evaluate_every: int = 1
    """Epochs between evaluations; the last epoch is always followed by one."""
    seed: int = 0
    """Of the initial weights, the order of the images and the augmentation."""

    def __post_init__(self) -> None:
        for name in ("global_batch", "epochs", "evaluate_every"):
            _require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be at least 1")
        _require(0 <= self.max_shift <= 27, f"max_shift is {self.max_shift}; it must be 0 to 27 for 28x28 images")
        _require(
            self.global_batch <= self.train_image_count <= TRAIN_IMAGE_COUNT,
            f"train_image_count is {self.train_image_count}; it must be at least the global batch "
            f"({self.global_batch}) and at most {TRAIN_IMAGE_COUNT}",
        )
        _require(
            0 <= self.optimizer.warmup_epochs < self.epochs,
            f"warmup_epochs is {self.optimizer.warmup_epochs}; it must be at least 0 and below epochs ({self.epochs})",
        )
        _require_group_count(self.model)

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in an epoch; what is left over is dropped, different images each epoch."""
        return self.train_image_count // self.global_batch

    def local_batch(self, worker_count: int) -> int:
        """Images per step on each worker."""
        _require(
            self.global_batch % worker_count == 0,
            f"global_batch {self.global_batch} cannot be shared equally by {worker_count} workers; "
            f"the next that can is {math.ceil(self.global_batch / worker_count) * worker_count}",
        )
        return self.global_batch // worker_count


def get_preset(name: str) -> Preset:
    """The preset of that name."""
    _require(name in PRESETS, f"there is no preset {name!r}; there are {', '.join(sorted(PRESETS))}")
    return PRESETS[name]


def _require_group_count(model: ModelConfig) -> None:
    width = ARCHITECTURES[model.architecture].width
    _require(
        model.norm != "group" or (model.group_count >= 1 and width % model.group_count == 0),
        f"group_count is {model.group_count}; it must divide the {width} channels of the first stage",
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise SettingsError(message)


_MNIST = Preset(
    model=ModelConfig(
        architecture="tiny",
        class_count=10,
        input_channels=1,
        stem_kernel=3,
        stem_stride=2,
        stem_pool=False,
        group_count=8,
    ),
    optimizer=OptimizerConfig(base_learning_rate=1.0, warmup_epochs=1.0, weight_decay=5e-4),
    global_batch=100,
    epochs=20,
    max_shift=1,
    evaluate_every=2,
)

PRESETS: dict[str, Preset] = {
    # 5,000 real digits to about 98 %, with 4 workers on 2 cores in a minute or two.
    "mnist": _MNIST,
    # The same path on a part of the digits, in seconds, for tests.
    "mnist-smoke": replace(_MNIST, train_image_count=800, epochs=3, evaluate_every=1),
}
