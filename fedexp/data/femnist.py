"""FEMNIST: handwritten characters with their writers, from LEAF's JSON files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from fedexp.core.build import require
from fedexp.core.errors import DataError
from fedexp.data.dataset import OTHER_ROOT, Arrays, Dataset

DIGITS, ALL = 10, 62  # classes: digits first, then capitals, then small letters


@dataclass(frozen=True, kw_only=True)
class Femnist(Dataset):
    """FEMNIST in the format of LEAF (Caldas et al. 2018).

    The files are ``femnist/{train,test}/*.json`` with the keys ``users``,
    ``num_samples`` and ``user_data``. LEAF's pixels are 8-bit grey values divided by
    255. They are multiplied by 255 again and rounded. Strokes are dark, and the
    background is white. ``num_classes=10`` keeps only the digits. Writers are numbered
    in the sorted order of their names. The test set consists of the test samples of all
    writers.
    """

    cache_version: ClassVar[int] = 1
    has_owners: ClassVar[bool] = True
    selects: ClassVar[frozenset[str]] = frozenset({"num_classes"})

    num_classes: int = ALL
    shape: tuple[int, ...] = (1, 28, 28)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.num_classes in (DIGITS, ALL),
            "num_classes must be 62 (all characters) or 10 (only digits)",
        )
        require(self.shape == (1, 28, 28), "shape must be [1, 28, 28], that of LEAF's images")

    def expected_files(self, root: Path) -> list[Path]:
        return [root / "femnist" / split for split in ("train", "test")]

    def ways(self, root: Path) -> str:
        return (
            "prepare LEAF's femnist (github.com/TalwalkarLab/leaf, data/femnist: "
            "./preprocess.sh -s niid --sf 1.0 -k 0 -t sample) "
            f"and put its data/train/*.json and data/test/*.json in {root / 'femnist'}; "
            f"or {OTHER_ROOT}"
        )

    def read(self, root: Path, download: bool) -> Arrays:
        train, test = (self._split(folder) for folder in self.expected_files(root))
        place = {user: i for i, user in enumerate(sorted({user for user, _, _ in train}))}
        owner = np.repeat([place[user] for user, _, _ in train], [len(y) for _, _, y in train])
        train_x, train_y, test_x, test_y = (
            torch.from_numpy(np.concatenate([part[column] for part in split]))
            for split in (train, test)
            for column in (1, 2)
        )
        return Arrays(train_x, train_y, test_x, test_y, torch.from_numpy(owner.astype(np.int64)))

    def _split(self, folder: Path) -> list[tuple[str, np.ndarray, np.ndarray]]:
        """Return (user, images, labels) of each user who has samples.

        Images have shape (n, 1, 28, 28), uint8, and labels (n,), int64.
        """
        files = sorted(folder.glob("*.json"))
        parts = [part for file in files for part in self._file(file)]
        if not parts:
            raise DataError(
                "LEAF's files contain no samples",
                where=str(folder),
                expected="*.json with users, num_samples and user_data",
                got=f"{len(files)} .json files",
                do="put LEAF's files there",
            )
        return parts

    def _file(self, file: Path) -> list[tuple[str, np.ndarray, np.ndarray]]:
        def fail(got: object) -> DataError:
            return DataError(
                "the file is not one of LEAF's femnist",
                where=str(file),
                expected="users, num_samples and user_data, which has x (784 numbers in 0..1 each) "
                "and y (labels 0..61) for each user",
                got=got,
                do="prepare the data with LEAF again",
            )

        try:
            content: dict[str, Any] = json.loads(file.read_text())
            counts = dict(zip(content["users"], content["num_samples"], strict=True))
            found = []
            for user, count in counts.items():
                data = content["user_data"][user]
                x = np.asarray(data["x"], np.float64).reshape(-1, 784)
                y = np.asarray(data["y"], np.int64)

                if not len(x) == len(y) == count:
                    raise fail(
                        f"user {user}: {len(x)} images, {len(y)} labels, num_samples {count}"
                    )
                if count and not (x.min() >= 0 and x.max() <= 1 and y.min() >= 0 and y.max() < ALL):
                    raise fail(
                        f"user {user}: pixels {x.min()} .. {x.max()}, labels {y.min()} .. {y.max()}"
                    )

                is_known = y < self.num_classes
                if is_known.any():
                    images = np.rint(x[is_known] * 255).astype(np.uint8).reshape(-1, 1, 28, 28)
                    found.append((str(user), images, y[is_known]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise fail(f"{type(error).__name__}: {error}") from error
        return found
