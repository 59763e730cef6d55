# SPDX-License-Identifier: MIT
"""The operator as autograd sees it: what is kept from the forward pass, and which gradients return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fla_flashqla import chunk, report
from fla_flashqla.activations import Activations
from fla_flashqla.plan import Plan

Gradient = torch.Tensor | None


class GatedDeltaRule(torch.autograd.Function):
    """`answer`, which is or wraps `chunk.forward`, with `chunk.backward` as its derivative.

    Beside inputs it keeps `r` and `gates` of `chunk.Forward`: 160 bytes a token and value head (128 and 32), chunks being
    filled up, and as much as one chunk a sequence and one more. g and beta are in `gates` and kept only where they are made from
    what was given for them. As FLA's function it casts nothing under autocast, and what it runs does not depend on that.
    """

    @staticmethod
    def forward(
        ctx: Any,
        answer: Callable[..., chunk.Forward],
        plan: Plan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        scale: float,
        initial_state: torch.Tensor | None,
        output_final_state: bool,
        use_qk_l2norm_in_kernel: bool,
        state_v_first: bool,
        cu_seqlens: torch.Tensor | None,
        A_log: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        sigmoid: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        activations = Activations(A_log, dt_bias, sigmoid)
        flags = use_qk_l2norm_in_kernel, state_v_first
        o, final_state, r, gates = answer(
            plan, q, k, v, g, beta, scale, initial_state, output_final_state, *flags, cu_seqlens,
            activations,
        )  # fmt: skip
        raw = None if A_log is None else g, beta if sigmoid else None
        ctx.save_for_backward(q, k, v, r, gates, initial_state, cu_seqlens, A_log, dt_bias, *raw)
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.scale, ctx.flags, ctx.sigmoid = plan, scale, flags, sigmoid
        return o, final_state

    @staticmethod
    def backward(ctx: Any, do: Gradient, dht: Gradient) -> tuple[Gradient, ...]:
        # `once_differentiable` refuses a second derivative only where one of its arguments requires a gradient, and
        # do seldom does: it shall do so always.
        always = torch.zeros(0, requires_grad=True) if torch.is_grad_enabled() else None
        gradients: tuple[Gradient, ...] = _backward(ctx, do, dht, always)
        return gradients


@once_differentiable
def _backward(ctx: Any, do: Gradient, dht: Gradient, _: Gradient) -> tuple[Gradient, ...]:
    q, k, v, r, gates, initial_state, cu_seqlens, A_log, dt_bias, g, beta = ctx.saved_tensors
    use_qk_l2norm_in_kernel, state_v_first = ctx.flags
    needed = ctx.needs_input_grad
    dq, dk, dv, dg, dbeta, dh0, dA_log, ddt_bias = chunk.backward(
        ctx.plan,
        q,
        k,
        v,
        r,
        gates,
        ctx.scale,
        initial_state,
        use_qk_l2norm_in_kernel,
        state_v_first,
        cu_seqlens,
        do,
        dht,
        chunk.Needs._make((*needed[2:7], needed[8], *needed[13:15])),
        Activations(A_log, dt_bias, ctx.sigmoid),
        g,
        beta,
    )
    if do is not None or dht is not None:
        report.ran(ctx.plan.path("backward"))
    rest = None, None, None, None
    return None, None, dq, dk, dv, dg, dbeta, None, dh0, *rest, dA_log, ddt_bias, None
