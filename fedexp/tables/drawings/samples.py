"""Images that the table's conditional VAEs draw of every class, from the same latent codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedexp.core.build import require
from fedexp.core.seeds import torch_generator
from fedexp.tables import canvas
from fedexp.tables.drawing import Drawing, DrawnRun
from fedexp.tables.drawings.stored import by_row, delivered
from fedexp.tables.report import Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedexp.core.models import Weights

_GAP = 0.08  # between images, as a part of their width
_SPACE = 0.35  # between models


@dataclass(frozen=True)
class Samples(Drawing):
    """A block of rows a column of the table, a column a class; the images are the pixels' probabilities.

    Args:
        codes: of the latent space, drawn from N(0, I): rows of a block.
        model: for columns whose runs deliver one model a client: which client's; the first's if absent.
        seed: of the codes.
    """

    codes: int = 3
    model: dict[str, int] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.codes >= 1, f"codes must be at least 1, got {self.codes}")

    def draw(self, runs: Sequence[DrawnRun]) -> tuple[Picture, ...]:
        with canvas.drawing():
            return tuple(self._picture(where, list(group.values())) for where, group in by_row(runs))

    def _picture(self, where: str, runs: Sequence[DrawnRun]) -> Picture:
        blocks = [self.images(delivered(run)[self.model.get(run.method, 0)]) for run in runs]
        title = f"Images of each class from the same {self.codes} latent codes, by model{where and f' ({where})'}"
        name = f"samples-{where}".replace(" ", "-").replace(",", "") if where else "samples"
        return canvas.picture(name, title, _figure(blocks, [run.label for run in runs]))

    def images(self, model: Weights) -> Tensor:
        """(codes, classes, channels, height, width) in [0, 1], drawn by a conditional VAE's decoder."""
        from fedexp.models.cvae import decoder_of, generate

        decoder = decoder_of(model)
        given = dict(decoder.spec.kwargs)
        classes = given["num_classes"]
        z = torch.randn(self.codes, given["latent"], generator=torch_generator(self.seed, "latent codes"))
        labels = torch.arange(classes).repeat(self.codes)
        drawn = generate(decoder, labels, z.to(next(iter(decoder.params.values())).dtype).repeat_interleave(classes, 0))
        return drawn.reshape(self.codes, classes, *drawn.shape[1:])


def montage(images: Tensor, gap: int) -> Tensor:
    """(rows, columns, 1 or 3, h, w) in [0, 1] as one (height, width, 4) image, transparent in gaps of `gap` pixels."""
    rows, columns, _, h, w = images.shape
    sheet = torch.zeros(rows * (h + gap) - gap, columns * (w + gap) - gap, 4)
    for r in range(rows):
        for c in range(columns):
            place = sheet[r * (h + gap) : r * (h + gap) + h, c * (w + gap) : c * (w + gap) + w]
            place[..., :3] = images[r, c].permute(1, 2, 0)  # one channel is all three
            place[..., 3] = 1
    return sheet


def _figure(blocks: Sequence[Tensor], labels: Sequence[str]) -> Figure:
    codes, classes, _, h, w = blocks[0].shape
    gap = max(1, round(_GAP * w))
    sheets = [montage(block, gap) for block in blocks]
    height, width = sheets[0].shape[:2]
    inches = 5.0 / width  # of a pixel
    figure = canvas.figure(5.9, (height * inches + _SPACE * w * inches) * len(blocks) + 0.3)
    for at, (sheet, label) in enumerate(zip(sheets, labels, strict=True)):
        axes = canvas.axes(figure, len(sheets), 1, at + 1)
        axes.imshow(sheet.numpy(), interpolation="none")
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labeltop=at == 0, labelbottom=False)
        axes.set_xticks([c * (w + gap) + w / 2 for c in range(classes)], [str(c) for c in range(classes)])
        axes.set_yticks([(codes * (h + gap) - gap) / 2], [canvas.plain(label)])
    return figure
