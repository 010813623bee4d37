"""DomainNet: images of 345 classes in six domains (image styles)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedexp.core.build import require
from fedexp.core.errors import DataError
from fedexp.data.dataset import OTHER_ROOT, Arrays, Dataset
from fedexp.data.images import decode_images, require_image_shape

_Entry = tuple[Path, int]


@dataclass(frozen=True, kw_only=True)
class DomainNet(Dataset):
    """DomainNet with the publisher's split lists (Peng et al. 2019).

    The images are ``domainnet/<domain>/<class>/*``. The lists are
    ``domainnet/<domain>_{train,test}.txt``. A line of a list consists of an image path
    relative to ``domainnet/`` and a label. Images are resized to `shape` and stored as
    bytes: 150 kB each at 224 x 224. The owner of a sample is the position of its domain
    in `domains`. The test set consists of the images in the test lists of all domains.

    Args:
        domains: The domains that are read.
        per_class: Largest number of images of each class, domain and split. The first
            images of a list are used. None means all.
    """

    cache_version: ClassVar[int] = 1
    has_owners: ClassVar[bool] = True
    selects: ClassVar[frozenset[str]] = frozenset({"num_classes", "per_class", "domains"})

    num_classes: int = 345
    shape: tuple[int, ...] = (3, 224, 224)
    domains: tuple[str, ...] = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
    per_class: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_image_shape(self.shape)
        require(
            len(self.domains) == len(set(self.domains)) > 0,
            "domains must name at least one, each once",
        )
        require(
            self.per_class is None or self.per_class >= 1,
            "per_class must be at least 1, or null for all",
        )

    def may_share(self, other: Dataset) -> bool:
        return (
            isinstance(other, DomainNet)
            and super().may_share(other)
            and not {*self.domains}.isdisjoint(other.domains)
        )

    def expected_files(self, root: Path) -> list[Path]:
        home = root / "domainnet"
        return [
            place
            for domain in self.domains
            for place in (home / domain, home / f"{domain}_train.txt", home / f"{domain}_test.txt")
        ]

    def ways(self, root: Path) -> str:
        return (
            "unpack the domains' archives and put the split lists (ai.bu.edu/M3SDA) "
            f"in {root / 'domainnet'}; "
            f"or {OTHER_ROOT}"
        )

    def read(self, root: Path, download: bool) -> Arrays:
        home = root / "domainnet"
        names: dict[int, str] = {}  # class name by label
        splits = [
            [self._entries(home, home / f"{domain}_{split}.txt", names) for domain in self.domains]
            for split in ("train", "test")
        ]

        if sorted(names) != list(range(self.num_classes)):
            raise DataError(
                "the number of classes is not dataset.num_classes",
                where=str(home),
                expected=f"labels 0 to {self.num_classes - 1}, each in at least one list",
                got=f"{len(names)} labels, {min(names, default=0)} to {max(names, default=0)}",
                do=f"set dataset.num_classes={len(names)}, or complete the lists",
            )

        def decoded(parts: list[list[_Entry]]) -> tuple[Tensor, Tensor]:
            entries = [entry for part in parts for entry in part]
            x = torch.from_numpy(decode_images([file for file, _ in entries], self.shape))
            return x, torch.tensor([label for _, label in entries], dtype=torch.int64)

        owner = np.repeat(
            np.arange(len(self.domains), dtype=np.int64), [len(part) for part in splits[0]]
        )
        return Arrays(*decoded(splits[0]), *decoded(splits[1]), train_owner=torch.from_numpy(owner))

    def _entries(self, home: Path, file: Path, names: dict[int, str]) -> list[_Entry]:
        entries: list[_Entry] = []
        taken: Counter[int] = Counter()
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            if not line.strip():
                continue
            path, _, text = line.strip().rpartition(" ")

            label = int(text) if text.isdecimal() and path.count("/") == 2 else -1
            kind = path.split("/")[1] if label >= 0 else ""
            if label < 0 or names.setdefault(label, kind) != kind:
                raise DataError(
                    "a line of a split list does not name an image with its class",
                    where=f"{file}, line {number}",
                    expected=f"domain/class/file label, label {label} being {names[label]}"
                    if label >= 0
                    else "domain/class/file label",
                    got=line,
                    do="get the publisher's list again",
                )

            if self.per_class is None or taken[label] < self.per_class:
                taken[label] += 1
                entries.append((home / path, label))

        return entries
