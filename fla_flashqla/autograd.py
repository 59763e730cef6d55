# SPDX-License-Identifier: MIT
"""The operator as autograd sees it: what is kept from the forward pass, and which gradients return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from fla_flashqla import chunk, report
from fla_flashqla.activations import NONE, Activations
from fla_flashqla.layout import Packed, Setup, boundaries

Gradient = torch.Tensor | None


class Call(NamedTuple):
    """What of a call has no gradient, as one argument, since PyTorch looks at each of them; `answer` is or wraps `chunk.forward`."""

    answer: Callable[..., chunk.Forward]
    setup: Setup
    scale: float
    cu_seqlens: torch.Tensor | None
    sigmoid: float  # of `Activations`


class GatedDeltaRule(torch.autograd.Function):
    """`Call.answer` with `chunk.backward` as its derivative; the arguments behind the call are those of `chunk.Needs`.

    Beside inputs, of which q, k and v are as `Packed` has them, it keeps `r` and `gates` of `chunk.Forward`: 160 bytes a token and
    value head (128 and 32), chunks being filled up, and as much as one chunk a sequence and one more. g and beta are in `gates` and
    kept only where they are made from what was given for them. As FLA's function it casts nothing under autocast, and what it runs does not depend on that.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None,
        A_log: torch.Tensor | None,
        dt_bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        o, final_state, r, gates, packed = call.answer(
            *(call.setup, q, k, v, g, beta, call.scale, initial_state, call.cu_seqlens),
            _activations(A_log, dt_bias, call.sigmoid),
        )
        q, k, v, cu = packed
        raw = None if A_log is None else g, beta if call.sigmoid else None
        varlen = call.cu_seqlens is not None  # a change of boundaries is seen where they are saved
        ctx.call = call._replace(cu_seqlens=None) if varlen else call
        ctx.save_for_backward(
            *(q, k, v, cu if varlen else None, r, gates, initial_state, A_log, dt_bias, *raw)
        )
        ctx.set_materialize_grads(False)
        return o, final_state

    @staticmethod
    def backward(ctx: Any, do: Gradient, dht: Gradient) -> tuple[Gradient, ...]:
        if not torch.is_grad_enabled():
            return _backward(ctx, do, dht)
        # `once_differentiable` refuses a second derivative only where one of its arguments requires a gradient, and
        # do seldom does: it shall do so always.
        always = torch.zeros(0, requires_grad=True)
        gradients: tuple[Gradient, ...] = _backward_once(ctx, do, dht, always)
        return gradients


def _activations(
    A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, sigmoid: float
) -> Activations:
    return NONE if A_log is None and not sigmoid else Activations(A_log, dt_bias, sigmoid)


def _backward(ctx: Any, do: Gradient, dht: Gradient, _: Gradient = None) -> tuple[Gradient, ...]:
    q, k, v, cu, r, gates, initial_state, A_log, dt_bias, g, beta = ctx.saved_tensors
    call: Call = ctx.call
    packed = Packed(q, k, v, boundaries(None, q) if cu is None else cu)
    dq, dk, dv, dg, dbeta, dh0, dA_log, ddt_bias = chunk.backward(
        *(call.setup, packed, r, gates, call.scale, initial_state, do, dht),
        chunk.Needs._make(ctx.needs_input_grad[1:]),
        _activations(A_log, dt_bias, call.sigmoid),
        *(g, beta),
    )
    if do is not None or dht is not None:
        report.ran(call.setup.plan.path("backward"))
    return None, dq, dk, dv, dg, dbeta, dh0, dA_log, ddt_bias


_backward_once = once_differentiable(_backward)
