"""Named presets: every hyperparameter of a run, in one frozen and nested dataclass."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import tyro

from models.common.errors import require
from models.mask_rcnn.detect import DetectionConfig
from models.mask_rcnn.loss import LossConfig
from models.mask_rcnn.model import SMALL, ModelConfig
from models.mask_rcnn.optimizer import OptimizerConfig, Schedule
from models.mask_rcnn.prepare import HELD_OUT, TRAIN
from models.mask_rcnn.proposals import ProposalConfig
from models.mask_rcnn.targets import SampleConfig
from models.resnet.model import ModelConfig as BackboneConfig

Dtype = Literal["float32", "bfloat16", "float16"]

# Options are named by a field of these settings alone. The names of the settings inside of them stay.
WITHOUT_PREFIX = tyro.conf.arg(name="")

# train2017 without the images that have no objects.
COCO_IMAGE_COUNT = 117_266


@dataclass(frozen=True)
class ImageConfig:
    """How an image becomes the network's input: scaled, and put at the top left of a square."""

    size: int = 1344
    """The side of the square in pixels."""
    short_sides: tuple[int, int] = (800, 800)
    """The shortest and the longest short side in training. One between them is drawn for each image and epoch."""
    test_short_side: int = 800
    """The short side in an evaluation."""
    long_side: int = 1333
    """The longest long side: an image that is longer is scaled down to it."""
    flip: bool = True
    """Augmentation: mirror every second image, on average."""
    turn: bool = False
    """Augmentation: turn images by a random number of quarter turns. For images without a top, as from a microscope."""
    object_count: int = 100
    """The most objects of an image. Of more objects the largest are taken."""

    def __post_init__(self) -> None:
        require(
            self.long_side <= self.size, f"long_side is {self.long_side}; it must be at most size, which is {self.size}"
        )
        shortest, longest = self.short_sides
        require(1 <= shortest <= longest, f"short_sides are {shortest} {longest}; they must be in ascending order")
        require(self.object_count >= 1, f"object_count is {self.object_count}; it must be at least 1")


@dataclass(frozen=True)
class Preset:
    """One training run."""

    model: Annotated[ModelConfig, WITHOUT_PREFIX]
    optimizer: Annotated[OptimizerConfig, WITHOUT_PREFIX]
    schedule: Annotated[Schedule, WITHOUT_PREFIX]
    """The learning rate, as a function of the step."""
    global_batch: int
    """Images per step over all workers; must be a multiple of the number of workers."""
    loss: Annotated[LossConfig, WITHOUT_PREFIX] = field(default_factory=LossConfig)
    detection: DetectionConfig = field(default_factory=DetectionConfig)
    dataset: Literal["coco", "nuclei"] = "coco"
    """coco: the folder --data. nuclei: the same, or without --data the folder that `prepare nuclei` makes, which is
    then removed at the end."""
    images: Annotated[ImageConfig, WITHOUT_PREFIX] = field(default_factory=ImageConfig)
    micro_batch: int = 0
    """Images in one forward and backward pass of a worker. Before the all-reduce a worker runs as many passes as its
    part of the global batch takes. 0: one pass."""
    checkpoint_every: int = 1000
    """Steps between checkpoints."""
    evaluate_every: int = 1
    """Checkpoints between evaluations. There is always an evaluation after the last one."""
    train_part: str = "train2017"
    """The part of the COCO folder to train on: annotations/instances_PART.json and the images in PART/."""
    held_out_part: str = "val2017"
    """The part to evaluate on."""
    seed: int = 0
    """The seed of the initial weights, of the order of the images, of the augmentation and of the samples."""

    def __post_init__(self) -> None:
        for name in ("global_batch", "checkpoint_every", "evaluate_every"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be at least 1")
        require(self.micro_batch >= 0, f"micro_batch is {self.micro_batch}; it must be at least 0")
        coarsest = self.model.strides[-1]
        require(
            self.images.size >= 1 and self.images.size % coarsest == 0,
            f"size is {self.images.size}; it must be a multiple of {coarsest}, the coarsest stride of the network",
        )

    @property
    def step_count(self) -> int:
        """The steps of the whole run."""
        return self.schedule.step_count


def _coco(schedule: Schedule, global_batch: int, micro_batch: int, dtype: Dtype = "float32") -> Preset:
    """Detectron's network and losses, with a checkpoint after about every epoch."""
    return Preset(
        model=ModelConfig(backbone=BackboneConfig(norm="frozen", dtype=dtype)),
        optimizer=OptimizerConfig(bias_rate=2.0, loss_scaling="dynamic" if dtype == "float16" else "none"),
        schedule=schedule,
        global_batch=global_batch,
        micro_batch=micro_batch,
        checkpoint_every=COCO_IMAGE_COUNT // global_batch,
    )


def _mlperf(global_batch: int, peak: float, warmup_steps: int, drop_steps: tuple[int, int]) -> Preset:
    """NVIDIA's submissions to MLPerf v0.7. They end at the target; here, at most an eighth after the last drop."""
    schedule = Schedule(peak, warmup_steps, 0.0, step_count=drop_steps[1] * 9 // 8, drop_steps=drop_steps)
    return _coco(schedule, global_batch, micro_batch=2, dtype="float16")


# Detectron, end-to-end Mask R-CNN with a ResNet-50 and a feature pyramid: box AP 37.7 %, mask AP 33.9 %.
_DETECTRON = _coco(Schedule(0.02, 500, 0.02 / 3, step_count=90_000, drop_steps=(60_000, 80_000)), 16, micro_batch=2)

# aws-samples, TensorFlow 1: 32 GPUs with 4 images each, and epochs of 120,000 images.
_AWS_EPOCH = 120_000 // 128
_AWS = _coco(
    Schedule(0.16, 1000, 0.0033, step_count=13 * _AWS_EPOCH, drop_steps=(9 * _AWS_EPOCH, 12 * _AWS_EPOCH)),
    128,
    micro_batch=4,
    dtype="float16",
)
_AWS = replace(
    _AWS,
    model=replace(_AWS.model, box_weights=(20.0, 20.0, 10.0, 10.0)),
    optimizer=OptimizerConfig(max_grad_norm=1.5, loss_scaling="static"),
)

# AWS, TensorFlow 2: 192 GPUs with one image each.
_SAGEMAKER = _coco(
    Schedule(0.028, 625, 0.00028, step_count=9_000, decay="cosine", final=0.000028), 192, micro_batch=1, dtype="float16"
)
_SAGEMAKER = replace(
    _SAGEMAKER,
    optimizer=OptimizerConfig(algorithm="novograd", b2=0.3, weight_decay=1e-3, loss_scaling="dynamic"),
    loss=LossConfig(box_loss="giou", label_smoothing=0.1),
)

# Google, TensorFlow 1: the image is scaled to fit into a square of 1024 pixels.
_TPU = replace(
    _coco(
        Schedule(0.08, 500, 0.0067, step_count=22_500, drop_steps=(15_000, 20_000)),
        64,
        micro_batch=2,
        dtype="bfloat16",
    ),
    images=ImageConfig(size=1024, short_sides=(1024, 1024), test_short_side=1024, long_side=1024),
)

_NUCLEI = Preset(
    model=SMALL,
    optimizer=OptimizerConfig(),
    schedule=Schedule(0.02, 50, 0.002, step_count=700, drop_steps=(480, 620)),
    global_batch=4,
    loss=LossConfig(
        proposals=ProposalConfig(level_count=256, image_count=256),
        samples=SampleConfig(anchor_count=128, roi_count=64),
    ),
    detection=DetectionConfig(
        proposals=ProposalConfig(level_count=256, image_count=128), candidate_count=128, count=48
    ),
    dataset="nuclei",
    images=ImageConfig(
        size=128, short_sides=(112, 128), test_short_side=128, long_side=128, turn=True, object_count=32
    ),
    micro_batch=1,
    checkpoint_every=175,
    train_part=TRAIN,
    held_out_part=HELD_OUT,
)

PRESETS: dict[str, Preset] = {
    # 125 nuclei that people have outlined.
    "nuclei": _NUCLEI,
    # For tests: a smaller network in seconds, for images of two classes.
    "smoke": replace(
        _NUCLEI,
        model=replace(SMALL, class_count=2, pyramid_channels=32, hidden_size=64, mask_channels=16, mask_layers=2),
        schedule=Schedule(0.02, 4, 0.002, step_count=12, drop_steps=(8,)),
        images=replace(_NUCLEI.images, size=64, short_sides=(40, 48), test_short_side=48, long_side=64, object_count=4),
        dataset="coco",
        checkpoint_every=6,
    ),
    "detectron-1x": _DETECTRON,
    "mlperf-48": _mlperf(48, 0.06, 625, (24_000, 32_000)),
    "mlperf-96": _mlperf(96, 0.12, 625, (12_000, 16_000)),
    "mlperf-128": _mlperf(128, 0.16, 625, (9_000, 12_000)),
    "mlperf-256": _mlperf(256, 0.24, 1800, (5_625, 7_500)),
    "aws-tf-128": _AWS,
    "sagemaker-192": _SAGEMAKER,
    "tpu-64": _TPU,
}
