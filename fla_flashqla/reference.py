# SPDX-License-Identifier: MIT
"""The operator in plain PyTorch: the oracle of the tests and the answer for CPU tensors.

Per value head, with state S [K, V] and h = hv // (HV // H) the q/k head of value head hv:

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - (exp(g_t) S_{t-1})^T k_t))^T
    o_t = scale * S_t^T q_t

Both forms are differentiable, take every flag of FLA 0.6.0, and compute in float64 where q, k or v
is float64, else in float32. Neither raises an exponent above 0, so gates may go down to -inf.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

L2NORM_EPS = 1e-6  # FLA's: x / sqrt(sum(x^2) + eps)
DIFFERENTIABLE = ("q", "k", "v", "g", "beta", "initial_state")
PARAMETERS = ("A_log", "dt_bias")  # likewise, where there are any


def recurrent_gated_delta_rule(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Token by token, as the definition says; arguments of FLA's `chunk_gated_delta_rule`."""
    return _run(_recurrence, 1, *args, **kwargs)


def chunk_gated_delta_rule(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Chunk by chunk, equal to the recurrence; arguments of FLA's `chunk_gated_delta_rule`."""
    return _run(_chunked, kwargs.get("chunk_size", 64), *args, **kwargs)


def wide(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
    """What it computes in, and the dtype of the final state."""
    return torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32


def renamed(transpose_state_layout: Any) -> bool:
    """`state_v_first` by its old name, with FLA's warning."""
    warnings.warn(
        "`transpose_state_layout` is deprecated and renamed to `state_v_first`.",
        DeprecationWarning,
        stacklevel=4,
    )
    return bool(transpose_state_layout)


def gradients(
    call: dict[str, Any],
    do: Tensor | None,
    dht: Tensor | None,
    form: Callable[..., Any] = chunk_gated_delta_rule,
) -> dict[str, Tensor]:
    """Gradients of all inputs, in their dtypes.

    Args:
        call (dict):
            Keyword arguments of FLA's operator.
        do, dht (torch.Tensor, Optional):
            Gradients of o and final_state; `None` is zero.
        form (Callable):
            What to differentiate.
    """
    names = (*DIFFERENTIABLE, *PARAMETERS)
    leaves = {n: call[n].detach() for n in names if call.get(n) is not None}
    for x in leaves.values():
        x.requires_grad_()
    with torch.enable_grad():
        results = form(**{**call, **leaves, "output_final_state": True})
    pairs = [(x, dx.to(x)) for x, dx in zip(results, (do, dht), strict=True) if dx is not None]
    pairs = [pair for pair in pairs if pair[0].requires_grad]  # not o where there are no tokens
    if not pairs:
        return {name: torch.zeros_like(x) for name, x in leaves.items()}
    outputs, of_outputs = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, [*leaves.values()], of_outputs, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


class _Tiles(NamedTuple):
    """Inputs cut into tiles of C tokens, all first tiles before all second ones.

    `steps[s]` sequences, the longest first, have an s-th tile, so that every step is one slice.
    Slots behind the end of a sequence hold zeros, which leave the state alone.
    """

    q: Tensor  # [tiles, HV, C, K], scaled
    k: Tensor  # [tiles, HV, C, K]
    v: Tensor  # [tiles, HV, C, V]
    g: Tensor  # [tiles, HV, C]
    beta: Tensor  # [tiles, HV, C]
    steps: list[int]


_Form = Callable[[_Tiles, Tensor], tuple[Tensor, Tensor]]  # tiles, S [N, HV, K, V] -> o, S


def _run(
    form: _Form,
    C: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    if cp_context is not None:
        raise ValueError("cp_context is not supported by the reference")
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval needs use_beta_sigmoid_in_kernel")
    if transpose_state_layout is not None:
        if state_v_first:
            raise ValueError("state_v_first and transpose_state_layout are one argument, got both")
        state_v_first = renamed(transpose_state_layout)

    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    dtype = wide(q, k, v)
    # On the CPU whatever the default device is.
    if cu_seqlens is None:
        bounds = torch.arange(B + 1, device="cpu") * T
    else:
        bounds = cu_seqlens.cpu().long()
    starts, lens = bounds[:-1], bounds.diff().clamp(min=0)
    order = lens.argsort(descending=True, stable=True)
    rows, steps = _tile_rows(starts[order], lens[order], C)
    rows, order = rows.to(q.device), order.to(q.device)
    filled = rows >= 0

    def tiles(x: Tensor) -> Tensor:
        # [B, T, heads, ...] -> [tiles, heads, C, ...]; unused rows never enter any arithmetic
        x = x.flatten(0, 1)
        x = x[rows[filled]].to(dtype)
        slots = x.new_zeros(rows.numel(), *x.shape[1:])
        slots = slots.index_copy(0, filled.flatten().nonzero().squeeze(1), x)
        return slots.view(*rows.shape, *x.shape[1:]).transpose(1, 2)

    # The user's autocast must not round the products of an oracle.
    with torch.autocast(q.device.type, enabled=False):
        t_q, t_k = tiles(q), tiles(k)
        if use_qk_l2norm_in_kernel:
            t_q, t_k = (x * (x.square().sum(-1, True) + L2NORM_EPS).rsqrt() for x in (t_q, t_k))
        t_g, t_beta = tiles(g), tiles(beta)
        used = filled[:, None, :]
        if use_gate_in_kernel:
            assert A_log is not None, "A_log is needed with use_gate_in_kernel"
            bias = 0.0 if dt_bias is None else dt_bias.to(dtype).view(HV, 1)
            t_g = -A_log.to(dtype).exp().view(HV, 1) * F.softplus(t_g + bias)
            t_g = t_g.masked_fill(~used, 0.0)
        if use_beta_sigmoid_in_kernel:
            t_beta = (t_beta.sigmoid() * (2.0 if allow_neg_eigval else 1.0)).masked_fill(~used, 0.0)
        t_q = (t_q * (K**-0.5 if scale is None else scale)).repeat_interleave(HV // H, 1)
        t_k = t_k.repeat_interleave(HV // H, 1)

        N = len(lens)
        if initial_state is None:
            S = q.new_zeros(N, HV, K, V, dtype=dtype)
        else:
            S = initial_state.to(dtype)[order]
            S = S.transpose(-1, -2) if state_v_first else S
        t_o, S = form(_Tiles(t_q, t_k, tiles(v), t_g, t_beta, steps), S)

        o = t_o.new_zeros(B * T, HV, V)
        o = o.index_copy(0, rows[filled], t_o.transpose(1, 2)[filled])
    if not output_final_state:
        return o.view(B, T, HV, V).to(q.dtype), None
    S = S[order.argsort()]
    S = S.transpose(-1, -2).contiguous() if state_v_first else S
    return o.view(B, T, HV, V).to(q.dtype), S


def _tile_rows(starts: Tensor, lens: Tensor, C: int) -> tuple[Tensor, list[int]]:
    """Rows of each tile [tiles, C], -1 for an empty slot, and the number of tiles of each step."""
    counts = (lens + C - 1) // C
    step = torch.arange(int(counts.max()) if len(counts) else 0, device="cpu")
    has_tile = counts[None, :] > step[:, None]
    s, n = has_tile.nonzero().unbind(1)
    token = s[:, None] * C + torch.arange(C, device="cpu")
    rows = torch.where(token < lens[n, None], starts[n, None] + token, -1)
    return rows, has_tile.sum(1).tolist()


def _scan(
    steps: list[int], S: Tensor, step: Callable[[slice, Tensor], tuple[Tensor, Tensor]]
) -> tuple[list[Tensor], Tensor]:
    """Carry S through all steps; sequences that have ended keep theirs."""
    outs, done, at = [], [], 0
    for n in steps:
        if n < len(S):
            done.append(S[n:])
        o, S = step(slice(at, at + n), S[:n])
        outs.append(o)
        at += n
    return outs, torch.cat([S, *reversed(done)]) if done else S


def _recurrence(t: _Tiles, S: Tensor) -> tuple[Tensor, Tensor]:
    def step(i: slice, S: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = t.q[i], t.k[i], t.v[i]  # [n, HV, 1, K or V]
        S = t.g[i].exp()[..., None] * S
        S = S + k.mT @ (t.beta[i][..., None] * (v - k @ S))
        return q @ S, S

    outs, S = _scan(t.steps, S, step)
    return torch.cat(outs) if outs else torch.zeros_like(t.v), S


def _chunked(t: _Tiles, S: Tensor) -> tuple[Tensor, Tensor]:
    # Gam_ij = exp(g_{j+1} + .. + g_i) for i >= j, else 0, summed directly: a difference of prefix
    # sums is NaN behind a gate of -inf and loses digits behind a strong one.
    C = t.g.shape[-1]
    ones = torch.ones(C, C, dtype=torch.bool, device=t.g.device)
    Gam = t.g[..., :, None].expand(*t.g.shape, C).masked_fill(~ones.tril(-1), 0.0).cumsum(-2)
    Gam = Gam.exp().masked_fill(~ones.tril(), 0.0)
    e = t.g.cumsum(-1).exp()[..., None]
    r = Gam[..., -1, :, None]
    beta = t.beta[..., None]
    # M = I + strictlower(diag(beta) (K K^T o Gam));  [TV | TW] = M^-1 diag(beta) [V | diag(e) K]
    M = (beta * (t.k @ t.k.mT) * Gam).tril(-1)  # the unit diagonal is implied
    TV, TW = torch.linalg.solve_triangular(
        M, beta * torch.cat([t.v, e * t.k], -1), upper=False, unitriangular=True
    ).split([t.v.shape[-1], t.k.shape[-1]], -1)
    P = (t.q @ t.k.mT) * Gam
    eQ, rK = e * t.q, r * t.k

    def step(i: slice, S: Tensor) -> tuple[Tensor, Tensor]:
        U = TV[i] - TW[i] @ S  # U = A (V - diag(e) K S)
        o = eQ[i] @ S + P[i] @ U  # O = scale diag(e) Q S + P U
        return o, e[i][..., -1:, :] * S + rK[i].mT @ U  # S <- exp(gc_C) S + (diag(r) K)^T U

    outs, S = _scan(t.steps, S, step)
    return torch.cat(outs) if outs else torch.zeros_like(t.v), S
