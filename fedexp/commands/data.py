"""The ``fedexp-data`` command: list, show, prepare."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fedexp.commands.errors import Parser, run_guarded
from fedexp.core.errors import ConfigError
from fedexp.core.paths import user_path
from fedexp.tracking.terminal import console, escaped, ruled_table

if TYPE_CHECKING:
    from fedexp.core.data import FederatedData
    from fedexp.core.resolved_config import ResolvedConfig


def main() -> None:
    """Run the command as a console script."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: list[str]) -> int:
    """Run the command line.

    Returns:
        The exit code. It is 2 for errors of the user, which are printed without a
        traceback, and 1 if the output cannot be written.
    """
    return run_guarded(lambda: parser().run(arguments), needs_output=True)


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(prog="fedexp-data", description="Data sets and partitions of fedexp.")
    commands = parser.add_subparsers(required=True, dest="command")
    show = commands.add_parser(
        "show",
        command=_show,
        help="print the client x class table of an experiment and draw its picture",
        epilog="example: fedexp-data show dataset=mnist partition=dirichlet partition.alpha=0.1 "
        "clients=20 seed_data=1",
    )

    show.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="as for fedexp")
    show.add_argument(
        "--out", type=Path, default=Path("partition.png"), help="the picture (default: %(default)s)"
    )
    prepare = commands.add_parser(
        "prepare", command=_prepare, help="fetch a data set's missing files, check and decode them"
    )
    prepare.add_argument("dataset", help="a name that 'fedexp-data list' prints")
    prepare.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="as for fedexp, e.g. dataset.folder=birds",
    )

    prepare.add_argument(
        "--root", help="data root (default: data_root, i.e. FEDEXP_DATA or ./data)"
    )
    listing = commands.add_parser(
        "list", command=_list, help="list the data sets and whether their files are there"
    )
    listing.add_argument(
        "--root", help="data root (default: data_root, i.e. FEDEXP_DATA or ./data)"
    )

    return parser


def _show(options: argparse.Namespace) -> int:
    import torch

    from fedexp.config.compose import compose
    from fedexp.data.picture import draw_partition
    from fedexp.data.table import partition_table
    from fedexp.running.experiment import Experiment
    from fedexp.running.remarks import limit_remarks

    config = compose(options.overrides)
    experiment = Experiment.of(config)
    data = experiment.load(torch.device("cpu"))
    counts = data.class_counts()
    out = console()
    title = _split_title(config)
    out.print(title, style="bold", markup=False)
    out.print(partition_table(counts))
    for line in _data_lines(data, **config["feature_skew"]):
        out.print(line, soft_wrap=True, markup=False)
    for remark in limit_remarks(experiment):
        out.print(f"note       {remark}", soft_wrap=True, markup=False)
    draw_partition(counts, options.out, title)
    out.print(f"picture    {options.out}", soft_wrap=True, markup=False)

    return 0


def _split_title(config: ResolvedConfig) -> str:
    choices = config.choices
    own = [
        f"{key}={value}"
        for key, value in config["partition"].items()
        if key in ("alpha", "gated", "shards", "classes_per_client")
    ]
    scheme = " ".join([str(choices.get("partition", "")), *own])
    return (
        f"{choices.get('dataset', '')}, {scheme}, clients={config['clients']}, "
        f"seed_data={config['seed_data']}"
    )


def _data_lines(data: FederatedData, kind: str, strength: float) -> list[str]:
    from fedexp.data.partition import CutPartition

    lines = [f"train      {len(data.train):,} samples in the pool"]
    if data.val is not None:
        of_clients = isinstance(data.partition, CutPartition)
        held = f"{len(data.val):,} are held out for validation"
        lines[0] += f", of which {held}" if of_clients else f"; {held} before the split"

    lines.append(f"test       {len(data.test):,} samples")
    if data.proxy is not None:
        labelled = "labelled" if bool((data.proxy.y >= 0).all()) else "unlabelled"
        split = f"samples from the {data.proxy_source} split" + (
            f" of {data.proxy_dataset}" if data.proxy_dataset else ""
        )
        what = "images of noise" if data.proxy_source == "noise" else split
        lines.append(f"proxy      {len(data.proxy):,} {labelled} {what}")

    lines.append(
        "drawn      " + ", ".join(f"{key}={value}" for key, value in data.partition.info.items())
    )
    if kind != "none":
        last = data.partition.num_clients - 1
        lines.append(
            f"inputs     {kind}, with a strength from 0 for client 0 "
            f"to {strength:g} for client {last}"
        )
    lines.append(f"sha256     {data.partition.sha256} (partition)")

    return lines


def _prepare(options: argparse.Namespace) -> int:
    import numpy as np

    from fedexp.config.compose import compose
    from fedexp.core.build import build
    from fedexp.data.dataset import Dataset

    _, equals, name = options.dataset.partition("=")
    if equals:
        raise ConfigError(
            f"'{options.dataset}' is not a data set's name", do=f"fedexp-data prepare {name}"
        )

    config = compose([f"dataset={options.dataset}", *options.overrides])
    root = _data_root(options.root, config)
    dataset = build(Dataset, config["dataset"], "dataset")  # type: ignore[type-abstract]
    arrays = dataset.load(root, download=True)

    for split, x, y in (
        ("train", arrays.train_x, arrays.train_y),
        ("test", arrays.test_x, arrays.test_y),
    ):
        shape = " x ".join(map(str, x.shape[1:]))
        held = f"masks cover {100 * int(y.sum()) / y.numel():.1f} %"
        if dataset.targets == "labels":
            counts = np.bincount(y.numpy(), minlength=dataset.num_classes)
            held = f"{counts.min():,} to {counts.max():,} of each class"
        print(f"{split:<6} {len(y):>9,} samples, {shape}, {held}")

    print(f"sha256 {arrays.fingerprint}")
    print(
        f"{dataset.name} is ready"
        + (f" under {root}" if dataset.expected_files(root) else " (embedded)")
    )

    return 0


def _list(options: argparse.Namespace) -> int:
    from fedexp.config.compose import compose
    from fedexp.config.folders import conf_dirs
    from fedexp.core.build import build
    from fedexp.core.errors import FedexpError
    from fedexp.data.dataset import Dataset

    names = sorted({path.stem for folder in conf_dirs() for path in folder.glob("dataset/*.yaml")})
    table = ruled_table("dataset", "classes", "shape", "state")
    for name in names:
        try:
            config = compose([f"dataset={name}"])
            dataset = build(Dataset, config["dataset"], "dataset")  # type: ignore[type-abstract]
        except FedexpError as error:
            table.add_row(escaped(name), "", "", escaped(f"cannot be built: {error.what}"))
            continue

        root = _data_root(options.root, config)
        files = dataset.expected_files(root)
        missing = [file for file in files if not file.exists()]
        state = (
            "embedded"
            if not files
            else f"there, under {root}"
            if not missing
            else f"absent: {missing[0]}"
        )

        table.add_row(
            escaped(name),
            str(dataset.num_classes),
            " x ".join(map(str, dataset.shape)),
            escaped(state),
        )

    console().print(table)
    return 0


def _data_root(given: str | None, config: ResolvedConfig) -> Path:
    return user_path(given or config["data_root"], "data_root")
