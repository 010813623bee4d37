"""The cost that a table states is compared with a count.

The count uses the local steps of the table's runs and the operations of their networks.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fedexp.config.compose import compose
from fedexp.core.weights import ModelSpec
from fedexp.tables.cells import planned_cells
from fedexp.tables.load import load_table

TRAINING_IMAGES = {
    "cifar10": 50_000,
    "cifar100": 50_000,
    "fashion_mnist": 60_000,
    "tiny_imagenet": 100_000,
}
TWO_GRADIENTS = ("fedsam", "mofedsam", "fedmrur")


def forward(config: dict[str, Any]) -> int:
    """Count the operations of a forward pass of one sample."""
    shape = tuple(config["dataset"]["shape"])
    module = ModelSpec.of(config["model"], shape, config["dataset"]["num_classes"]).module().eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(torch.zeros(1, *shape))
    return int(counter.get_total_flops())


@pytest.mark.parametrize(
    "name", ["fedmrur/table4", "fedmrur/flsimulator", "fedcda/table2", "fedcda/fig2b"]
)
def test_a_tables_cost_is_that_of_its_runs_local_steps(name: str) -> None:
    """The cost is rounds x samples of a round's clients x epochs x 3 forward passes.

    It is twice as much if a step computes a second gradient.
    """
    table = load_table(name)
    runs = {job.overrides for planned in planned_cells(table) for job in planned.jobs}
    alike = Counter(tuple(each for each in run if not each.startswith("seed=")) for run in runs)
    passes: dict[str, int] = {}
    total = 0.0
    for overrides, count in alike.items():
        config = compose(list(overrides))
        network = f"{config['model']} {config['dataset']['shape']}"
        if network not in passes:
            passes[network] = forward(config)
        share = config["clients_per_round"] / (
            config["clients"] if config["clients_per_round"] >= 1 else 1
        )
        samples = (
            config["rounds"]
            * share
            * TRAINING_IMAGES[config.choices["dataset"]]
            * config["local"]["epochs"]
        )
        gradients = 2 if set(TWO_GRADIENTS) & set(config["trainer"]["_target_"].split(".")) else 1
        total += count * samples * 3 * passes[network] * gradients
    assert table.flop == pytest.approx(total, rel=0.01)
