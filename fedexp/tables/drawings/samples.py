"""Images that the table's conditional VAEs draw of every class, from the same latent codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedexp.core.build import require
from fedexp.core.net import Net
from fedexp.core.seeds import torch_generator
from fedexp.core.weights import Weights
from fedexp.tables.drawing import Drawing, DrawnRun
from fedexp.tables.drawings.stored import by_row, delivered
from fedexp.tables.report import canvas
from fedexp.tables.report.report import Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GAP = 0.08  # between images, as a part of their width
_SPACE = 0.35  # between models


@dataclass(frozen=True)
class SamplesDrawing(Drawing):
    """A block of rows a column of the table, a column a class; the images are the pixels' probabilities.

    Args:
        codes: of the latent space, drawn from N(0, I): rows of a block.
        methods: columns that are drawn; all if empty.
        model: for columns whose runs deliver one model a client: which client's; the first's if absent.
        judge: a column whose model reads the images, as that class whose bound on log p(x | y) is highest; the share that it
            reads as what they were to be, of `judged` codes and all classes, is written beside each block.
        seed: of the codes.
    """

    codes: int = 3
    methods: tuple[str, ...] = ()
    model: dict[str, int] = field(default_factory=dict)
    judge: str | None = None
    judged: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.codes >= 1, f"codes must be at least 1, got {self.codes}")
        require(self.judged >= 1, f"judged must be at least 1, got {self.judged}")

    def draw(self, runs: Sequence[DrawnRun], notes: Sequence[str] = ()) -> tuple[Picture, ...]:
        with canvas.use_style():
            wanted = [run for run in runs if not self.methods or run.method in self.methods]
            return tuple(self._picture(where, group, notes) for where, group in by_row(wanted))

    def _picture(self, where: str, group: Mapping[str, DrawnRun], notes: Sequence[str]) -> Picture:
        models = {
            method: delivered(run)[self.model.get(method, 0)] for method, run in group.items()
        }
        labels = {method: canvas.plot_label(run.label) for method, run in group.items()}
        title = f"Images of each class from the same {self.codes} latent codes, by model"
        if self.judge in models:
            judge = models[self.judge]
            for method, model in models.items():
                generated = self.images(model, self.judged)
                right = read(judge, generated.flatten(0, 1)) == torch.arange(
                    generated.shape[1]
                ).repeat(self.judged)
                labels[method] += f"\n{100 * float(right.double().mean()):.0f} %"
            title += f"; beside them the share of images that {group[self.judge].label} reads as their class"
        name = canvas.picture_name("samples", where)
        blocks = [self.images(model, self.codes) for model in models.values()]
        return canvas.render_picture(
            name,
            title + (where and f" ({where})"),
            _sheet_figure(blocks, list(labels.values())),
            notes,
        )

    def images(self, model: Weights, codes: int) -> Tensor:
        """(codes, classes, channels, height, width) in [0, 1], drawn by a conditional VAE's decoder."""
        from fedexp.models.cvae import decoder_of, generate

        decoder = decoder_of(model)
        given = dict(decoder.spec.kwargs)
        classes = given["num_classes"]
        z = torch.randn(
            codes, given["latent"], generator=torch_generator(self.seed, "latent codes")
        )
        labels = torch.arange(classes).repeat(codes)
        generated = generate(
            decoder,
            labels,
            z.to(next(iter(decoder.params.values())).dtype).repeat_interleave(classes, 0),
        )
        return generated.reshape(codes, classes, *generated.shape[1:])


@torch.no_grad()
def read(judge: Weights, images: Tensor) -> Tensor:
    """(n, channels, height, width) in [0, 1] -> (n,), the class whose bound on log p(x | y) is highest for a conditional VAE."""
    given = dict(judge.spec.kwargs)
    x = images
    if given.get("mean"):
        mean, std = (
            torch.tensor(given[key], dtype=x.dtype).reshape(-1, 1, 1) for key in ("mean", "std")
        )
        x = (x - mean) / std
    net = Net(judge.spec, x.device, x.dtype)
    net.train(False)
    return net(judge.params, judge.buffers, x).argmax(1)


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


def _sheet_figure(blocks: Sequence[Tensor], labels: Sequence[str]) -> Figure:
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
        axes.set_xticks(
            [c * (w + gap) + w / 2 for c in range(classes)], [str(c) for c in range(classes)]
        )
        axes.set_yticks([(codes * (h + gap) - gap) / 2], [label])
    return figure
