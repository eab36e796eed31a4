"""Pictures as the trainers read them: of any depth, turned as their annotations say, or refused by the file's name."""

from __future__ import annotations

import io
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from models.common.errors import DataError
from models.common.pictures import read_picture

RAMP = np.linspace(0, 65535, 3000).astype(np.uint16).reshape(50, 60)
COLORS = np.random.default_rng(0).integers(0, 256, (50, 60, 3)).astype(np.uint8)
ORIENTATION = 0x0112


def read(content: bytes, size: tuple[int, int] | None = None, mode: str = "RGB") -> Any:
    return np.asarray(read_picture(io.BytesIO(content), where="a.png", mode=mode, size=size))


def saved(pixels: Any, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    picture.save(file, kind, **options)
    return file.getvalue()


def gray_tiff(pixels: bytes, *, bits: int, white_is_zero: bool = False, order: str = "<") -> bytes:
    """A TIFF of 60 x 50 numbers, with the tags that a TIFF must have."""
    tags = {256: 60, 257: 50, 258: bits, 259: 1, 262: 0 if white_is_zero else 1, 273: 8, 278: 50, 279: len(pixels)}
    entries = b"".join(struct.pack(f"{order}HHII", tag, 4, 1, value) for tag, value in tags.items())
    magic = b"II" if order == "<" else b"MM"
    header = magic + struct.pack(f"{order}HI", 42, 8 + len(pixels))
    return header + pixels + struct.pack(f"{order}H", len(tags)) + entries + bytes(4)


def packed_in_12_bits(numbers: Any) -> bytes:
    first, second = numbers.reshape(-1, 2).T
    return np.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], axis=1).astype(np.uint8).tobytes()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (saved(RAMP, "PNG"), RAMP >> 8),
        (saved(RAMP, "PPM"), RAMP >> 8),
        (saved(RAMP, "TIFF"), RAMP >> 8),
        (gray_tiff(RAMP.astype("<u2").tobytes(), bits=16), RAMP >> 8),
        (gray_tiff(RAMP.astype(">u2").tobytes(), bits=16, order=">"), RAMP >> 8),
        (gray_tiff(RAMP.astype("<u2").tobytes(), bits=16, white_is_zero=True), 255 - (RAMP >> 8)),
        (gray_tiff(packed_in_12_bits(RAMP >> 4), bits=12), RAMP >> 8),
    ],
)
def test_a_picture_with_more_than_8_bits_has_its_upper_8(content: bytes, expected: Any) -> None:
    for mode in ("RGB", "RGBA"):
        found = read(content, mode=mode)
        assert (found[..., :3] == expected[..., None]).all()


@pytest.mark.parametrize(
    "content",
    [
        saved(RAMP.astype(np.float32), "TIFF"),
        saved((RAMP / 65535).astype(np.float32), "TIFF"),
        saved(RAMP.astype(np.int32), "TIFF"),
        saved(RAMP.astype(np.float32), "PPM"),
    ],
)
def test_numbers_that_may_have_any_range_are_refused(content: bytes) -> None:
    with pytest.raises(DataError, match=r"^a.png has pixels of Pillow's mode '[FI]', .*; save it with 8 or 16"):
        read(content)


@pytest.mark.parametrize(
    ("mode", "kind"), [("L", "PNG"), ("LA", "PNG"), ("RGBA", "PNG"), ("CMYK", "TIFF"), ("1", "PNG")]
)
def test_any_mode_becomes_rgb(mode: str, kind: str) -> None:
    picture = Image.fromarray(COLORS).convert(mode)
    np.testing.assert_array_equal(read(saved(picture, kind)), np.asarray(picture.convert("RGB")))


def test_a_palette_with_transparent_colours_becomes_rgb_without_a_warning() -> None:
    picture = Image.fromarray(COLORS).quantize(8)
    content = saved(picture, "PNG", transparency=bytes([0, 128, *[255] * 6]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(read(content), np.asarray(picture.convert("RGB")))


@pytest.mark.parametrize("pixels", [COLORS, RAMP])
@pytest.mark.parametrize(("orientation", "turns"), [(6, 3), (8, 1)])
def test_a_turned_picture_has_the_size_of_its_annotations(pixels: Any, orientation: int, turns: int) -> None:
    """Some tools annotate what a browser shows, others what the file has."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    content = saved(pixels, "PNG", exif=exif)
    stored = read(content)
    np.testing.assert_array_equal(read(content, (60, 50)), stored)
    np.testing.assert_array_equal(read(content, (50, 60)), np.rot90(stored, turns))
    with pytest.raises(DataError, match=r"a.png is 60 x 50 pixels; the annotation file says 50 x 61"):
        read(content, (50, 61))


def test_a_picture_on_its_head_is_shown_as_a_browser_shows_it() -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 3
    np.testing.assert_array_equal(read(saved(COLORS, "PNG", exif=exif), (60, 50)), COLORS[::-1, ::-1])


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "WEBP", "GIF", "BMP", "PPM"])
def test_damaged_bytes_are_refused_by_name(kind: str) -> None:
    """Whatever is damaged, Pillow raises errors of many types."""
    rng = np.random.default_rng(0)
    content = saved(COLORS, kind)
    refusals = []
    for _ in range(60):
        damaged = bytearray(content[: rng.integers(len(content))])
        for place in rng.integers(0, min(len(damaged), 400) + 1, 3):
            damaged[place : place + 1] = bytes([rng.integers(256)])
        try:
            read(bytes(damaged))
        except DataError as error:
            refusals.append(str(error))
    assert len(refusals) > 20
    assert all(text.startswith("a.png is truncated, or no image: ") for text in refusals)


def test_a_folder_and_a_missing_file_are_refused_by_name(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.png"):
        with pytest.raises(DataError, match=f"{path.name} is truncated, or no image"):
            read_picture(path, where=str(path))
