"""Carvana Image Masking Challenge: photos of cars and masks of the cars."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from fedexp.core.build import require
from fedexp.core.data import Targets
from fedexp.core.errors import DataError
from fedexp.data.dataset import OTHER_ROOT, Arrays, Dataset
from fedexp.data.images import decode_images, image_size, require_image_shape

_MASK = "_mask.gif"


@dataclass(frozen=True, kw_only=True)
class Carvana(Dataset):
    """The photos and masks of the challenge's training archives.

    The files are ``carvana/train/CAR_VIEW.jpg`` and
    ``carvana/train_masks/CAR_VIEW_mask.gif``, as in the challenge's archives.

    There are 5,088 photos of 1918 x 1280: sixteen views of each of 318 cars. Photos and
    masks are resized to `shape` (antialiased bilinear). A pixel of the resized mask
    belongs to the car if at least half of its area does. Masks of the challenge's own
    test photos are not public. Some of the training cars are therefore withheld, and
    their photos are the test set. These are the last cars in the order of their names.
    The names are random. NAFI (Xiao & Cheng 2023) does not state the image size or the
    test set. The values here are assumptions.

    Args:
        test_fraction: Share of the cars whose photos are the test set. The number of
            test cars is rounded, and is at least one.
    """

    targets: ClassVar[Targets] = "masks"
    selects: ClassVar[frozenset[str]] = frozenset({"test_fraction"})
    cache_version: ClassVar[int] = 1

    num_classes: int = field(init=False, default=1)
    shape: tuple[int, ...] = (3, 128, 192)
    test_fraction: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        require_image_shape(self.shape)
        require(
            0 < self.test_fraction < 1,
            f"test_fraction must be in (0, 1), got {self.test_fraction}",
        )

    def expected_files(self, root: Path) -> list[Path]:
        return [root / "carvana" / "train", root / "carvana" / "train_masks"]

    def ways(self, root: Path) -> str:
        return (
            "unpack train.zip and train_masks.zip (kaggle.com/c/carvana-image-masking-challenge) "
            f"in {root / 'carvana'}; "
            f"or {OTHER_ROOT}"
        )

    def read(self, root: Path, download: bool) -> Arrays:
        photos, masks = self._pairs(root)
        cars = sorted({_car(photo) for photo in photos})
        if len(cars) < 2:
            raise DataError(
                "there are too few cars to withhold some for the test set",
                where=str(photos[0].parent),
                expected="photos of at least 2 cars, named CAR_VIEW.jpg",
                got=f"{len(photos)} photos of {len(cars)} car",
                do="unpack the archives again",
            )

        withheld = set(cars[-min(len(cars) - 1, max(1, round(self.test_fraction * len(cars)))) :])

        def decoded(test: bool) -> tuple[Tensor, Tensor]:
            at = [i for i, photo in enumerate(photos) if (_car(photo) in withheld) == test]
            x = decode_images([photos[i] for i in at], self.shape)
            y = decode_images([masks[i] for i in at], (1, *self.shape[1:]))[:, 0] >= 128
            return torch.from_numpy(x), torch.from_numpy(y).to(torch.uint8)

        return Arrays(*decoded(test=False), *decoded(test=True))

    def _pairs(self, root: Path) -> tuple[list[Path], list[Path]]:
        """Return the photos in the order of their names, and the mask of each.

        Raises:
            DataError: A photo has no mask, a mask has no photo, or a mask and its photo
                differ in size.
        """
        photo_folder, mask_folder = self.expected_files(root)
        photos = sorted(photo_folder.glob("[!.]*.jpg"))
        masks = {file.name.removesuffix(_MASK): file for file in mask_folder.glob(f"[!.]*{_MASK}")}

        unmasked = [photo.name for photo in photos if photo.stem not in masks]
        strange = sorted(
            file.name for stem, file in masks.items() if not (photo_folder / f"{stem}.jpg").exists()
        )

        if unmasked or strange or not photos:
            raise DataError(
                "photos and masks do not form pairs",
                where=str(mask_folder if unmasked else photo_folder),
                expected=f"for each photo NAME.jpg a mask NAME{_MASK}, and no other masks",
                got=f"{len(unmasked)} photos without a mask ({', '.join(unmasked[:3])})"
                if unmasked
                else f"{len(strange)} masks without a photo ({', '.join(strange[:3])})"
                if strange
                else "no photo",
                do="unpack train.zip and train_masks.zip again",
            )

        for photo in photos:
            mask = masks[photo.stem]
            (width, height), found = image_size(photo), image_size(mask)
            if found != (width, height):
                raise DataError(
                    "a mask has another size than its photo",
                    where=str(mask),
                    expected=f"{width} x {height}, as {photo.name}",
                    got=f"{found[0]} x {found[1]}",
                    do="replace the file by the published one",
                )

        return photos, [masks[photo.stem] for photo in photos]


def _car(photo: Path) -> str:
    return photo.stem.rpartition("_")[0] or photo.stem
