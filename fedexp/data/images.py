"""Decoding of image files into one uint8 array."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedexp.core.build import require
from fedexp.core.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp", ".gif"}
)
# Extensions of images that are not read here. Other files are not images.
_UNREAD = frozenset(
    {".avif", ".heic", ".heif", ".jfif", ".jp2", ".jpe", ".jxl", ".svg", ".tga", ".dng", ".raw"}
)
_CHUNK = 256
# Exceptions of Pillow's decoders on damaged files
_UNDECODABLE = (OSError, SyntaxError, ValueError, EOFError)


def decode_images(files: Sequence[Path], shape: tuple[int, ...]) -> np.ndarray:
    """Decode image files into one array.

    Each image is converted to grey (C = 1) or RGB (C = 3). If its size is not H x W, it
    is resized (antialiased bilinear).

    Args:
        files: Image files.
        shape: Shape (C, H, W) of each decoded image.

    Returns:
        Array of shape (n, C, H, W), uint8.

    Raises:
        DataError: A file is not an image that can be decoded. The message names it.
    """
    channels, height, width = shape
    out = np.empty((len(files), height, width, channels), dtype=np.uint8)

    def chunk(start: int) -> None:
        for i in range(start, min(start + _CHUNK, len(files))):
            out[i] = _decode(files[i], channels, height, width)

    # Threads help, because Pillow's decoders release the interpreter lock
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        # `list` waits for all chunks and raises their errors
        list(pool.map(chunk, range(0, len(files), _CHUNK)))
    return np.ascontiguousarray(out.transpose(0, 3, 1, 2))


def decode_classes(folders: Sequence[Path], shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Decode the images in or below each folder, one folder per class.

    Returns:
        Images of shape (n, C, H, W), uint8, as `decode_images` returns them, and the
        index of each image's folder, (n,), int64.
    """
    files = [image_files(folder) for folder in folders]
    labels = np.repeat(np.arange(len(files), dtype=np.int64), [len(part) for part in files])
    images = decode_images([file for part in files for file in part], shape)
    return torch.from_numpy(images), torch.from_numpy(labels)


def image_size(file: Path) -> tuple[int, int]:
    """Read (width, height) of an image file from its header.

    Raises:
        DataError: The file is not an image.
    """
    with _opened(file) as image:
        return image.size


def _decode(file: Path, channels: int, height: int, width: int) -> np.ndarray:
    from PIL import Image

    with _opened(file) as image:
        if image.mode == "F" or image.mode.startswith("I"):
            raise DataError(
                "an image has more than 8 bits per channel",
                where=str(file),
                expected="8-bit grey, palette, RGB or RGBA",
                got=f"mode {image.mode}",
                do="convert it, or write your own Dataset that reads it",
            )

        pixels = image.convert("L" if channels == 1 else "RGB")
        if pixels.size != (width, height):
            pixels = pixels.resize((width, height), Image.Resampling.BILINEAR)
        return np.asarray(pixels, dtype=np.uint8).reshape(height, width, channels)


@contextmanager
def _opened(file: Path) -> Iterator[Image.Image]:
    """Open an image file. Errors of opening and decoding name the file."""
    from PIL import Image

    try:
        with Image.open(file) as image:
            yield image
    # Pillow refuses images of more than about 180 million pixels.
    except (*_UNDECODABLE, Image.DecompressionBombError) as error:
        raise DataError(
            "an image cannot be decoded",
            where=str(file),
            got=str(error),
            do="replace or remove the file",
        ) from error


def require_image_shape(shape: tuple[int, ...]) -> None:
    """Check that `shape` is (C, H, W), where C is 1 or 3.

    Raises:
        ValueError: The shape is not that of grey or RGB images.
    """
    require(
        len(shape) == 3 and shape[0] in (1, 3),
        "shape must be [channels, height, width] with 1 (grey) or 3 (RGB) channels",
    )


def image_files(folder: Path) -> list[Path]:
    """Return the images directly in or below `folder`, sorted.

    Hidden files and the files of hidden folders are skipped.
    """
    return [file for file in _visible_files(folder) if file.suffix.lower() in EXTENSIONS]


def _visible_files(folder: Path) -> list[Path]:
    """Return the visible files in or below `folder` and its visible folders, sorted."""
    files = []
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(place) / name for name in names if not name.startswith(".")]
    return sorted(files)


def class_folders(folder: Path) -> list[str]:
    """Return the names of the visible folders in `folder`, sorted."""
    return sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.is_dir() and not entry.name.startswith(".")
    )


def check_class_folder(folder: Path) -> None:
    """Refuse a class folder without images, or with images that are not read.

    Hidden files, the files of hidden folders and other files are accepted.

    Raises:
        DataError: The folder has no image, or an image has an extension that is not
            read.
    """
    accepted = ", ".join(sorted(ending.removeprefix(".") for ending in EXTENSIONS))
    for file in _visible_files(folder):
        if file.suffix.lower() in _UNREAD:
            raise DataError(
                "an image in a class folder has a format that is not read",
                where=str(file),
                expected=accepted,
                got=file.suffix,
                do="convert the file, or move it out of the class folder",
            )

    if not image_files(folder):
        raise DataError(
            "a class folder contains no images",
            where=str(folder),
            expected=f"at least one image ({accepted})",
            do="add images of the class, or remove the folder and lower dataset.num_classes",
        )
