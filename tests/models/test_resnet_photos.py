"""ResNet on photographs: parity with torch, crops and colours, records and folders, and ImageNet's tar files."""

from __future__ import annotations

import io
import subprocess
import tarfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from PIL import Image
from tensorboardX.record_writer import RecordWriter

from models.common.batches import BatchSplit
from models.common.errors import DataError
from models.common.records import find_records
from models.common.tf_example import encode_example
from models.resnet.convert import Options, convert
from models.resnet.model import ModelConfig, ResNet
from models.resnet.photos import (
    CHANNEL_MEAN,
    CHANNEL_STD,
    ENCODED,
    LABEL,
    PhotoData,
    augment,
    center,
    jitter_colors,
    random_crop,
)
from models.resnet.presets import PRESETS, PhotoConfig, Preset
from models.resnet.torch_weights import from_torch_layout, load_torch_weights, torch_name
from tests.models.torchvision_import import prepare_torchvision

LOGITS_TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 1e-3


def torch_resnet50(torch: Any, pixels: Any, *, conditioned: bool) -> Any:
    """ResNet-50 with random weights and the running statistics of ``pixels``.

    ``conditioned``: with blocks that add little, and units that are rarely near the kink of ReLU. With gammas of 1 and
    betas of 0 rounding alone takes torch's own float32 gradients 5e-3 away from its float64 ones.
    """
    prepare_torchvision()
    transformers = pytest.importorskip("transformers", reason="parity needs transformers: pip install '.[parity]'")
    torch.manual_seed(0)
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000))
    with torch.no_grad():
        for name, value in model.state_dict().items() if conditioned else ():
            if name.endswith("layer.2.normalization.weight"):
                value.fill_(0.2)
            elif name.endswith("normalization.bias") and "layer.2" not in name:
                value.fill_(3.0)
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = 1.0
        model.train()(pixels)  # makes running statistics
    return model.eval()


@pytest.mark.timeout(300)
def test_resnet50_against_torch() -> None:
    """Logits and all gradients, normalised by running statistics: those of a batch amplify the rounding.

    With weights as torch draws them, logits only, against float64, and as a share of the largest one: there float32 is
    that far off in torch as well.
    """
    torch = pytest.importorskip("torch", reason="parity needs torch: pip install '.[parity]'")
    images = np.random.default_rng(0).normal(size=(4, 64, 64, 3)).astype(np.float32)
    labels = np.array([3, 999, 0, 42])
    pixels = torch.tensor(images.transpose(0, 3, 1, 2))

    config = ModelConfig()
    graphdef, state = nnx.split(nnx.eval_shape(lambda: ResNet(config, rngs=nnx.Rngs(0))))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)

    def split_weights(theirs: Any) -> Any:
        model = nnx.merge(graphdef, zeros, copy=True)
        load_torch_weights(model, config, {name: value.numpy().copy() for name, value in theirs.state_dict().items()})
        return nnx.split(model, nnx.Param, nnx.BatchStat)

    conditioned, drawn = (torch_resnet50(torch, pixels, conditioned=wanted) for wanted in (True, False))
    parts, params, batch_stats = split_weights(conditioned)

    # It runs twice, so time spent on optimizing it would be lost.
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

    @partial(jax.jit, compiler_options=quick)
    @partial(jax.grad, has_aux=True)
    def gradients_and_logits(params: Any, batch_stats: Any) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(parts, params, batch_stats, copy=True)
        model.eval()
        logits = model(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

    grads, logits = gradients_and_logits(params, batch_stats)
    output = conditioned(pixels, labels=torch.tensor(labels))
    output.loss.backward()
    np.testing.assert_allclose(logits, output.logits.detach(), atol=LOGITS_TOLERANCE)

    gradients = {name: value.grad.numpy() for name, value in conditioned.named_parameters()}
    wanted = from_torch_layout(gradients, grads, config)
    assert len(wanted) == len(gradients)
    for path, gradient in nnx.to_flat_state(grads):
        name = torch_name(path, config)
        np.testing.assert_allclose(jax.tree.leaves(gradient)[0], wanted[name], atol=GRADIENT_TOLERANCE, err_msg=name)

    _, logits = gradients_and_logits(*split_weights(drawn)[1:])
    with torch.no_grad():
        exact = drawn.double()(pixels.double()).logits.numpy()
    np.testing.assert_allclose(logits, exact, atol=LOGITS_TOLERANCE * np.abs(exact).max(), rtol=0)


# --- crops and colours -----------------------------------------------------------------------------------------------


def gradient_photo(width: int, height: int) -> Image.Image:
    """Red grows to the right, green downwards."""
    columns, rows = np.meshgrid(np.arange(width), np.arange(height))
    pixels = np.stack([255 * columns / (width - 1), 255 * rows / (height - 1), 0 * rows], -1)
    return Image.fromarray(pixels.astype(np.uint8))


@pytest.mark.parametrize("size", [(500, 375), (30, 400), (8, 8)])
def test_random_crops_have_the_named_areas_and_aspects(size: tuple[int, int]) -> None:
    rng, config = np.random.default_rng(0), PhotoConfig()
    areas, aspects = [], []
    for _ in range(300):
        left, top, right, bottom = random_crop(size, config, rng)
        assert 0 <= left < right <= size[0]
        assert 0 <= top < bottom <= size[1]
        areas.append((right - left) * (bottom - top) / (size[0] * size[1]))
        aspects.append((right - left) / (bottom - top))
    assert max(areas) <= 1.0
    if size == (500, 375):
        assert 0.079 < min(areas) < 0.12
        assert max(areas) > 0.85
        assert 0.74 < min(aspects) < 0.8
        assert 1.25 < max(aspects) < 1.35


def test_validation_takes_the_middle() -> None:
    """Scaled so that the shorter side has 256 pixels; 224 of its middle."""
    pixels = center(gradient_photo(512, 256), PhotoConfig()) * CHANNEL_STD + CHANNEL_MEAN
    assert pixels.shape == (224, 224, 3)
    assert pixels[:, 0, 0].mean() == pytest.approx(255 * 144 / 511, abs=1)
    assert pixels[0, :, 1].mean() == pytest.approx(255 * 16 / 255, abs=1)


def test_augmentation_depends_on_its_generator_only() -> None:
    photo, config = gradient_photo(60, 50), PhotoConfig(image_size=16)

    def run(seed: int, **changes: Any) -> np.ndarray[Any, Any]:
        return augment(photo, replace(config, **changes), True, np.random.default_rng(seed))

    assert run(0).shape == (16, 16, 3)
    assert run(0).dtype == np.float32
    np.testing.assert_array_equal(run(0), run(0))
    assert not np.array_equal(run(0), run(1))
    plain = [run(seed, color_jitter=0.0, lighting_noise=0.0) for seed in range(40)]
    falls = [pixels[8, 0, 0] > pixels[8, -1, 0] for pixels in plain]
    assert 8 < sum(falls) < 32, "about half are mirrored"
    noisy = [run(seed, color_jitter=0.0) - pixels for seed, pixels in enumerate(plain)]
    # One shift for all pixels of a photograph.
    assert all(np.ptp(noise.reshape(-1, 3), axis=0).max() < 1e-4 for noise in noisy)
    assert np.std([noise[0, 0] * CHANNEL_STD for noise in noisy]) == pytest.approx(3.2, rel=0.5)


def test_color_jitter_stays_in_range_and_near() -> None:
    pixels = np.asarray(gradient_photo(20, 20), np.float32)
    rng = np.random.default_rng(0)
    jittered = [jitter_colors(pixels, 0.4, rng) for _ in range(50)]
    assert min(image.min() for image in jittered) >= 0
    assert max(image.max() for image in jittered) <= 255
    shares = [image.mean() / pixels.mean() for image in jittered]
    assert 0.55 < min(shares) < 0.8
    assert 1.1 < max(shares) < 1.45


# --- files -----------------------------------------------------------------------------------------------------------


def encoded(photo: Image.Image) -> bytes:
    file = io.BytesIO()
    photo.save(file, "JPEG", quality=95)
    return file.getvalue()


def numbered_photo(number: int) -> bytes:
    """Its green says which one it is."""
    return encoded(Image.new("RGB", (40, 30), (0, 10 * number, 0)))


def write_class_folders(folder: Path) -> None:
    for part, count in (("train", 12), ("validation", 7)):
        for number in range(count):
            of_class = folder / part / f"n{number % 3}"
            of_class.mkdir(parents=True, exist_ok=True)
            (of_class / f"{number:02d}.JPEG").write_bytes(numbered_photo(number))


def write_tfrecords(folder: Path) -> None:
    for part, count in (("train", 12), ("validation", 7)):
        for shard in range(2):
            writer = RecordWriter(str(folder / f"{part}-{shard:05d}-of-00002"))
            for number in range(shard, count, 2):
                writer.write(encode_example({ENCODED: [numbered_photo(number)], LABEL: np.array([number % 3 + 1])}))
            writer.close()


def write_tars(folder: Path) -> Options:
    """ImageNet's original files: tar files of classes in a tar file, and numbered photographs in another."""

    def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))

    with tarfile.open(folder / "train.tar", "w") as archive:
        for label in range(3):
            inner = io.BytesIO()
            with tarfile.open(fileobj=inner, mode="w") as of_class:
                for number in range(label, 12, 3):
                    add(of_class, f"n{label}_{number}.JPEG", numbered_photo(number))
            add(archive, f"n{label}.tar", inner.getvalue())
    with tarfile.open(folder / "val.tar", "w") as archive:
        for number in reversed(range(7)):
            add(archive, f"ILSVRC2012_val_{number + 1:08d}.JPEG", numbered_photo(number))
    (folder / "labels.txt").write_text("".join(f"n{number % 3}\n" for number in range(7)))
    return Options(
        folder / "train.tar",
        folder / "val.tar",
        folder / "labels.txt",
        folder / "out",
        train_shard_count=2,
        validation_shard_count=2,
    )


def write_converted(folder: Path) -> None:
    options = write_tars(folder)
    assert convert(options) == {"train": 12, "validation": 7}
    subprocess.run(["sha256sum", "--check", "--quiet", "--strict", "SHA256SUMS"], cwd=options.output, check=True)
    for path in options.output.iterdir():
        path.rename(folder / path.name)


SMALL = replace(
    PRESETS["resnet50-goyal"],
    global_batch=4,
    micro_batch=0,
    train_image_count=12,
    epochs=35,
    model=ModelConfig(class_count=3),
    photos=PhotoConfig(image_size=8, resize=8, color_jitter=0.0, lighting_noise=0.0),
)


def number_of(pixels: np.ndarray[Any, Any]) -> int:
    return round(float((pixels * CHANNEL_STD + CHANNEL_MEAN)[..., 1].mean()) / 10)


@pytest.mark.parametrize("write", [write_class_folders, write_tfrecords, write_converted])
@pytest.mark.parametrize("worker_count", [1, 2])
def test_every_photograph_once_per_epoch(write: Any, worker_count: int, tmp_path: Path) -> None:
    write(tmp_path)
    data = PhotoData(tmp_path, SMALL)
    seen: list[int] = []
    validated: list[int] = []
    for rank in range(worker_count):
        split = BatchSplit.make(4, 0, rank=rank, worker_count=worker_count)
        batches = data.train_batches(split, first_step=3)
        for _ in range(3):
            images, labels = next(batches)
            assert images.shape == (4 // worker_count, 8, 8, 3)
            numbers = [number_of(image) for image in images]
            assert labels.tolist() == [number % 3 for number in numbers]
            seen += numbers
        for images, labels, is_real in data.held_out_batches(split):
            numbers = [number_of(image) for image in images[is_real]]
            assert labels[is_real].tolist() == [number % 3 for number in numbers]
            validated += numbers
    assert sorted(seen) == list(range(12)), "the second epoch"
    assert sorted(validated) == list(range(7)), "the partial batch included"


def spoil(folder: Path) -> None:
    write_class_folders(folder)
    next((folder / "train" / "n1").iterdir()).write_bytes(numbered_photo(1)[:300])


def wrong_label(folder: Path) -> None:
    write_class_folders(folder)
    of_class = folder / "train" / "n9"
    (folder / "train" / "n2").rename(folder / "train" / "n8")
    of_class.mkdir()
    (of_class / "a.jpg").write_bytes(numbered_photo(1))


def truncate(folder: Path) -> None:
    write_tfrecords(folder)
    path = folder / "train-00001-of-00002"
    path.write_bytes(path.read_bytes()[:-100])


def too_few(folder: Path) -> None:
    write_class_folders(folder)
    next((folder / "train" / "n1").iterdir()).unlink()


def read_an_epoch(folder: Path, preset: Preset) -> None:
    batches = PhotoData(folder, preset).train_batches(BatchSplit.make(4, 0, rank=0, worker_count=1), 0)
    for _ in range(preset.steps_per_epoch):
        next(batches)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda folder: None, "no file in .* has a name that begins with 'train'"),
        (spoil, "is truncated, or no image"),
        (wrong_label, "the label is 3 counted from 0; class_count is 3"),
        (truncate, "train-00001-of-00002 is truncated after"),
        (too_few, "has 11 training images; train_image_count is 12: give --train-image-count 11 or less"),
    ],
)
def test_bad_photographs_are_named(write: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path)
    preset: Preset = SMALL if write is not wrong_label else replace(SMALL, train_image_count=13)
    with pytest.raises(DataError, match=message):
        read_an_epoch(tmp_path, preset)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "labels.txt").write_text("n0\n" * 6), "has 7 photographs, but .* has 6 classes"),
        (lambda folder: (folder / "labels.txt").write_text("n7\n" * 7), "n7 is no class of"),
        (lambda folder: (folder / "train.tar").write_bytes(b"no tar"), "is truncated, or no tar file"),
        (lambda folder: (folder / "val.tar").unlink(), "there is no file .*val.tar"),
    ],
)
def test_conversion_of_bad_files_leaves_nothing_behind(change: Any, message: str, tmp_path: Path) -> None:
    options = write_tars(tmp_path)
    change(tmp_path)
    with pytest.raises(DataError, match=message):
        convert(options)
    assert not list(tmp_path.glob("*out*")) + list(tmp_path.glob(".*"))


def test_records_know_where_they_are(tmp_path: Path) -> None:
    write_tfrecords(tmp_path)
    records = find_records(tmp_path, "train")
    assert len(records) == 12
    assert records.where(7) == f"record 1 of {tmp_path}/train-00001-of-00002"
