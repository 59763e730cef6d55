# SPDX-License-Identifier: MIT
"""What makes g and beta in the kernels: FLA's `use_gate_in_kernel` and `use_beta_sigmoid_in_kernel` as values."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Activations(NamedTuple):
    """How g and beta come from what is given in their place; by default they are what is given.

    Args:
        A_log (torch.Tensor, Optional):
            HV elements; with them `g <- -exp(A_log) softplus(g + dt_bias)`.
        dt_bias (torch.Tensor, Optional):
            As many, only with A_log. Default: `None` (zero).
        sigmoid (float):
            If not 0, `beta <- sigmoid * sigmoid(beta)`: 1, or 2 for negative eigenvalues.
    """

    A_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None
    sigmoid: float = 0.0

    def packed(self) -> Activations:
        """With parameters as kernels read them, float32 and four-dimensional."""
        if self.A_log is None:
            return self
        A_log, dt_bias = (
            None if x is None else x.float().contiguous().view(1, 1, 1, -1) for x in self[:2]
        )
        return self._replace(A_log=A_log, dt_bias=dt_bias)

    def arguments(self, unused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int, float]:
        """A_log, dt_bias, raw_g and raw_beta of kernels/prepare.py; `unused` stands in where a tensor is not read."""
        if self.A_log is None:
            return unused, unused, 0, self.sigmoid
        A_log, dt_bias = (unused if x is None else x for x in self.packed()[:2])
        return A_log, dt_bias, 1 if self.dt_bias is None else 2, self.sigmoid

    def gradients(
        self, shares: torch.Tensor, of_A_log: bool, of_dt_bias: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Gradients of A_log and of dt_bias from the `shares` of kernels/gradients.py, `[slots, 2, HV, 1]`.

        All slots are added up, in the same order each time; those without a chunk hold 0.
        """
        if not (of_A_log or of_dt_bias):
            return None, None
        total = shares.sum(0)
        A_log, dt_bias = (
            row.view(x.shape).to(x.dtype) if needed and x is not None else None
            for row, x, needed in zip(total, self[:2], (of_A_log, of_dt_bias), strict=True)
        )
        return A_log, dt_bias


NONE = Activations()
