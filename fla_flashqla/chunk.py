# SPDX-License-Identifier: MIT
"""Forward and backward pass as sequences of kernels: allocate, launch, nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fla_flashqla import arch, l2norm, segments
from fla_flashqla.activations import NONE, Activations
from fla_flashqla.layout import Packed, Setup, aligned, boundaries

if TYPE_CHECKING:
    from fla_flashqla.plan import Plan


class Kernels(NamedTuple):
    """What is compiled together for the forward pass."""

    prepare: Any
    prepare_single: Any  # one warp a block, for small groups
    forward: Any  # a value head in one block
    forward_halves: Any  # in two, each with half of V


_built: dict[tuple[str, ...], Kernels] = {}


def build(plan: Plan) -> Kernels:
    """Compile the kernels of `plan`, once per process; raises what the compiler raises."""
    kernels = _built.get(plan.compiled)
    if kernels is None:
        from fla_flashqla.kernels import compile_kernels, forward, prepare
        from fla_flashqla.kernels.products import in_form

        row = arch.named(plan.arch)
        whole, halves = (forward.forward_kernel(plan.dtype, n, row.form) for n in (2, 1))
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
            in_form(row.form, f"forward-{plan.dtype}", whole, forward.PASS_CONFIGS),
            in_form(row.form, f"forward_halves-{plan.dtype}", halves, forward.PASS_CONFIGS),
        )
        kernels = _built[plan.compiled] = Kernels(*compile_kernels(sources, row))
    return kernels


class BackwardKernels(NamedTuple):
    """What is compiled together for the backward pass, which inference never needs."""

    states: Any  # a value head in one block
    states_halves: Any  # in two, each with half of V
    reverse: Any
    reverse_halves: Any
    gradients: Any


_built_backward: dict[tuple[str, ...], BackwardKernels] = {}


def build_backward(plan: Plan) -> BackwardKernels:
    """As `build`, the kernels of the backward pass."""
    kernels = _built_backward.get(plan.compiled)
    if kernels is None:
        from fla_flashqla.kernels import compile_kernels, gradients, reverse, states
        from fla_flashqla.kernels.products import in_form

        dtype, gate_dtypes = plan.dtype, (plan.g_dtype, plan.beta_dtype)
        row = arch.named(plan.arch)
        form = row.form
        chains = (
            (f"states-{dtype}", states.states_kernel(dtype, 2, form), states.PASS_CONFIGS),
            (f"states_halves-{dtype}", states.states_kernel(dtype, 1, form), states.PASS_CONFIGS),
            (f"reverse-{dtype}", reverse.reverse_kernel(dtype, 2, form), reverse.PASS_CONFIGS),
            (
                f"reverse_halves-{dtype}",
                reverse.reverse_kernel(dtype, 1, form),
                reverse.PASS_CONFIGS,
            ),
            (
                "-".join(("gradients", dtype, *gate_dtypes)),
                gradients.gradients_kernel(dtype, *gate_dtypes, form),
                gradients.PASS_CONFIGS,
            ),
        )
        sources = [in_form(form, *kernel) for kernel in chains]
        kernels = _built_backward[plan.compiled] = BackwardKernels(*compile_kernels(sources, row))
    return kernels


def _float(x: torch.Tensor | None) -> torch.Tensor | None:
    """States as kernels read them."""
    if x is None:
        return None
    return (x if x.dtype == torch.float32 else x.float()).contiguous()


def prepare(
    setup: Setup,
    r: torch.Tensor,
    gates: torch.Tensor,
    cu: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    o: torch.Tensor,
    scale: float,
    activations: Activations = NONE,
) -> None:
    """Launch the state-independent part.

    Args:
        r, gates (torch.Tensor):
            R `[slots, HV, 64, 64]` and gates `[slots, HV, 8, 64]`, which this fills: what is known of the chunks before any state, see
            kernels/prepare.py.
        cu (torch.Tensor):
            Boundaries, or what stands in for them.
        q, k, g, beta, o (torch.Tensor):
            `[B, T, H, 128]`, `[B, T, HV]` and `[B, T, HV, 128]`, contiguous; rows of o behind the last boundary become 0.
    """
    plan = setup.plan
    A_log, dt_bias, raw_g, raw_beta = activations.arguments(gates)
    kernels = build(plan)
    (kernels.prepare if plan.warps == 4 else kernels.prepare_single)(
        *(q, k, g, beta, A_log, dt_bias, cu, r, gates, o, scale, *setup.tokens),
        *setup.normalized,
        *(int(plan.gradients), raw_g, raw_beta),
    )


class Forward(NamedTuple):
    """Results, and what the backward pass takes over."""

    o: torch.Tensor
    final_state: torch.Tensor | None
    r: torch.Tensor
    gates: torch.Tensor
    packed: Packed


def forward(
    setup: Setup,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    activations: Activations = NONE,
    kept: torch.Tensor | None = None,
) -> Forward:
    """Launch the forward pass on the current stream of the tensors' device, without waiting for it.

    Args:
        setup (Setup):
            Of this call, with what `plan.plan` returned for it.
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
        activations (Activations):
            What to make of g and beta. Default: nothing.
        kept (torch.Tensor, Optional):
            Flat, float32, of `Layout.words`: where to put what `backward` needs. Default: anywhere.

    Returns:
        o `[B, T, HV, V]` in q's dtype; the final state in float32, laid out as `initial_state`, or `None`; what
        `backward` needs of the preparation and of the inputs.
    """
    if torch.cuda.current_device() != q.device.index:
        with torch.cuda.device(q.device):
            return forward(
                setup, q, k, v, g, beta, scale, initial_state, cu_seqlens, activations, kept
            )
    # The recurrence starts while the kernel before it still runs: between the launches nothing may be copied, allocated or freed
    # (what `segments` launches waits for all before it).
    packed = Packed.of(q, k, v, cu_seqlens)
    q, k, v, cu = packed
    g, beta = g.contiguous(), beta.contiguous()
    activations = activations.packed()
    h0 = _float(initial_state)
    if setup.ahead:
        # The kernels multiply U by 1 / |k| and round it: float16 has no such small numbers for long keys.
        k = l2norm.forward(k)
    o = torch.empty_like(v)
    if kept is None:  # each on its own, which takes the host less time than views
        r, gates = q.new_empty(*setup.r), q.new_empty(*setup.gates, dtype=torch.float32)
    else:
        r, gates = setup.at.split(kept, v.shape[2], q.dtype)
    final_state = gates.new_empty(*setup.final) if setup.output_final_state else None
    prepare(setup, r, gates, cu, q, k, g, beta, o, abs(scale), activations)
    plan = setup.plan
    if plan.segment:
        chunks = segments.Chunks(k, r, gates, cu, setup.lengths, setup.strides)
        h0 = segments.starts(plan, chunks, v, h0)
    kernels = build(plan)
    (kernels.forward if plan.blocks("forward") == 1 else kernels.forward_halves)(
        # gates stand in for what there is not
        *(q, k, v, r, gates, cu, gates if h0 is None else h0, o),
        gates if final_state is None else final_state,
        *(*setup.chains, int(h0 is not None), int(final_state is not None), *setup.order),
    )
    if scale < 0:  # the kernels take its logarithm
        o.neg_()
    return Forward(o, final_state, r, gates, packed)


class Needs(NamedTuple):
    """The inputs whose gradients are asked for."""

    q: bool
    k: bool
    v: bool
    g: bool
    beta: bool
    initial_state: bool
    A_log: bool
    dt_bias: bool

    @classmethod
    def of(cls, initial_state: torch.Tensor | None, activations: Activations) -> Needs:
        """All that there are."""
        parameters = (x is not None for x in activations[:2])
        return cls(True, True, True, True, True, initial_state is not None, *parameters)


class Gradients(NamedTuple):
    """Gradients in their inputs' dtypes and layouts; `None` where nobody asked."""

    q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    g: torch.Tensor | None = None
    beta: torch.Tensor | None = None
    initial_state: torch.Tensor | None = None
    A_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None


def backward(
    setup: Setup,
    packed: Packed,
    r: torch.Tensor,
    gates: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor | None = None,
    do: torch.Tensor | None = None,
    dht: torch.Tensor | None = None,
    needs: Needs | None = None,
    activations: Activations = NONE,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
) -> Gradients:
    """Launch the backward pass on the current stream of the tensors' device, without waiting for it.

    Which kernels run depends on `needs`: `states` makes what only `gradients` reads, and dq does not depend on what
    `reverse` makes.

    Args:
        setup, scale, initial_state:
            As `forward` got them.
        packed, r, gates:
            What `forward` returned.
        do (torch.Tensor, Optional):
            Gradient of o, any strides. Default: `None` (zero).
        dht (torch.Tensor, Optional):
            Gradient of the final state, any strides. Default: `None` (zero).
        needs (Needs):
            The gradients to compute, none of what there is not. Default: all others.
        activations (Activations):
            As `forward` got them.
        g, beta (torch.Tensor, Optional):
            As `forward` got them; read where `activations` says what was made of them.
    """
    q, k, v, cu = packed
    if torch.cuda.current_device() != q.device.index:
        with torch.cuda.device(q.device):
            return backward(
                *(setup, packed, r, gates, scale, initial_state),
                *(do, dht, needs, activations, g, beta),
            )
    needs = Needs.of(initial_state, activations) if needs is None else needs
    gating = needs.g or needs.beta or needs.A_log or needs.dt_bias
    chunks = needs.q or needs.k or gating  # what chunks compute side by side
    chain = needs.k or needs.v or gating or needs.initial_state
    if (do is None and dht is None) or not (chunks or chain):
        return Gradients()
    plan = setup.plan
    kernels = build_backward(plan)
    k_in = l2norm.forward(k) if setup.ahead else k
    do = torch.zeros_like(v) if do is None else aligned(do)
    if scale < 0:  # as in `forward`
        scale, do = -scale, -do

    v_in = v if chunks else do
    h0 = _float(initial_state) if chunks else None
    dht = _float(dht) if chain else None
    ds = q.new_empty(*setup.states) if chain else None
    all_chunks = segments.Chunks(k_in, r, gates, cu, setup.lengths, setup.strides)
    if plan.backward_segment:
        h0, dht = segments.boundaries(plan, all_chunks, q, v_in, do, h0, dht, ds, chunks)
    # The two recurrences run side by side: between their launches nothing may be copied or allocated.
    dh0 = None
    if chain:
        # `gradients` zeroes the rows behind the last boundary, here too
        dv = (torch.empty_like if chunks or setup.at.seqlen else torch.zeros_like)(v)
        if needs.initial_state:
            dh0 = gates.new_empty(*setup.final)
    if chunks:
        s, y = _states(setup, all_chunks, v_in, h0)
    if chain:  # gradients of S behind each chunk, of v and of the initial state
        (kernels.reverse if plan.blocks("backward") == 1 else kernels.reverse_halves)(
            *(q, k_in, do, r, gates, cu, gates if dht is None else dht, ds, dv),
            gates if dh0 is None else dh0,
            *(*setup.chains, int(dht is not None), int(dh0 is not None)),
            *(*setup.order_back, 0.0, int(chunks)),
        )
    else:
        ds, dv = s, y  # of the right shape, and finite
    if dh0 is not None and initial_state is not None and initial_state.dtype != dh0.dtype:
        dh0 = dh0.to(initial_state.dtype)

    if not chunks:
        return Gradients(v=dv if needs.v else None, initial_state=dh0)
    dq, dk = torch.empty_like(q), torch.empty_like(q)
    dg = q.new_empty(*setup.betas, dtype=getattr(torch, plan.g_dtype))
    dbeta = q.new_empty(*setup.betas, dtype=getattr(torch, plan.beta_dtype))
    A_log, dt_bias, raw_g, raw_beta = activations.arguments(gates)
    shares = gates  # stand in
    if raw_g:
        shares = gates.new_empty(setup.at.slots, 2, v.shape[2], 1)
    kernels.gradients(
        q,
        k_in,
        do,
        dv,
        y,
        s,
        ds,
        gates,
        dg if g is None or not raw_g else g.contiguous(),
        dbeta if beta is None or not raw_beta else beta.contiguous(),
        A_log,
        dt_bias,
        cu,
        dq,
        dk,
        dg,
        dbeta,
        shares,
        *(scale, *setup.tokens, *setup.normalized, raw_g, raw_beta),
        min(setup.items, arch.device_facts(q.device).sms),  # blocks that share the work
    )
    if setup.ahead:
        dk = l2norm.backward(k, dk)
    dA_log, ddt_bias = activations.gradients(shares, needs.A_log, needs.dt_bias)
    return Gradients(
        dq if needs.q else None,
        dk if needs.k else None,
        dv if needs.v else None,
        dg if needs.g else None,
        dbeta if needs.beta else None,
        *(dh0, dA_log, ddt_bias),
    )


def states(
    plan: Plan,
    cu_seqlens: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    r: torch.Tensor,
    gates: torch.Tensor,
    initial_state: torch.Tensor | None,
    state_v_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the forward recurrence without o; arguments as in `forward` and `backward`.

    Returns:
        The state at the start of each chunk, transposed, `[slots, HV, V, K]`, and Y, the chunk's error before beta, `[B, T, HV, V]`.
    """
    if torch.cuda.current_device() != v.device.index:
        with torch.cuda.device(v.device):
            return states(plan, cu_seqlens, k, v, r, gates, initial_state, state_v_first)
    plan = plan.without("backward_segments")
    setup = Setup.of(plan, k, v, cu_seqlens, state_v_first=state_v_first)
    cu = boundaries(cu_seqlens, gates)
    chunks = segments.Chunks(aligned(k), r, gates, cu, setup.lengths, setup.strides)
    return _states(setup, chunks, aligned(v), _float(initial_state))


def _states(
    setup: Setup, chunks: segments.Chunks, v: torch.Tensor, h0: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `states`, of what kernels read; `h0` are the states of segments where the plan cuts the backward."""
    s, y = v.new_empty(*setup.states), torch.empty_like(v)
    kernels = build_backward(setup.plan)
    (kernels.states if setup.plan.blocks("states") == 1 else kernels.states_halves)(
        *(chunks.k, v, chunks.r, chunks.gates, chunks.cu, chunks.gates if h0 is None else h0, s, y),
        *(*setup.chains, int(h0 is not None), *setup.order_back),
    )
    return s, y


def rehearse_backward(plan: Plan, device: torch.device) -> None:
    """Launch the kernels of the backward pass once, on one token: if they cannot run, that shows before a call needs them."""
    x = torch.zeros(1, 1, 1, 128, dtype=getattr(torch, plan.dtype), device=device)
    packed = Packed.of(x, x, x, None)
    h0 = x.new_zeros(1, 1, 128, 128, dtype=torch.float32)
    plan = replace(
        plan,
        splits=plan.blocks("backward"),
        states_whole=plan.blocks("states") == 1,
        backward_segment=0,
    )
    setup = Setup.of(plan, x, x, None)
    r, gates = x.new_zeros(setup.r), x.new_zeros(setup.gates, dtype=torch.float32)
    backward(setup, packed, r, gates, 1.0, h0, do=x, dht=h0)
