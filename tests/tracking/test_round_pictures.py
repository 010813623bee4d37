"""Pictures of a round.

The tests check every pixel of the file. They also check that trackers log a picture
together with the metrics of its round.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from fedexp.tracking.pictures import draw_pictures, pictures_of
from fedexp.tracking.tensorboard import TensorBoard
from fedexp.tracking.wandb import Wandb
from tests.tracking.test_trackers import ROWS, FakeRun, info


@pytest.mark.parametrize("channels", [1, 3])
def test_a_grid_is_drawn_to_the_pixel(tmp_path: Path, channels: int) -> None:
    images = torch.randint(
        256, (2, 3, channels, 20, 24), generator=torch.Generator().manual_seed(0)
    )
    draw_pictures({"later": images / 255}, tmp_path, 17)
    draw_pictures({"made": images / 255}, tmp_path, 7)
    (path,) = pictures_of(tmp_path, 7).values()
    found = np.rint(255 * imread(path))
    assert (
        found.shape[:2] == (2 * 41 - 1, 3 * 49 - 1)
        and (found[40] == 255).all()
        and (found[:, 48] == 255).all()
    )
    for row in range(2):
        for column in range(3):
            shown = found[41 * row : 41 * row + 40, 49 * column : 49 * column + 48, :3]
            pixels = np.broadcast_to(images[row, column].permute(1, 2, 0), (20, 24, 3))
            np.testing.assert_array_equal(shown, np.kron(pixels, np.ones((2, 2, 1))))
    first = path.read_bytes()
    draw_pictures({"made": images / 255}, tmp_path, 7)
    assert path.read_bytes() == first


def test_wandb_has_pictures_with_their_row_after_a_resume_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    for step in (2, 4):
        draw_pictures({"made": torch.zeros(2, 2, 1, 4, 4)}, tmp_path, step)
    run = FakeRun(0)
    monkeypatch.setattr(wandb, "init", lambda **given: run)
    logger = Wandb()
    logger.open(info(tmp_path, resumed=True), ROWS[:2])
    for row in ROWS[2:]:
        logger.log(row)
    logger.close("done", None)
    assert [row["step"] for row in run.rows if "pictures/made" in row] == [2, 4]
    picture = run.rows[3]["pictures/made"]
    assert isinstance(picture, wandb.Image) and picture.image.size == (129, 129)


def test_tensorboard_has_pictures_at_their_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    draw_pictures({"made": torch.zeros(2, 2, 1, 4, 4)}, tmp_path, 2)
    logger: Any = TensorBoard()
    logger.open(info(tmp_path), [])
    for row in ROWS[:3]:
        logger.log(row)
    logger.close("done", None)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.width) for event in events.Images("pictures/made")] == [(2, 129)]
