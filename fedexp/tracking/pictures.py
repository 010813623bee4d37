"""Pictures that a method makes after a step, stored in ``pictures`` of the run folder.

Each picture is one PNG with a grid of images.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

_WHITE = 1.0
# Small images are enlarged by a whole factor. It is the largest factor for which each
# side has at most this many pixels.
_SIDE = 64


def draw_pictures(grids: Mapping[str, Tensor], folder: Path, step: int) -> None:
    """Write ``pictures/<name>_<step>.png`` in the run folder.

    Args:
        grids: Grids of images in [0, 1] by name. Each grid has the shape (rows,
            columns, channels, height, width). Images with 3 channels are in colour. For
            other images, the mean of the channels is shown in grey. Small images are
            enlarged. White lines separate the images.
        folder: Folder of the run.
        step: Number of the step as in metrics.jsonl, from 1.
    """
    from matplotlib.image import imsave

    for name, grid in grids.items():
        factor = max(1, _SIDE // max(grid.shape[-2:]))
        images = (
            grid.detach().float().cpu().repeat_interleave(factor, -1).repeat_interleave(factor, -2)
        )
        images = functional.pad(images, (0, 1, 0, 1), value=_WHITE)

        rows, columns, c, height, width = images.shape
        sheet = images.permute(0, 3, 1, 4, 2).reshape(rows * height, columns * width, c)[:-1, :-1]
        if c != 3:
            sheet = sheet.mean(2, keepdim=True).expand(-1, -1, 3)
        path = folder / "pictures" / f"{name}_{step}.png"
        path.parent.mkdir(exist_ok=True)
        imsave(path, (sheet.clamp(0, 1) * 255).round().to(torch.uint8).numpy())


def pictures_of(folder: Path, step: int) -> dict[str, Path]:
    """Return the files that `draw_pictures` wrote for `step`, by name."""
    paths = sorted((folder / "pictures").glob(f"*_{step}.png"))
    return {path.stem.rpartition("_")[0]: path for path in paths}
