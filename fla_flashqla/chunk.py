# SPDX-License-Identifier: MIT
"""The forward pass as a sequence of kernels: allocate, launch, nothing else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from fla_flashqla.plan import Plan

CHUNK = 64


class Kernels(NamedTuple):
    """What is compiled together."""

    prepare: Any
    prepare_single: Any  # one warp a block, for small groups
    forward: Any  # a value head in one block
    forward_halves: Any  # in two, each with half of V


_built: dict[tuple[str, ...], Kernels] = {}


def build(plan: Plan) -> Kernels:
    """Compile the kernels of `plan`, once per process; raises what the compiler raises."""
    kernels = _built.get(plan.compiled)
    if kernels is None:
        from fla_flashqla.kernels import compile_kernel, forward, prepare

        sources = (
            (
                f"prepare-{plan.dtype}-{plan.g_dtype}-{plan.beta_dtype}",
                prepare.prepare_kernel(plan.dtype, plan.g_dtype, plan.beta_dtype),
                prepare.PASS_CONFIGS,
            ),
            (
                f"prepare_single-{plan.dtype}-{plan.g_dtype}-{plan.beta_dtype}",
                prepare.prepare_kernel(plan.dtype, plan.g_dtype, plan.beta_dtype, warps=1),
                prepare.PASS_CONFIGS,
            ),
            (
                f"forward-{plan.dtype}",
                forward.forward_kernel(plan.dtype),
                forward.PASS_CONFIGS,
            ),
            (
                f"forward_halves-{plan.dtype}",
                forward.forward_kernel(plan.dtype, warpgroups=1),
                forward.PASS_CONFIGS,
            ),
        )
        with ThreadPoolExecutor(len(sources)) as pool:  # most of the time is spent in nvcc
            kernels = Kernels(*pool.map(compile_kernel, *zip(*sources, strict=True)))
        _built[plan.compiled] = kernels
    return kernels


def _packed(x: torch.Tensor, *shape: int) -> torch.Tensor:
    """`x` as TMA can read it, contiguous and 16-byte aligned, viewed as `shape`."""
    x = x.contiguous()
    return (x if x.data_ptr() % 16 == 0 else x.clone()).view(shape)


def _normalized(x: torch.Tensor) -> torch.Tensor:
    """l2norm over the last dimension as FLA defines it."""
    wide = x.float()
    return (wide * (wide.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


class _Layout(NamedTuple):
    """How the sequences of a call lie in its B T tokens."""

    N: int
    seqlen: int  # 0: `cu` says
    cu: torch.Tensor | None  # int32
    cu_step: int
    slots: int  # chunk slots, see kernels/prepare.py

    @classmethod
    def of(cls, B: int, T: int, cu_seqlens: torch.Tensor | None) -> _Layout:
        if cu_seqlens is None:
            return cls(B, T, None, 1, B * T // CHUNK + B + 1)
        N, cu, step = cu_seqlens.numel() - 1, cu_seqlens.contiguous(), 1
        if cu.dtype == torch.int64:  # the low words, which hold every count below 2**31
            cu, step = cu.view(torch.int32), 2
        return cls(N, 0, cu, step, B * T // CHUNK + N + 1)

    def cu_or(self, unused: torch.Tensor) -> torch.Tensor:
        """`cu`, or what stands in where it is never read."""
        return unused.view(-1).view(torch.int32) if self.cu is None else self.cu


class Prepared(NamedTuple):
    """What is known of the chunks before any state, see kernels/prepare.py."""

    r: torch.Tensor  # [slots, HV, 64, 64]
    gates: torch.Tensor  # [slots, HV, 6, 64]
    o: torch.Tensor  # [B, T, HV, V], 0 behind the last boundary and not yet written before it


def prepare(
    plan: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    normalize_q: bool = False,
    normalize_k: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> Prepared:
    """Launch the state-independent part; arguments as in `forward`, l2norm being asked for q and k apart."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    tokens = B * T
    at = _Layout.of(B, T, cu_seqlens)
    r = q.new_empty(at.slots, HV, CHUNK, CHUNK)
    gates = q.new_empty(at.slots, HV, 6, CHUNK, dtype=torch.float32)
    o = torch.empty(B, T, HV, V, dtype=q.dtype, device=q.device)
    kernels = build(plan)
    (kernels.prepare if plan.warps == 4 else kernels.prepare_single)(
        _packed(q, tokens, H, K),
        _packed(k, tokens, H, K),
        g.contiguous().view(tokens, HV),
        beta.contiguous().view(tokens, HV),
        at.cu_or(gates),
        r,
        gates,
        o.view(tokens, HV, V),
        *(scale, at.seqlen, at.cu_step, at.N, H, HV // H, int(normalize_q), int(normalize_k)),
    )
    return Prepared(r, gates, o)


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
    """Launch the forward pass on the current stream of the tensors' device, without waiting for it.

    Args:
        plan (Plan):
            What `plan.plan` returned for this call.
        q, k (torch.Tensor):
            `[B, T, H, 128]`, float16 or bfloat16.
        v (torch.Tensor):
            `[B, T, HV, 128]`, same dtype.
        g, beta (torch.Tensor):
            Log decay (natural log) and beta, `[B, T, HV]`; float32, bfloat16 or float16.
        scale (float):
            Factor of q; a negative one costs a further pass over o.
        initial_state (torch.Tensor, Optional):
            `[N, HV, K, V]`, or `[N, HV, V, K]` with `state_v_first`.
        cu_seqlens (torch.Tensor, Optional):
            Boundaries `[N + 1]`, int32 or int64, on the same device.

    Returns:
        o `[B, T, HV, V]` in q's dtype and the final state in float32, laid out as `initial_state`, or `None`.
    """
    if torch.cuda.current_device() != q.device.index:
        with torch.cuda.device(q.device):
            return forward(
                plan, q, k, v, g, beta, scale, initial_state, output_final_state,
                use_qk_l2norm_in_kernel, state_v_first, cu_seqlens,
            )  # fmt: skip
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    tokens = B * T
    at = _Layout.of(B, T, cu_seqlens)
    q, k = _packed(q, B, T, H, K), _packed(k, B, T, H, K)
    normalize_k = use_qk_l2norm_in_kernel
    if normalize_k and plan.dtype == "float16":
        # The kernels multiply U by 1 / |k| and round it: float16 has no such small numbers for long keys.
        k, normalize_k = _normalized(k), False
    r, gates, o = prepare(
        plan, q, k, v, g, beta, abs(scale), use_qk_l2norm_in_kernel, normalize_k, cu_seqlens
    )
    unused = gates.view(-1)  # stands in for what is not there
    final_state = None
    if output_final_state:
        shape = (at.N, HV, V, K) if state_v_first else (at.N, HV, K, V)
        final_state = torch.empty(shape, dtype=torch.float32, device=q.device)
    kernels = build(plan)
    (kernels.forward if plan.splits == 1 else kernels.forward_halves)(
        q.view(tokens, H, K),
        k.view(tokens, H, K),
        _packed(v, tokens, HV, V),
        r,
        gates,
        at.cu_or(gates),
        unused if initial_state is None else initial_state.float().contiguous().view(-1),
        o.view(tokens, HV, V),
        unused if final_state is None else final_state.view(-1),
        *(at.seqlen, at.cu_step, at.N, HV, HV // H),
        *(int(initial_state is not None), int(output_final_state)),
        *((1, K) if state_v_first else (V, 1)),
    )
    if scale < 0:  # the kernels take its logarithm
        o.neg_()
    return o, final_state
