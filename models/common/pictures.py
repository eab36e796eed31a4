"""Pictures of any format and depth that Pillow reads, in 8 bits, or an error that names the file."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image, ImageOps, TiffImagePlugin

from models.common.errors import DataError


def read_picture(
    source: Path | IO[bytes], *, where: str, mode: str = "RGB", size: tuple[int, int] | None = None
) -> Image.Image:
    """A picture in a mode of Pillow's with 8 bits. An alpha channel that ``mode`` has not is dropped.

    Args:
      source: a file, or its content.
      where: its name in an error message.
      mode: "RGB" or "RGBA".
      size: the width and height in an annotation file. The picture is turned as its EXIF orientation says, as browsers
        and tools for annotation show it, unless only the stored pixels have this size. Without a size it is not turned.

    Raises:
      DataError: the file is missing, empty, truncated, no picture, of another size, or has numbers without a range.
    """
    try:
        with Image.open(source) as file:
            file.load()
            picture = _in_8_bits(file, where)
            if picture.mode == "P":  # Pillow warns where it leaves out transparent colours.
                picture = picture.convert("RGBA")
            stored = picture.convert(mode)
            turned = ImageOps.exif_transpose(stored) if size else stored
    except DataError:
        raise
    except Exception as error:  # Pillow's decoders raise whatever damaged bytes lead them to.
        raise DataError(f"{where} is truncated, or no image: {error or type(error).__name__}") from None
    wanted = size or stored.size
    for found in (turned, stored):
        if found.size == wanted:
            return found
    raise DataError(
        f"{where} is {stored.width} x {stored.height} pixels; the annotation file says {wanted[0]} x {wanted[1]}"
    )


def _in_8_bits(file: Image.Image, where: str) -> Image.Image:
    """The picture itself, or the upper 8 bits of each number if it has more. Pillow would clip them instead."""
    if not file.mode.startswith(("I", "F")):
        return file
    bits, white_is_zero = 16, False
    if isinstance(file, TiffImagePlugin.TiffImageFile):
        bits = file.tag_v2[TiffImagePlugin.BITSPERSAMPLE][0]
        # Pillow inverts such pictures of 8 bits alone.
        white_is_zero = file.tag_v2[TiffImagePlugin.PHOTOMETRIC_INTERPRETATION] == 0
    # Pillow scales the numbers of a PGM file to 16 bits, in a mode for 32.
    if not (file.mode.startswith("I;16") or (file.mode == "I" and file.format == "PPM")):
        raise DataError(
            f"{where} has pixels of Pillow's mode {file.mode!r}, numbers that may have any range; save it with 8 or 16 "
            "unsigned bits for each"
        )
    pixels = (np.asarray(file) >> (bits - 8)).astype(np.uint8)
    picture = Image.fromarray(255 - pixels if white_is_zero else pixels)
    picture.info = file.info
    return picture
