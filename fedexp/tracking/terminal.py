"""Tables and texts that commands print, such as those after a run and a sweep."""

from __future__ import annotations

import re
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from fedexp.tracking.numbers import number_text
from fedexp.tracking.outlet import visible

# Characters per line if the output is a file. There, a wide table is better than a
# wrapped one.
_FILE_WIDTH = 220


def console() -> Console:
    """Return a console for standard output, which may be a terminal or a file."""
    if sys.stdout.isatty():
        return VisibleConsole(highlight=False)
    return _FileConsole(width=_FILE_WIDTH, no_color=True, highlight=False)


class VisibleConsole(Console):
    """A console that shows control characters of texts as escapes."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)


class _FileConsole(VisibleConsole):
    """A console whose lines have no spaces at their end."""

    def print(self, *objects: Any, **options: Any) -> None:
        with self.capture() as captured:
            super().print(*objects, **options)
        self.file.write(re.sub(r" +$", "", captured.get(), flags=re.MULTILINE))
        self.file.flush()


def ruled_table(*columns: Column | str) -> Table:
    """Return an empty table with a line below its header."""
    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)


def escaped(value: Any) -> str:
    """Return a value as text for a table cell, with Rich's markup escaped.

    This is needed because overrides contain brackets that are not markup.
    """
    return escape(str(value))


def print_result(result: dict[str, Any], folder: Path) -> None:
    """Print the small table at the end of a run. The folder is the last line."""
    headline = result["headline"]
    name = headline["metric"]
    out = console()
    table = Table(show_header=False, box=None, pad_edge=False)
    rule = headline["rule"].replace("_", " ")
    table.add_row(name, f"[bold]{number_text(headline['value'])}[/bold]  ({rule})")

    last = result["metrics"].get(name)
    if last is not None and name in result["best"]:
        values = {"last": last, "mean of last 10": result["mean_last_10"][name]}
        if result["rounds"] < 10:
            del values["mean of last 10"]
        values["best (oracle)"] = result["best"][name]
        table.add_row("", ", ".join(f"{what} {number_text(v)}" for what, v in values.items()))

    rounds = f"{result['rounds']}, {number_text(result['local_steps'])} local steps"
    if result["rounds_to_target"] is not None:
        rounds += f"; target reached in round {result['rounds_to_target']}"
    table.add_row("rounds", rounds)

    phases = {phase: s for phase, s in result["seconds"].items() if phase != "total" and s >= 0.005}
    seconds = ", ".join(f"{phase} {s:.2f}" for phase, s in phases.items())
    table.add_row("seconds", f"{result['seconds']['total']:.2f}  ({seconds})")
    if result.get("steps_per_second") is not None:
        stacks = "Vectorized" in str(result.get("numerics"))
        share = (
            f", {result['stacked_share']:.0%} of them stacked"
            if stacks or result["stacked_share"]
            else ""
        )
        speed = number_text(round(result["steps_per_second"]))
        table.add_row("speed", f"{speed} local steps per second of training{share}")

    table.add_row("memory", f"{memory_text(result['peak_memory'])} at its peak")
    table.add_row(
        "traffic",
        f"down {size_text(result['bytes']['down'])}, up {size_text(result['bytes']['up'])}",
    )
    out.print(table)
    if result.get("test_data_in_training"):
        out.print(
            f"test data reached training: {result['test_data_in_training']}",
            style="yellow",
            markup=False,
        )

    if "profile" in result:
        _print_profile(result["profile"], out)
    out.print(f"folder: {folder}", markup=False, soft_wrap=True)


def _print_profile(report: dict[str, Any], out: Console) -> None:
    """Print the most expensive phases and torch operations of a profiled run."""
    numbers = Column("seconds", justify="right"), Column("share", justify="right")
    table = Table("profile", *numbers, box=None, pad_edge=False, header_style="bold")
    for kind in ("phases", "ops"):
        for row in report[kind]:
            table.add_row(row["name"], f"{row['seconds']:.3f}", f"{row['share']:.1%}")
        table.add_section()
    out.print(table)
    out.print(
        f"trace: {report['trace']} (open it in ui.perfetto.dev)", markup=False, soft_wrap=True
    )


def print_sweep(
    rows: Sequence[dict[str, Any]], metric: str | None = None, best: int | None = None
) -> None:
    """Print the jobs of a sweep.

    The failures are listed with their errors and with the command that runs each failed
    job again.

    Args:
        rows: Overrides, status, error, headline and folder of every job, and
            ``objective`` if there is a `metric`. Error, headline and objective may be
            None.
        metric: Name of the objective if the sweep optimised one.
        best: Number of the job with the best objective, or None.
    """
    out = console()
    names = ["job", "overrides", "status", "headline", *([] if metric is None else [metric])]
    columns = [Column(name, overflow="fold") for name in names]
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    shared = [
        o
        for o in rows[0]["overrides"]
        if len(rows) > 1 and all(o in row["overrides"] for row in rows)
    ]
    if shared:
        out.print(f"all jobs: {' '.join(shared)}", markup=False, soft_wrap=True)
    for number, row in enumerate(rows):
        own = " ".join(o for o in row["overrides"] if o not in shared)
        cells = [str(number), escaped(own), row["status"], headline_text(row["headline"])]
        if metric is not None:
            value = row["objective"]
            cells.append("-" if value is None else number_text(value))
        table.add_row(*cells)

    out.print(table)
    if best is not None:
        again = shlex.join(rows[best]["overrides"])
        out.print(f"best: job {best}, fedexp {again}", markup=False, soft_wrap=True)

    counts = Counter(row["status"] for row in rows)
    out.print(", ".join(f"{number} {status}" for status, number in sorted(counts.items())))

    bad = [row for row in rows if row["status"] in ("failed", "damaged")]
    errors = Counter((row["status"], row["error"]) for row in bad)

    for (status, error), number in errors.most_common():
        out.print(f"{number} {status}: {error}", style="red", markup=False)
        for row in bad:
            if (row["status"], row["error"]) == (status, error):
                damaged = status == "damaged"
                again = shlex.join([*row["overrides"], *(["reuse=false"] if damaged else [])])
                out.print(f"  again: fedexp {again}", markup=False, soft_wrap=True)
                log = f"files: {row['folder']}" if damaged else f"log:   {row['folder']}/error.txt"
                out.print(f"  {log}", markup=False, soft_wrap=True)


def headline_text(headline: Mapping[str, Any] | None) -> str:
    """Return the metric and the value of a headline, or "-" if there is none."""
    return f"{headline['metric']} {number_text(headline['value'])}" if headline else "-"


def memory_text(peak: Mapping[str, int]) -> str:
    """Return peak memory, given in bytes, as text: RAM and, if measured, GPU memory."""
    gpu = f" and {size_text(peak['gpu'])} on the GPU" if "gpu" in peak else ""
    return size_text(peak["ram"]) + gpu


def size_text(count: float) -> str:
    """Return a number of bytes as text with a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
