"""Tiny ImageNet: images of 64 x 64 pixels in 200 classes.

100,000 images are for training and 10,000 for validation.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.error import URLError

import torch

from fedexp.core.errors import DataError
from fedexp.data._torchvision import torchvision_module
from fedexp.data.dataset import Arrays, Dataset
from fedexp.data.images import (
    class_folders,
    decode_classes,
    decode_images,
    require_image_shape,
)

_URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
_MD5 = "90528d7ca1a48142e341f4ef8d21d0de"
_FOLDER = "tiny-imagenet-200"


@dataclass(frozen=True, kw_only=True)
class TinyImageNet(Dataset):
    """Tiny ImageNet in its official layout.

    The files are ``train/<wnid>/images/*.JPEG`` and ``val/images`` with
    ``val/val_annotations.txt``. The labelled validation images are the test set,
    because the official test labels are not public. The label of a class is the
    position of its WordNet id in sorted order. Grey images become RGB.
    """

    num_classes: int = 200
    shape: tuple[int, ...] = (3, 64, 64)

    name: ClassVar[str] = "tiny_imagenet"
    can_download: ClassVar[bool] = True
    cache_version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_image_shape(self.shape)

    def expected_files(self, root: Path) -> list[Path]:
        folder = root / _FOLDER
        return [folder / "train", folder / "val" / "images", folder / "val" / "val_annotations.txt"]

    def read(self, root: Path, download: bool) -> Arrays:
        train_folder, val_folder, annotations = self.expected_files(root)
        if download and not all(path.exists() for path in (train_folder, val_folder, annotations)):
            _fetch(root)
            self.check(root, download=False)

        classes = class_folders(train_folder)
        if len(classes) != self.num_classes:
            raise DataError(
                "Tiny ImageNet's training folder is incomplete",
                where=str(train_folder),
                expected=f"{self.num_classes} folders named by WordNet ids",
                got=len(classes),
                do="unpack the archive again",
            )

        label = {name: i for i, name in enumerate(classes)}

        test_files, test_y = [], []
        for number, line in enumerate(annotations.read_text().splitlines(), start=1):
            if not line.strip():
                continue
            columns = line.split()  # file, WordNet id, bounding box
            if len(columns) < 2 or columns[1] not in label:
                raise DataError(
                    "an annotation does not name a known class",
                    where=f"{annotations}, line {number}",
                    expected="file name, WordNet id of a folder in train/, bounding box",
                    got=line,
                    do="unpack the archive again",
                )
            test_files.append(val_folder / columns[0])
            test_y.append(label[columns[1]])

        return Arrays(
            *decode_classes([train_folder / name / "images" for name in classes], self.shape),
            torch.from_numpy(decode_images(test_files, self.shape)),
            torch.tensor(test_y, dtype=torch.int64),
        )


def _fetch(root: Path) -> None:
    utilities = torchvision_module("torchvision.datasets").utils
    try:
        utilities.download_and_extract_archive(_URL, str(root), md5=_MD5)
    except (RuntimeError, OSError, URLError, ValueError) as error:
        raise DataError(
            "Tiny ImageNet could not be downloaded",
            where=_URL,
            got=str(error).strip() or type(error).__name__,
            do=f"download tiny-imagenet-200.zip in another way and unpack it in {root}",
        ) from error
