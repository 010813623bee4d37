"""Measure how seconds per round grow with clients per round and model size.

    python scripts/bench_growth.py [--engines serial vectorized workers] [--repeats 3]
        [--write FILE.md] [--draw FILE.json]

All runs are FedAvg on Fashion-MNIST. Every client has 60 samples and takes 3 steps with
batches of 20. The upper panel of the picture has an MLP 784-200-10 with 10 to 1,000
clients per round. The lower panel has 10 clients per round and MLPs 784-h-h-10 with
10 k to 10 M parameters. The processes take turns: the bare loop (bare_loop.py), the
first engine, the second engine and so on, then the bare loop again. Each process gives
the median of its rounds without the first round. A number is the median of these
medians over repeats. The script writes bench_growth.md, .json and .png in
scripts/results, or beside the file of --write. The first two are written after every
point, so an interrupted script replaces earlier results by incomplete ones. With --draw
it only draws numbers that were measured before.
"""

from __future__ import annotations

import json
import statistics
import textwrap
from pathlib import Path
from typing import Any

import alternate

COHORTS = (10, 30, 100, 300, 1000)
# Width h of the two hidden layers, by the approximate number of parameters
HIDDEN = {10_000: 13, 100_000: 115, 1_000_000: 680, 10_000_000: 2790}
FEW = 10  # clients per round in the panel in which models grow
BASE = ["partition=iid", "clients=1000", "local.batch_size=20"]
BARE = "bare loop"
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")
MARKERS = ("o", "s", "D", "^", "v", "P")

# A panel and a value on its x axis, such as ("clients", 300) or ("parameters",
# 1_000_000)
Point = tuple[str, int]


def parameters(hidden: int) -> int:
    """Return the number of parameters of an MLP 784-h-h-10 with biases."""
    return (784 + 1) * hidden + (hidden + 1) * hidden + (hidden + 1) * 10


def points() -> dict[Point, tuple[list[str], list[str], int]]:
    """Return every point to measure.

    Returns:
        For each point, the bare loop's options, fedexp's overrides and the number of
        rounds.
    """
    found: dict[Point, tuple[list[str], list[str], int]] = {}
    for m in COHORTS:
        rounds = max(4, min(16, 1500 // m))
        found["clients", m] = (
            ["--cohort", str(m)],
            ["model=mlp_784_200", f"clients_per_round={m}"],
            rounds,
        )

    for hidden in HIDDEN.values():
        widths = ["model=mlp", f"model.hidden=[{hidden},{hidden}]", f"clients_per_round={FEW}"]
        size = parameters(hidden)
        rounds = 16 if size < 500_000 else 6
        found["parameters", size] = (
            ["--cohort", str(FEW), "--hidden", str(hidden), str(hidden)],
            widths,
            rounds,
        )
    return found


def measure(options: Any, heading: str) -> None:
    """Measure every point, and write a Markdown table and JSON after each point.

    The table is the file of --write. The JSON file is beside it. It has the seconds per
    round by line (bare loop or engine) and point.
    """
    lines, path = [BARE, *options.engines], options.write
    columns = ["clients per round", "parameters", *(f"{line} s/round" for line in lines)]
    table = alternate.Table(path, heading, columns)
    stored: dict[str, list[list[Any]]] = {line: [] for line in lines}

    for point, (loop, overrides, rounds) in points().items():
        seen: dict[str, list[float]] = {line: [] for line in lines}
        for _ in range(options.repeats):
            base = alternate.bare(options.data, "W1", options.threads, rounds, *loop)
            seen[BARE].append(statistics.median(base["seconds"][1:]))
            for engine in options.engines:
                more = [*BASE, *overrides, *alternate.chosen(engine)]
                mine = alternate.fedexp(options.data, options.threads, rounds, *more)
                if mine["steps"] != base["steps"]:
                    raise SystemExit(
                        f"{point} {engine}: steps per round differ: "
                        f"{base['steps']}, {mine['steps']}"
                    )
                seen[engine].append(statistics.median(mine["seconds"][1:]))

        medians = {line: statistics.median(seen[line]) for line in lines}
        kind, x = point
        m, size = (x, parameters_of_w1()) if kind == "clients" else (FEW, x)
        table.row([f"{m:,}", f"{size:,}", *(f"{medians[line]:.4f}" for line in lines)])
        for line in lines:
            stored[line].append([*point, medians[line]])
        path.with_suffix(".json").write_text(
            json.dumps({"heading": heading, "seconds": stored}, indent=1) + "\n"
        )


def parameters_of_w1() -> int:
    return (784 + 1) * 200 + (200 + 1) * 10


def draw(stored: dict[str, Any], path: Path) -> None:
    """Draw two panels with logarithmic axes.

    The bare loop's line is dashed and black.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    from fedexp.tables.report.canvas import smallest_font
    from fedexp.tables.report.picture_sizes import SMALLEST_FONT

    panels = {
        "clients": ("clients per round", "MLP 784-200-10, 159,010 parameters"),
        "parameters": ("parameters", f"MLP 784-h-h-10, {FEW} clients per round"),
    }

    figure = Figure(figsize=(7.4, 8.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        "Seconds per round of FedAvg on Fashion-MNIST: 60 samples per client, 3 steps of batch 20",
        fontsize=11,
    )

    for position, (kind, (label, title)) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(2, 1, position)
        lines = [line for line in stored["seconds"] if line != BARE]
        for line, colour, marker in zip(lines, COLOURS, MARKERS, strict=False):
            curve(
                axes,
                stored["seconds"][line],
                kind,
                line,
                color=colour,
                marker=marker,
                linewidth=1.8,
            )
        curve(
            axes,
            stored["seconds"][BARE],
            kind,
            BARE,
            color="black",
            marker="x",
            linewidth=1.6,
            linestyle="--",
        )

        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(title, fontsize=11)
        axes.set_xlabel(label, fontsize=11)
        axes.set_ylabel("seconds per round (lower is better)", fontsize=11)

        axes.set_xticks([x for name, x, _ in stored["seconds"][BARE] if name == kind])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short(x)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))

        axes.tick_params(labelsize=11)
        axes.grid(visible=True, which="major", alpha=0.35)
        axes.grid(visible=True, which="minor", axis="y", alpha=0.15)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=11, frameon=False, loc="upper left")

    figure.supxlabel(textwrap.fill(stored["heading"], 100), fontsize=8.5, color="0.35")
    metadata = {"Software": None, SMALLEST_FONT: f"{smallest_font(figure):g}"}
    figure.savefig(path, dpi=160, metadata=metadata)


def curve(axes: Any, rows: list[list[Any]], kind: str, label: str, **style: Any) -> None:
    xs, ys = zip(*[(x, seconds) for name, x, seconds in rows if name == kind], strict=True)
    axes.plot(xs, ys, label=label, markersize=6, **style)


def short(x: float) -> str:
    """Format a number as ``300``, ``1,000``, ``104 k`` or ``1 M``."""
    if x >= 1e6:
        return f"{x / 1e6:.2g} M"
    return f"{x / 1e3:.3g} k" if x >= 1e4 else f"{x:,.0f}"


def main() -> None:
    parser = alternate.parser(__doc__)
    parser.set_defaults(write=alternate.RESULTS / "bench_growth.md")
    parser.add_argument(
        "--engines", nargs="+", default=alternate.ENGINES, metavar="ENGINE[,OVERRIDE...]"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--draw", type=Path, metavar="JSON", help="draw these numbers without measuring"
    )

    options = parser.parse_args()

    figures = options.draw or options.write.with_suffix(".json")
    if options.draw is None:
        facts = f"{options.threads} threads, medians of {options.repeats} alternating processes"
        measure(options, alternate.heading(facts))
    draw(json.loads(figures.read_text()), figures.with_suffix(".png"))
    print(f"picture: {figures.with_suffix('.png')}")


if __name__ == "__main__":
    main()
