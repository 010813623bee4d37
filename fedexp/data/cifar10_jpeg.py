"""CIFAR-10's images as JPEG files in class folders: a lossy re-encoding."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedexp.data.dataset import OTHER_ROOT
from fedexp.data.image_folder import ImageFolder


@dataclass(frozen=True, kw_only=True)
class Cifar10Jpeg(ImageFolder):
    """CIFAR-10 re-encoded as ``cifar10-jpeg/{train,test}/<class>/*.jpg``.

    The split (50,000 training and 10,000 test images) and the order of classes are
    those of CIFAR-10. JPEG compression has changed the pixels. Accuracies are therefore
    close to those on CIFAR-10, but not equal.
    """

    name: ClassVar[str] = "cifar10_jpeg"
    faithful: ClassVar[bool] = False
    copy_of: ClassVar[str | None] = "cifar10"

    folder: str = "cifar10-jpeg"
    num_classes: int = 10
    shape: tuple[int, ...] = (3, 32, 32)

    def ways(self, root: Path) -> str:
        return (
            f"put the class folders (airplane ... truck) in {root / self.folder}/train and /test; "
            f"or {OTHER_ROOT}"
        )
