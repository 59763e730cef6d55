# SPDX-License-Identifier: MIT
"""Forward and backward pass as two calls without autograd, with arguments and results of flash_qla's."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from fla_flashqla import api, reference, report
from fla_flashqla.activations import NONE
from fla_flashqla.layout import CHUNK, GATE_GC, Layout
from fla_flashqla.plan import Plan, Refusal
from fla_flashqla.utils import prepare_chunk_indices


class ForwardResult(NamedTuple):
    """What `chunk_gated_delta_rule_fwd` returns."""

    g: torch.Tensor  # [B, T, HV], cumulative sum of g within each chunk, in its dtype
    A: torch.Tensor  # uint8, for the backward
    o: torch.Tensor  # [B, T, HV, V], in q's dtype
    h: torch.Tensor | None  # [B, chunks, HV, K, V], in q's dtype
    final_state: torch.Tensor | None  # [N, HV, K, V], float32


class BackwardResult(NamedTuple):
    """What `chunk_gated_delta_rule_bwd` returns: gradients in their inputs' shapes and dtypes."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    db: torch.Tensor
    dg: torch.Tensor
    dh0: torch.Tensor | None  # None without an initial state


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def chunk_gated_delta_rule_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    output_final_state: bool = True,
    output_h: bool = False,
    auto_cp: bool = True,
    state_v_first: bool = False,
    enable_fwd_cp_cache: bool = False,
    cp_context: Any = None,
    is_train: bool | None = None,
) -> ForwardResult:
    """Run the forward pass, and keep what `chunk_gated_delta_rule_bwd` needs of it.

    Args:
        q, k (torch.Tensor):
            Queries and keys, `[B, T, H, K]`; float16 or bfloat16 on a GPU, any float dtype on the CPU.
        v (torch.Tensor):
            Values, `[B, T, HV, V]`; HV is a multiple of H.
        g (torch.Tensor):
            Log-space decay (natural log), `[B, T, HV]`.
        beta (torch.Tensor):
            Step sizes, `[B, T, HV]`.
        scale (float, Optional):
            Factor of the output. Default: `K ** -0.5`.
        initial_state (torch.Tensor, Optional):
            `[N, HV, K, V]`. Default: `None` (zero).
        cu_seqlens (torch.Tensor, Optional):
            Boundaries of N packed sequences, `[N + 1]`, int32 or int64, with B = 1.
        output_final_state (bool):
            Whether to return the final state. Default: `True`.
        output_h (bool):
            Whether to return the state at the start of each chunk, which takes another pass; with `cu_seqlens` the host waits for the
            device. Default: `False`.
        state_v_first (bool):
            Whether all states are `[..., V, K]`. Default: `False`.
        cp_context (Any, Optional):
            Context parallelism; refused.
        auto_cp, enable_fwd_cp_cache, is_train:
            How flash_qla splits sequences; not read.

    Returns:
        (g, A, o, h, final_state). Chunks have 64 tokens, and each sequence starts one. g is the inclusive cumulative sum within the
        chunk, zero behind the last boundary; on a GPU a decay below -128, whose exponential is 0, counts as -128. A is for the
        backward alone: its content depends on the device and the version. h is `[B, T / 64 rounded up, HV, K, V]`, or
        `[1, chunks of all sequences, HV, K, V]` with `cu_seqlens`, ordered as `utils.prepare_chunk_indices` says; `None` unless
        asked for.

    Raises:
        Unsupported: no kernel of ours answers this call; the text says why.
    """
    args = q, k, v, g, beta, scale, initial_state, output_final_state
    kwargs = {"state_v_first": state_v_first, "cu_seqlens": cu_seqlens, "cp_context": cp_context}
    decision = api.decide(args, kwargs, gradients=bool(output_h))
    h = gates = None
    if isinstance(decision, Plan):
        if output_h and cu_seqlens is not None and api.capturing():
            # `prepare_chunk_indices` may know these boundaries: a replay would take its chunks for those of other boundaries.
            api.refuse(
                "output_h with cu_seqlens waits for the device, which a captured CUDA graph cannot"
            )
        at = Layout.of(q.shape[0], q.shape[1], cu_seqlens)
        A = q.new_empty(4 * at.words(v.shape[2], q.dtype), dtype=torch.uint8)
        flags = False, bool(state_v_first), bool(output_final_state)
        inputs = q, k, v, g, beta, _scale(q, scale), initial_state
        o, final_state, r, gates, _ = api.forward(
            decision, flags, cu_seqlens, inputs, NONE, A.view(torch.float32)
        )
        if output_h:
            s = api.states(decision, cu_seqlens, k, v, r, gates, initial_state, bool(state_v_first))
            slots = _chunk_slots(q, cu_seqlens)
            h = (s if state_v_first else s.mT).index_select(0, slots.flatten())
    else:
        o, final_state = api.run(decision, args, kwargs)
        A = g.contiguous().view(torch.uint8).flatten().clone()
        if output_h:
            h = _reference_states(q, k, v, g, beta, initial_state, state_v_first, cu_seqlens)
    if h is not None:
        h = h.view(q.shape[0], -1, *h.shape[1:])
    return ForwardResult(_cumulative(g, cu_seqlens, gates), A, o, h, final_state)


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def chunk_gated_delta_rule_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A: torch.Tensor,
    do: torch.Tensor,
    dht: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    state_v_first: bool = False,
    auto_cp: bool = True,
    cp_cache: Any = None,
    cp_context: Any = None,
) -> BackwardResult:
    """Run the backward pass.

    Args:
        q, k, v, beta, scale, initial_state, cu_seqlens, state_v_first:
            As `chunk_gated_delta_rule_fwd` got them.
        g (torch.Tensor):
            As the forward returned it. Its values are in A and not read, so that the decay which the forward got will do.
        A (torch.Tensor):
            What the forward returned; not changed, and good for any number of calls.
        do (torch.Tensor):
            Gradient of o, `[B, T, HV, V]`, any float dtype and strides.
        dht (torch.Tensor, Optional):
            Gradient of the final state, in its shape. Default: `None` (zero).
        cp_context (Any, Optional):
            Context parallelism; refused.
        auto_cp, cp_cache:
            How flash_qla splits sequences; not read.

    Returns:
        (dq, dk, dv, db, dg, dh0): gradients of q, k, v, beta, the decay (not of its cumulative sum) and initial_state, zero behind
        the last boundary; dh0 is `None` without an initial state.

    Raises:
        Unsupported: no kernel of ours answers this call, or its arguments do not fit; the text says why.
    """
    args = q, k, v, g, beta, scale, initial_state
    kwargs = {"state_v_first": state_v_first, "cu_seqlens": cu_seqlens, "cp_context": cp_context}
    decision = api.decide(args, kwargs, gradients=True)
    if isinstance(decision, Refusal):
        api.refuse(decision.reason)
    HV, V = v.shape[2:]
    at = Layout.of(q.shape[0], q.shape[1], cu_seqlens)
    size = 4 * at.words(HV, q.dtype) if isinstance(decision, Plan) else g.nbytes
    if A.dtype != torch.uint8 or A.shape != (size,) or A.device != q.device:
        what = f"{tuple(A.shape)} {A.dtype} on {A.device}"
        api.refuse(f"A must be what the forward of this call returned, {size} bytes, got {what}")
    if do.shape != v.shape or do.device != q.device:
        api.refuse(f"do must have o's shape {tuple(v.shape)} and device, got {tuple(do.shape)}")
    state = (at.N, HV, *((V, q.shape[3]) if state_v_first else (q.shape[3], V)))
    if dht is not None and (dht.shape != state or dht.device != q.device):
        api.refuse(
            f"dht must have the final state's shape {state} and device, got {tuple(dht.shape)}"
        )

    A = A.contiguous()
    A = A if A.data_ptr() % 16 == 0 else A.clone()  # for TMA, and to be viewed in other dtypes
    found: dict[str, Any]
    if isinstance(decision, Plan):
        found = api.backward(
            *(decision, (False, bool(state_v_first)), cu_seqlens, q, k, v),
            *at.split(A.view(torch.float32), HV, q.dtype),
            *(_scale(q, scale), initial_state, do.to(q.dtype), dht),
        )._asdict()
    else:
        call = dict(zip(("q", "k", "v", "g", "beta", "scale", "initial_state"), args, strict=True))
        call["g"] = A.view(g.dtype).view(g.shape)
        found = reference.gradients({**call, **kwargs}, do, dht)
        report.reference_ran()
    return BackwardResult._make(
        found.get(name) for name in ("q", "k", "v", "beta", "g", "initial_state")
    )


def _scale(q: torch.Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


def _bounds(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Boundaries `[N + 1]`, int64, of the sequences in x `[B, T, ...]`, rows of all B being counted on."""
    if cu_seqlens is None:
        return torch.arange(x.shape[0] + 1, device=x.device) * x.shape[1]
    return cu_seqlens.long().contiguous()


def _cumulative(
    g: torch.Tensor, cu_seqlens: torch.Tensor | None, gates: torch.Tensor | None
) -> torch.Tensor:
    """Cumulative sums of g `[B, T, HV]` within chunks, from `gates` where there are any: without waiting for the device."""
    B, T, HV = g.shape
    bounds = _bounds(g, cu_seqlens)
    N = bounds.numel() - 1
    tokens = torch.arange(B * T, device=g.device)
    n = torch.searchsorted(bounds, tokens, right=True) - 1  # -1 before the first sequence
    used = (n >= 0) & (n < N)
    i = torch.where(used, tokens - bounds[n], 0)
    slots = torch.where(used, bounds[n] // CHUNK + n + i // CHUNK, 0)
    if gates is None:
        wide = torch.promote_types(g.dtype, torch.float32)
        chunks = g.new_zeros(B * T // CHUNK + N + 1, CHUNK, HV, dtype=wide)
        chunks[slots[used], i[used] % CHUNK] = g.flatten(0, 1)[used].to(wide)
        sums = chunks.cumsum(1)[slots, i % CHUNK]
    else:
        sums = gates[slots, :, GATE_GC, i % CHUNK] * math.log(2)
    return sums.masked_fill_(~used[:, None], 0.0).to(g.dtype).view(B, T, HV)


def _chunk_slots(q: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Slots of the chunks of q `[B, T, H, K]`, see kernels/prepare.py, in the order of h."""
    bounds = _bounds(q, cu_seqlens)
    if cu_seqlens is None:
        n = torch.arange(q.shape[0], device=q.device)[:, None]
        i = torch.arange(-(-q.shape[1] // CHUNK), device=q.device)
    else:
        n, i = prepare_chunk_indices(cu_seqlens, CHUNK).long().unbind(1)
    return bounds[n] // CHUNK + n + i


def _reference_states(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    state_v_first: bool,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    """The state at the start of each chunk by the reference, `[chunks, HV, K, V]` in q's dtype, chunk by chunk."""
    sizes = (v.shape[3], k.shape[3]) if state_v_first else (k.shape[3], v.shape[3])
    found = [q.new_zeros(0, v.shape[2], *sizes)]
    rows = [x.flatten(0, 1)[None] for x in (q, k, v, g, beta)]
    for n, (start, end) in enumerate(pairwise(_bounds(q, cu_seqlens).tolist())):
        S = q.new_zeros(1, *found[0].shape[1:]) if initial_state is None else initial_state[n, None]
        for t in range(start, end, CHUNK):
            found.append(S.to(q.dtype))
            chunk = (x[:, t : min(t + CHUNK, end)] for x in rows)
            _, state = reference.chunk_gated_delta_rule(
                *chunk, initial_state=S, output_final_state=True, state_v_first=state_v_first
            )
            assert state is not None
            S = state
    return torch.cat(found)
