"""Tests of the contradictions between FedSyn's printed tables.

The statements of the paper's page are compared with the cells of the tables.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

import pytest

from fedexp.config.compose import compose
from fedexp.tables.cells import planned_cells
from fedexp.tables.load import load_table, table_names
from fedexp.tables.report.report import Variant
from fedexp.tables.schema import Claim

PAGE = files("fedexp").joinpath("site/papers/fedsyn.md").read_text()


def cell(table: str, **where: Any) -> float:
    """Return the only printed value of `table` for a method and conditions."""
    rows = [row for row in load_table(f"fedsyn/{table}").reference if where.items() <= row.items()]
    (row,) = rows
    return float(row["value"])


def says(*facts: str) -> bool:
    """Return whether one paragraph or list item of the page contains all of `facts`."""
    blocks = (" ".join(block.split()) for block in re.split(r"\n(?=- |\n)", PAGE))
    return any(all(fact in block for fact in facts) for block in blocks)


def test_two_baselines_of_table_1_have_other_values_in_table_4() -> None:
    """The values differ for CIFAR-10, alpha 0.5 and five clients.

    All other values that both tables print are equal, also those of SVHN.
    """
    apart = {}
    for dataset in ("cifar10", "svhn"):
        for method in ("fedavg", "feddf", "fed_dafl", "fed_adi", "fedsyn"):
            one = cell("table1", dataset=dataset, alpha=0.5, method=method)
            other = cell("table4", dataset=dataset, clients=5, method=method)
            if one != other:
                apart[dataset, method] = one, other
    assert apart == {
        ("cifar10", "fed_dafl"): (58.59, 55.46),
        ("cifar10", "fed_adi"): (59.34, 58.59),
    }
    assert says("Table 1 and Table 4", "Fed-DAFL 58.59 and 55.46, Fed-ADI 59.34 and 58.59")
    # The page calls these differences "two to three points".
    assert max(one - other for one, other in apart.values()) == pytest.approx(3.13)


def test_fedavg_in_table_1_is_above_fig_3s_best_and_the_readmes() -> None:
    printed = cell("table1", dataset="cifar10", alpha=0.5, method="fedavg")
    (best,) = (claim.says for claim in load_table("fedsyn/fig3").claims if claim.id == "peak_value")
    (reaches,) = re.findall(r"reaches (\d+) percent", best)
    (readme,) = re.findall(r"FedAvg (30\.93)", PAGE)
    assert printed == 43.67 > float(reaches) == 34 > float(readme)
    assert says("Fig. 3's best FedAvg (34 %) is below Table 1's 43.67")
    assert says("FedAvg 30.93", "does not fit Table 1's FedAvg (43.67")


def test_fedavg_does_not_fall_with_alpha_or_clients_alone() -> None:
    at = {
        alpha: cell("table1", dataset="svhn", alpha=alpha, method="fedavg") for alpha in (0.3, 0.5)
    }
    assert at[0.3] == 61.51 > at[0.5] == 56.09 and says("SVHN (FedAvg 61.51 at 0.3, 56.09 at 0.5)")
    of = {
        m: cell("table1", dataset="fmnist", alpha=0.3, method=m)
        for m in ("fedavg", "feddf", "fed_dafl", "fed_adi")
    }
    assert of["fedavg"] == 82.96 == max(of.values()) and says("FedAvg 82.96 above three baselines")
    few, many = (
        cell("table4", dataset="svhn", clients=count, method="fedavg") for count in (10, 20)
    )
    assert few < many


def test_one_round_of_ten_local_epochs_is_above_one_shot_of_two_hundred_in_four_cells() -> None:
    above = {}
    for dataset in ("cifar10", "svhn"):
        for alpha in (0.1, 0.3, 0.5):
            where = {"dataset": dataset, "alpha": alpha, "method": "fedsyn"}
            above[dataset, alpha] = cell("table5", communication_rounds=1, **where) > cell(
                "table1", **where
            )
    assert above["cifar10", 0.5] and sum(above.values()) == 4 and len(above) == 6
    assert says("In four of six cells, the accuracy with 10 local epochs is higher than with 200")
    later = [
        cell("table5", dataset="cifar10", alpha=0.1, communication_rounds=r, method="fedsyn")
        for r in (2, 3)
    ]
    assert later == [63.08, 61.61] and says("(CIFAR-10, alpha 0.1: 63.08, then 61.61)")


def test_unequal_networks_are_above_equal_ones_from_alpha_0_3_on() -> None:
    unequal = [cell("table3", alpha=alpha, method="fedsyn") for alpha in (0.3, 0.5, 0.1)]
    equal = [
        cell("table1", dataset="cifar10", alpha=alpha, method="fedsyn") for alpha in (0.3, 0.5, 0.1)
    ]
    assert [a > b for a, b in zip(unequal, equal, strict=True)] == [True, True, False]
    more = "has {} and {} in Table 3, {} and {} in Table 1".format(*unequal[:2], *equal[:2])
    assert says(more, f"({unequal[2]} and {equal[2]} at 0.1)")


def test_the_row_that_fusefl_copies_otherwise() -> None:
    """FuseFL copies the row of Table 4 for CIFAR-10 and 50 clients with other values.

    All five copied values are below all values that FedSyn prints.
    """
    printed = [
        cell("table4", dataset="cifar10", clients=50, method=m)
        for m in ("fedavg", "feddf", "fed_dafl", "fed_adi")
    ]
    assert printed == sorted(printed) and says("FuseFL", f"prints {printed[0]} to {printed[-1]}")
    (copied,) = re.findall(
        r"For 50 clients on CIFAR-10, it has values of ([\d.]+) to\s+([\d.]+\d)", PAGE
    )
    assert list(map(float, copied)) == [23.01, 29.52] and float(copied[1]) < printed[0]


CLAIMS = [
    claim
    for name in sorted(table_names())
    if name.startswith("fedsyn/")
    for claim in load_table(name).claims
]


@pytest.mark.parametrize(
    "claim", [c for c in CLAIMS if c.by or c.x or c.than or c.slack], ids=lambda claim: claim.id
)
def test_a_claim_names_the_bound_that_it_is_tested_by(claim: Claim) -> None:
    said = f"{claim.where}: {claim.says}".replace("two points", "2 points")
    for bound in (bound for bound in (claim.by, claim.x, claim.than, claim.slack) if bound):
        assert re.search(rf"(?<![\d.]){abs(bound):g}(?![\d.]*\d)", said), said


@pytest.mark.parametrize("variant", ["full", "reduced"])
@pytest.mark.parametrize("name", ["table1", "table3", "table4", "fig5"])
def test_feddfs_batches_pass_the_transform_that_the_clients_have(
    name: str, variant: Variant
) -> None:
    cells = [
        cell
        for cell in planned_cells(load_table(f"fedsyn/{name}"), variant, seeds=[0])
        if cell.method.startswith("feddf")
    ]
    assert cells
    for overrides in (job.overrides for cell in cells for job in cell.jobs):
        config = compose(overrides)
        assert config["aggregator"]["augment"] == (config["dataset"]["augment"] is not None), (
            overrides
        )
