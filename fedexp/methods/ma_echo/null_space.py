"""One layer of MA-Echo's iteration, for all clients at once.

`fedexp.methods.ma_echo.aggregator` gives the formulas. W is the fused matrix of the
layer, W_i is client i's matrix, and V_i is the matrix that follows W_i in the
iteration. All have shape (out, d). The projection is ``P_i = K_i K_i^T``, where the
factor K_i of shape (d, r_i) has few columns. s is the factor of P_i.

If the rows of V_i's step are not normalised, every V_i can be written as
``g W_i + U - A_i K_i^T``. The scalar g and the matrix U are the same for all clients.
An iteration then updates only g, U and the A_i of shape (out, r_i), and the V_i are not
formed. If rows are normalised, the V_i are stored.

Let K of shape (d, r) contain all factors side by side, with r = sum_i r_i. Without
normalised rows, an iteration takes three kinds of matrix products: an (out, r) matrix
times K^T, W times K, and for each client an (out, r_i) matrix times an r_i x r_i
matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedexp.matching.simplex_qp import capped_simplex_qp

_SMALLEST_NORM = 1e-12  # added to norms, because a row of zeros has norm 0


@dataclass(frozen=True)
class LayerRule:
    """The options of the iteration of one layer.

    The formulas are in `fedexp.methods.ma_echo.aggregator`.

    Args:
        eta: Factor eta of the step of W.
        step: Factor of the step of V_i.
        shrinkage: Factor s of P_i.
        anchored: Whether V_i is computed from W_i (Eq. 11) instead of the previous V_i.
        norm: Whether the rows of V_i's step are normalised.
        C: Upper bound of the weights a_i in the quadratic program. None: a_i = 1 / N.
    """

    eta: float
    step: float
    shrinkage: float
    anchored: bool
    norm: bool
    C: float | None


class NullSpace:
    """The fused matrix W and the clients' matrices V_i of one layer.

    Args:
        local: The clients' trained matrices W_i, each of shape (out, d).
        factors: The factors K_i of the projections, each of shape (d, r_i).
        start: W before the first iteration, of shape (out, d).
        rule: The options of the iteration.
    """

    def __init__(
        self, local: Sequence[Tensor], factors: Sequence[Tensor], start: Tensor, rule: LayerRule
    ) -> None:
        self._local, self._factors, self._rule = local, factors, rule
        self._widths = [factor.shape[1] for factor in factors]
        self._K = torch.cat(list(factors), 1)
        self.W = start.clone()
        self._WK = self.W @ self._K
        self._local_K = torch.cat([w @ k for w, k in zip(local, factors, strict=True)], 1)
        self._VK = self._local_K.clone()  # V_i K_i, side by side

        if rule.C is not None and self._is_narrow:
            self._KK = (self._K.T @ self._K).double()
            clients = torch.arange(len(factors), device=start.device)
            owners = clients.repeat_interleave(torch.tensor(self._widths, device=start.device))
            # Shape (r, N). An entry is 1 if the column of K belongs to the client.
            self._owner = (owners[:, None] == clients).double()

        if rule.norm:
            self._V = [w.clone() for w in local]
            return

        self._gram = [factor.T @ factor for factor in factors]
        self._g = 1.0
        self._U = torch.zeros_like(self.W)
        self._A = torch.zeros_like(self._VK)

    def iterate(self) -> None:
        """Update W, then every V_i with the new W."""
        rule = self._rule
        B = self._WK - self._VK  # R_i K_i
        B *= self._weights(B) * rule.eta
        self.W.addmm_(B, self._K.T, alpha=-1)
        torch.mm(self.W, self._K, out=self._WK)

        if rule.norm:
            self._step_normed()
        elif rule.anchored:
            self._A = rule.shrinkage * (self._WK - self._local_K)
            self._g, self._U = 0.0, self.W
            torch.sub(self._WK, self._times_gram(self._A), out=self._VK)
        else:
            B = self._WK - self._VK
            remaining = 1 - rule.step
            self._VK.add_(B, alpha=rule.step).sub_(
                self._times_gram(B), alpha=rule.step * rule.shrinkage
            )
            self._A.mul_(remaining).add_(B, alpha=rule.step * rule.shrinkage)
            self._U.mul_(remaining).add_(self.W, alpha=rule.step)
            self._g *= remaining

    def _step_normed(self) -> None:
        rule = self._rule
        for i, (V, K) in enumerate(zip(self._V, self._factors, strict=True)):
            direction = self.W - V
            direction.addmm_(direction @ K, K.T, alpha=-rule.shrinkage)
            norms = torch.linalg.vector_norm(direction, dim=1, keepdim=True).add_(_SMALLEST_NORM)
            V.addcdiv_(direction, norms, value=rule.step)
            torch.mm(V, K, out=self._of(self._VK)[i])

    def _weights(self, B: Tensor) -> float | Tensor:
        """Return the clients' weights a_i.

        The result is 1 / N if all weights are equal. Otherwise it is a tensor (r,),
        which repeats a_i for each column of K_i.
        """
        N = len(self._widths)
        if self._rule.C is None:
            return 1 / N
        a = capped_simplex_qp(self._descents(B), max(self._rule.C, 1 / N)).to(B.dtype)
        return a.repeat_interleave(torch.tensor(self._widths, device=a.device))

    def _descents(self, B: Tensor) -> Tensor:
        """Compute the inner products <R_i P_i, R_j P_j> for all clients i and j.

        `B` contains the matrices R_i K_i side by side, with R_i = W - V_i. If all
        factors together have at most d columns, the matrices R_i P_i (out, d) are not
        formed.

        Returns:
            Inner products of shape (N, N).
        """
        if self._is_narrow:
            # The block of rows of client i and columns of client j sums to entry (i, j)
            products = (B.T @ B).double() * self._KK
            return self._owner.T @ products @ self._owner
        stacked = torch.stack(
            [(b @ factor.T).flatten() for b, factor in zip(self._of(B), self._factors, strict=True)]
        )
        return (stacked @ stacked.T).double()

    @property
    def _is_narrow(self) -> bool:
        return self._K.shape[1] <= self._K.shape[0]

    def _times_gram(self, B: Tensor) -> Tensor:
        return torch.cat([b @ gram for b, gram in zip(self._of(B), self._gram, strict=True)], 1)

    def _of(self, side_by_side: Tensor) -> tuple[Tensor, ...]:
        """Split a matrix (out, r) into each client's columns (out, r_i)."""
        return torch.split(side_by_side, self._widths, 1)

    def v(self, i: int) -> Tensor:
        """Return V_i, of shape (out, d)."""
        if self._rule.norm:
            return self._V[i].clone()
        return (self._g * self._local[i] + self._U).addmm_(
            self._of(self._A)[i], self._factors[i].T, alpha=-1
        )

    def mean_v(self) -> Tensor:
        """Return the mean of all V_i, of shape (out, d)."""
        N = len(self._local)
        if self._rule.norm:
            return torch.stack(self._V).mean(0)
        total = torch.zeros_like(self.W)
        for local in self._local:
            total.add_(local, alpha=self._g / N)
        return total.add_(self._U).addmm_(self._A, self._K.T, alpha=-1 / N)
