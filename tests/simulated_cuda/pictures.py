"""A data set of random pictures of any size, for the runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from fedexp.data.dataset import Arrays
from fedexp.data.synthetic import Synthetic


@dataclass(frozen=True, kw_only=True)
class Pictures(Synthetic):
    """A data set with the clusters of `Synthetic` as pictures.

    Args:
        sizes: Channels, height and width. `features` is their product.
    """

    sizes: tuple[int, ...] = (1, 8, 8)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "shape", tuple(self.sizes))

    def read(self, root: Path, download: bool) -> Arrays:
        flat = super().read(root, download)
        return replace(
            flat,
            train_x=flat.train_x.view(-1, *self.shape),
            test_x=flat.test_x.view(-1, *self.shape),
        )


def pictures(channels: int, height: int, width: int, samples: int) -> list[str]:
    """Return the overrides that choose this data set."""
    return [
        "dataset=synthetic",
        f"dataset._target_={__name__}.Pictures",
        f"+dataset.sizes=[{channels},{height},{width}]",
        f"dataset.features={channels * height * width}",
        f"dataset.samples={samples}",
        f"dataset.test_samples={min(samples, 40)}",
    ]
