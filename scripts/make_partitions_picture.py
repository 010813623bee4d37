"""Draw the picture of all partitions in docs/guides/clients.md.

    python scripts/make_partitions_picture.py

Each panel has the numbers of samples of 10 clients and 10 classes, on the data set
digits. The page states the size of the letters, 8, and the width in points, 547.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedexp.config.compose import compose
from fedexp.data.picture import draw_map
from fedexp.running.experiment import load_data

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "assets" / "partitions.png"
COLUMNS = 5
PAIRS = ["[0,1]", "[2,3]", "[4,5]", "[6,7]", "[8,9]"]
# The keys of each partition. Those that need a file or owners of samples are left out.
PANELS = {
    "iid": [],
    "quantity": ["alpha=0.5"],
    "dirichlet": ["alpha=0.1"],
    "dirichlet_per_client": ["alpha=0.1"],
    "dirichlet_blocks": ["alpha=0.1"],
    "dirichlet_refilled": ["alpha=0.1"],
    "pathological": ["classes_per_client=2"],
    "pathological_refilled": ["classes_per_client=2"],
    "shards": ["shards=2"],
    "label_groups": [f"groups=[{','.join(2 * PAIRS)}]"],
}


def main() -> None:
    """Load the split of each partition and draw it."""
    rows = -(-len(PANELS) // COLUMNS)
    figure = Figure(figsize=(7.6, 2.0 * rows), layout="constrained")
    FigureCanvasAgg(figure)

    panels = figure.subplots(rows, COLUMNS).ravel()
    for axes, (name, keys) in zip(panels, PANELS.items(), strict=True):
        overrides = [f"partition={name}", *(f"partition.{key}" for key in keys)]
        counts = load_data(compose([*overrides, "clients=10"])).class_counts()
        draw_map(axes, counts, np.arange(10), counts, cell=(0.11, 0.11))
        shown = [key for key in keys if len(key) < 24]
        axes.set_title("\n".join([name, *shown]), fontsize=8, loc="left")

    figure.savefig(PICTURE, format="png", dpi=200, metadata={"Software": None})


if __name__ == "__main__":
    main()
