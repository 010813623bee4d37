"""What every method declares about itself; `test_contracts` refuses a method that is not here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Declared:
    """Contracts of one method.

    Args:
        reduction: overrides under which it is FedAvg (with `against` added to FedAvg), or None with a reason.
        exact: to the bit, else to `tolerance` (relative).
        averages: identical clients give back the single client's model; else why not.
        ordered_reason: why the order of the clients matters, where it does.
    """

    reduction: tuple[str, ...] | None
    reason: str = ""
    against: tuple[str, ...] = ()
    tolerance: float = 0.0
    averages: bool = True
    averages_reason: str = ""
    ordered_reason: str = ""


DECLARED = {
    "fedavg": Declared(()),
    "fedprox": Declared(("trainer.mu=0.0",)),
    "scaffold": Declared(("rounds=1",), against=("rounds=1", "aggregator.weights=uniform")),
    "fednova": Declared(("local.epochs=null", "local.steps=3"), against=("local.steps=3",), tolerance=1e-12),
    "fedavgm": Declared(("server_optimizer.beta=0.0",)),
    "fedadam": Declared(
        (
            "server_optimizer.beta_1=0",
            "server_optimizer.beta_2=0",
            "server_optimizer.lr=1e9",
            "server_optimizer.tau=1e9",
        ),
        tolerance=1e-6,
        averages=False,
        averages_reason="the step's length is not the mean update's",
    ),
    "fedyogi": Declared(
        None,
        reason="beta_2=0 leaves v at tau^2 - U^2 sign(tau^2 - U^2); the limit is tested for FedAdam, Yogi against formulas",
        averages=False,
        averages_reason="the step's length is not the mean update's",
    ),
    "fedexp": Declared(("server_optimizer.eps=1e12",)),
    "average": Declared((), against=("aggregator.weights=uniform",), tolerance=1e-12),
    "ot_fusion": Declared(
        None, reason="the mean of models that alignment moved; with nothing to move it is average (test_ot_fusion)"
    ),
    "ot_fusion_nafi": Declared(
        None,
        reason="sequential halves weigh later models more",
        ordered_reason="sequential halves weigh later models more",
    ),
    "ma_echo": Declared(
        ("aggregator.T=0", "aggregator.last_layer=plain"), against=("aggregator.weights=uniform",), tolerance=1e-12
    ),
    "ma_echo_ot": Declared(None, reason="models are moved first; with nothing to move it is ma_echo (test_ma_echo)"),
    "ma_echo_algorithm1": Declared(("aggregator.T=0",), against=("aggregator.weights=uniform",), tolerance=1e-12),
    "local": Declared(None, reason="nothing is averaged; one client alone is FedAvg (test_reference_points)"),
    "ensemble": Declared(None, reason="nothing is averaged; its members are `local`'s (test_reference_points)"),
    "centralized": Declared(None, reason="one pooled client; a full-batch step is FedAvg's (test_reference_points)"),
}
