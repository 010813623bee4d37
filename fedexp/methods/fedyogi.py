"""FedYogi: FedAdam with Yogi's second moment.

The formulas are in `fedexp.methods.fedadam`.

Reference:
    Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 2.
    https://arxiv.org/abs/2003.00295
"""

from __future__ import annotations

from dataclasses import dataclass

from fedexp.core import trees
from fedexp.core.trees import Tree
from fedexp.methods.fedadam import FedAdam


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """The server step of FedYogi, with the arguments of `FedAdam`."""

    def second_moment(self, v: Tree, squared: Tree) -> Tree:
        change = trees.mul(squared, trees.sign(trees.sub(v, squared)))
        return trees.sub(v, change, alpha=1 - self.beta_2)
