"""The user's own images, sorted into class folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedexp.core.build import require
from fedexp.core.errors import DataError, suggest
from fedexp.data.dataset import OTHER_ROOT, Arrays, Dataset
from fedexp.data.images import (
    check_class_folder,
    class_folders,
    decode_classes,
    require_image_shape,
)


@dataclass(frozen=True, kw_only=True)
class ImageFolder(Dataset):
    """Images of any size in ``FOLDER/{train,test}/CLASS/*``, decoded once.

    The formats are JPEG, PNG, BMP, PPM, PGM, TIFF, WebP and GIF, by the extension of
    the file. The label of a class is its position among the sorted class names, as in
    torchvision's ImageFolder. Each class needs images in both splits.

    Args:
        folder: Path of FOLDER, relative to data_root, or absolute.
    """

    folder: str

    cache_version: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.folder != "", "folder is empty: name the folder that has train/ and test/")
        require_image_shape(self.shape)

    @property
    def name(self) -> str:
        return f"image_folder-{Path(self.folder).name}"

    def expected_files(self, root: Path) -> list[Path]:
        return [root / self.folder / split for split in ("train", "test")]

    def ways(self, root: Path) -> str:
        return (
            f"put class folders of images in {root / self.folder}/train and /test; "
            "or set dataset.folder; "
            f"or {OTHER_ROOT}"
        )

    def read(self, root: Path, download: bool) -> Arrays:
        train_folder, test_folder = self.expected_files(root)
        classes = class_folders(train_folder)

        if len(classes) != self.num_classes:
            raise DataError(
                "the number of class folders is not dataset.num_classes",
                where=str(train_folder),
                expected=f"{self.num_classes} class folders",
                got=f"{len(classes)}: {_some(classes)}",
                do=f"set dataset.num_classes={len(classes)}, or correct the folders",
            )

        others = class_folders(test_folder)
        if others != classes:
            strange, absent = sorted(set(others) - set(classes)), sorted(set(classes) - set(others))
            raise DataError(
                "train and test do not contain the same classes",
                where=str(test_folder),
                expected=_some(classes),
                got="; ".join(
                    part
                    for part in (
                        f"only in test: {_some(strange)}" if strange else "",
                        f"only in train: {_some(absent)}" if absent else "",
                    )
                    if part
                ),
                do=suggest(strange[0], classes) if strange else "add the missing class folders",
            )

        for folder in (train_folder, test_folder):
            for name in classes:
                check_class_folder(folder / name)
        train, test = (
            decode_classes([folder / name for name in classes], self.shape)
            for folder in (train_folder, test_folder)
        )
        return Arrays(*train, *test)


def _some(names: list[str]) -> str:
    return (
        ", ".join(names[:8]) + (f" ... ({len(names)})" if len(names) > 8 else "")
        if names
        else "none"
    )
