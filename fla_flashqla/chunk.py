# SPDX-License-Identifier: MIT
"""The forward pass as a sequence of kernels: allocate, launch, nothing else."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from .plan import Plan

CHUNK = 64


class Kernels(NamedTuple):
    """The compiled kernels of one plan."""

    prepare: Any
    forward: Any


_built: dict[Plan, Kernels] = {}
_lock = threading.Lock()


def build(plan: Plan) -> Kernels:
    """Compile the kernels of `plan`, once per process; raises what the compiler raises."""
    kernels = _built.get(plan)
    if kernels is None:
        with _lock:
            kernels = _built.get(plan)
            if kernels is None:
                from .kernels import compile_kernel, forward, prepare

                with ThreadPoolExecutor(2) as pool:  # most of the time goes into a subprocess each
                    jobs = (
                        pool.submit(
                            compile_kernel,
                            prepare.prepare_kernel(plan.dtype, plan.g_dtype, plan.beta_dtype),
                            prepare.PASS_CONFIGS,
                        ),
                        pool.submit(compile_kernel, forward.forward_kernel(plan.dtype), forward.PASS_CONFIGS),
                    )
                    kernels = Kernels(*(job.result() for job in jobs))
                _built[plan] = kernels
    return kernels


def forward(
    plan: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch the forward pass on the current stream of the tensors' device; the device is never waited for.

    Args:
        plan (Plan): what `plan.plan` returned for this call.
        q, k (torch.Tensor): `[B, T, H, 128]`, float16 or bfloat16.
        v (torch.Tensor): `[B, T, HV, 128]`, same dtype.
        g, beta (torch.Tensor): `[B, T, HV]`, log decay (natural log) and beta; float32, bfloat16 or float16.
        scale (float): factor of q.
        initial_state (torch.Tensor, optional): `[N, HV, K, V]`, or `[N, HV, V, K]` with `state_v_first`.
        cu_seqlens (torch.Tensor, optional): `[N + 1]`, int32 or int64, on the same device.

    Returns:
        o `[B, T, HV, V]` in q's dtype and the final state in float32, laid out as `initial_state` (or None).
    """
    import torch

    if torch.cuda.current_device() != q.device.index:
        with torch.cuda.device(q.device):
            return forward(
                plan, q, k, v, g, beta, scale, initial_state, output_final_state,
                use_qk_l2norm_in_kernel, state_v_first, cu_seqlens,
            )  # fmt: skip
    kernels = build(plan)
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    tokens = B * T
    if cu_seqlens is None:
        N, seqlen, cu_step = B, T, 1
    else:
        N, seqlen, cu_step = cu_seqlens.numel() - 1, 0, 1
        cu = cu_seqlens.contiguous()
        if cu.dtype == torch.int64:  # little-endian: the low words, which hold every count below 2**31
            cu, cu_step = cu.view(torch.int32), 2
    slots = tokens // CHUNK + N + 1
    q, k = (x.contiguous().view(tokens, H, K) for x in (q, k))
    v = v.contiguous().view(tokens, HV, V)
    g, beta = (x.contiguous().view(tokens, HV) for x in (g, beta))
    a = q.new_empty(slots, HV, CHUNK, CHUNK)
    gates = q.new_empty(slots, HV, 6, CHUNK, dtype=torch.float32)
    o = torch.empty(B, T, HV, V, dtype=q.dtype, device=q.device)
    if cu_seqlens is None:
        cu = gates.view(torch.int32).view(-1)  # never read
    h0 = ht = gates.view(-1)  # stands in for a state that is not there; never touched
    if initial_state is not None:
        h0 = initial_state.to(torch.float32).contiguous().view(-1)
    final_state = None
    if output_final_state:
        shape = (N, HV, V, K) if state_v_first else (N, HV, K, V)
        final_state = torch.empty(shape, dtype=torch.float32, device=q.device)
        ht = final_state.view(-1)
    flat_o = o.view(tokens, HV, V)
    group = HV // H
    kernels.prepare(
        q, k, g, beta, cu, a, gates, flat_o,
        scale, seqlen, cu_step, N, H, group, int(use_qk_l2norm_in_kernel),
    )  # fmt: skip
    kernels.forward(
        q, k, v, a, gates, cu, h0, flat_o, ht,
        scale, seqlen, cu_step, N, HV, group, int(initial_state is not None), int(output_final_state),
        1 if state_v_first else V, K if state_v_first else 1,
    )  # fmt: skip
    return o, final_state
