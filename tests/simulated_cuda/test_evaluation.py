"""An evaluation on the simulated device waits for it once."""

from __future__ import annotations

import pytest
import torch

from fedexp.core.data import Samples
from fedexp.core.outcome import Delivers, Outcome
from fedexp.core.weights import ModelSpec, Weights
from fedexp.evaluation.evaluate import Evaluator
from fedexp.tasks.classification import Classification
from tests.simulated_cuda.device import simulate
from tests.world import CPU

SPEC = ModelSpec("fedexp.models.mlp.MLP", (("input_shape", (4,)), ("num_classes", 3)))
SIZE = 120


@pytest.mark.parametrize(
    ("kind", "weighted"), [("global", False), ("ensemble", False), ("ensemble", True)]
)
def test_waits_do_not_depend_on_batches_and_parts(kind: Delivers, weighted: bool) -> None:
    with torch.random.fork_rng(devices=[]), simulate() as simulated:
        cuda = torch.device("cuda", 0)
        models = [Weights.init(SPEC, seed, CPU, torch.float32).to(cuda) for seed in range(3)]
        models = models[:1] if kind == "global" else models
        samples = Samples(
            torch.ones(SIZE, 4, device=cuda), torch.zeros(SIZE, dtype=torch.int64, device=cuda)
        )
        order = torch.arange(SIZE, device=cuda)
        outcome = Outcome(models, kind, weights=torch.ones(3) if weighted else None)
        wait_for_weights = 1 if weighted else 0

        def waits(batch_size: int, parts: int) -> float:
            evaluator = Evaluator(Classification(), batch_size)
            bounds = [SIZE * i // parts for i in range(parts + 1)]
            simulated.counter.reset()
            found = evaluator.parts(models, outcome, samples, order, bounds)
            assert len(found) == parts
            return simulated.counter.rows().total().syncs - wait_for_weights

        waits(SIZE, 1)  # copies the constants of the normalisation
        assert [waits(SIZE, 1), waits(10, 1), waits(SIZE, 40)] == [1, 1, 1]
