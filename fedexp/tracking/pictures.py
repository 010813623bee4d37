"""Pictures of a round: grids of images, a PNG each, under ``pictures`` in the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

_WHITE = 1.0


def draw_pictures(grids: Mapping[str, Tensor], folder: Path, step: int) -> None:
    """``pictures/<name>_<step>.png`` in the run `folder`, for the step with that number in metrics.jsonl.

    Args:
        grids: by name, (rows, columns, c, H, W) images in [0, 1]: of 3 channels in colour, else the grey mean of all. A pixel
            of an image is one of the picture, with a white line between images.
    """
    from matplotlib.image import imsave

    for name, grid in grids.items():
        images = functional.pad(grid.detach().float().cpu(), (0, 1, 0, 1), value=_WHITE)
        rows, columns, c, height, width = images.shape
        sheet = images.permute(0, 3, 1, 4, 2).reshape(rows * height, columns * width, c)[:-1, :-1]
        if c != 3:
            sheet = sheet.mean(2, keepdim=True).expand(-1, -1, 3)
        path = folder / "pictures" / f"{name}_{step}.png"
        path.parent.mkdir(exist_ok=True)
        imsave(path, (sheet.clamp(0, 1) * 255).round().to(torch.uint8).numpy())


def pictures_of(folder: Path, step: int) -> dict[str, Path]:
    """The files that `draw_pictures` wrote for `step`, by name."""
    paths = sorted((folder / "pictures").glob(f"*_{step}.png"))
    return {path.stem.rpartition("_")[0]: path for path in paths}
