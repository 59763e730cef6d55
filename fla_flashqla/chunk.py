# SPDX-License-Identifier: MIT
"""Forward and backward pass as sequences of kernels: allocate, launch, nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fla_flashqla import arch, l2norm, segments
from fla_flashqla.activations import NONE, Activations
from fla_flashqla.layout import CHUNK, Layout

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
        kernels = _built[plan.compiled] = Kernels(*compile_kernels(sources))
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

        dtype, gate_dtypes = plan.dtype, (plan.g_dtype, plan.beta_dtype)
        sources = (
            (f"states-{dtype}", states.states_kernel(dtype, 2), states.PASS_CONFIGS),
            (f"states_halves-{dtype}", states.states_kernel(dtype, 1), states.PASS_CONFIGS),
            (f"reverse-{dtype}", reverse.reverse_kernel(dtype, 2), reverse.PASS_CONFIGS),
            (f"reverse_halves-{dtype}", reverse.reverse_kernel(dtype, 1), reverse.PASS_CONFIGS),
            (
                "-".join(("gradients", dtype, *gate_dtypes)),
                gradients.gradients_kernel(dtype, *gate_dtypes),
                gradients.PASS_CONFIGS,
            ),
        )
        kernels = _built_backward[plan.compiled] = BackwardKernels(*compile_kernels(sources))
    return kernels


def _packed(x: torch.Tensor, *shape: int) -> torch.Tensor:
    """`x` as TMA can read it, contiguous and 16-byte aligned, viewed as `shape`."""
    x = x.contiguous()
    return (x if x.data_ptr() % 16 == 0 else x.clone()).view(*shape)


def _flat(x: torch.Tensor | None) -> torch.Tensor | None:
    """States as kernels read them."""
    return None if x is None else x.float().contiguous().view(-1)


def prepare(
    plan: Plan,
    at: Layout,
    buffer: torch.Tensor,
    cu: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    o: torch.Tensor,
    scale: float,
    normalize_q: bool = False,
    normalize_k: bool = False,
    activations: Activations = NONE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the state-independent part.

    Args:
        buffer (torch.Tensor):
            Flat, float32, of `Layout.words`: what is made goes there.
        cu (torch.Tensor):
            Boundaries, or what stands in for them.
        q, k, g, beta, o (torch.Tensor):
            `[tokens, H, 128]`, `[tokens, HV]` and `[tokens, HV, 128]` as kernels read them; rows of o behind the last boundary become 0.
        normalize_q, normalize_k (bool):
            Whether q and k are normalised.

    Returns:
        What is known of the chunks before any state, see kernels/prepare.py: R `[slots, HV, 64, 64]` and gates `[slots, HV, 8, 64]`,
        which fill one storage.
    """
    H, HV = q.shape[1], g.shape[1]
    r, gates = at.split(buffer, HV, q.dtype)
    A_log, dt_bias, *raw = activations.arguments(buffer)
    kernels = build(plan)
    (kernels.prepare if plan.warps == 4 else kernels.prepare_single)(
        *(q, k, g, beta, A_log, dt_bias, cu, r, gates, o),
        *(scale, at.seqlen, at.cu_step, at.N, H, HV // H, int(normalize_q), int(normalize_k)),
        *(int(plan.gradients), *raw),
    )
    return r, gates


class Forward(NamedTuple):
    """Results, and what the backward pass takes over."""

    o: torch.Tensor
    final_state: torch.Tensor | None
    r: torch.Tensor
    gates: torch.Tensor


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
    activations: Activations = NONE,
) -> Forward:
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
        activations (Activations):
            What to make of g and beta. Default: nothing.

    Returns:
        o `[B, T, HV, V]` in q's dtype; the final state in float32, laid out as `initial_state`, or `None`; what
        `backward` needs of the preparation.
    """
    if torch.cuda.current_device() != q.device.index:
        with torch.cuda.device(q.device):
            return forward(
                plan, q, k, v, g, beta, scale, initial_state, output_final_state,
                use_qk_l2norm_in_kernel, state_v_first, cu_seqlens, activations,
            )  # fmt: skip
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    tokens = B * T
    # The recurrence starts while the kernel before it still runs: between the launches nothing may be copied, allocated or freed
    # (what `segments` launches waits for all before it).
    q, k, v = _packed(q, tokens, H, K), _packed(k, tokens, H, K), _packed(v, tokens, HV, V)
    g, beta = g.contiguous().view(tokens, HV), beta.contiguous().view(tokens, HV)
    activations = activations.packed()
    h0 = _flat(initial_state)
    at = Layout.of(B, T, cu_seqlens)
    normalize_k = use_qk_l2norm_in_kernel
    if normalize_k and plan.dtype == "float16":
        # The kernels multiply U by 1 / |k| and round it: float16 has no such small numbers for long keys.
        k, normalize_k = l2norm.forward(k), False
    final_state = None
    if output_final_state:
        sizes = (V, K) if state_v_first else (K, V)
        final_state = q.new_empty(at.N, HV, *sizes, dtype=torch.float32)
    o = torch.empty_like(v)
    normalize = use_qk_l2norm_in_kernel, normalize_k
    unused = q.new_empty(at.words(HV, q.dtype), dtype=torch.float32)  # also where there is nothing
    cu, lengths = at.cu_or(unused), (at.seqlen, at.cu_step, at.N)
    r, gates = prepare(
        *(plan, at, unused, cu, q, k, g, beta, o, abs(scale), *normalize, activations)
    )
    strides = (1, K) if state_v_first else (V, 1)
    if plan.segment:
        h0 = segments.starts(plan, segments.Chunks(k, r, gates, cu, lengths, strides), v, h0)
    kernels = build(plan)
    (kernels.forward if plan.blocks("forward") == 1 else kernels.forward_halves)(
        *(q, k, v, r, gates, cu),
        unused if h0 is None else h0,
        o,
        unused if final_state is None else final_state.view(-1),
        *(*lengths, HV, HV // H, int(h0 is not None), int(output_final_state), *strides),
        *_taken(plan, at, tokens, plan.segment),
    )
    if scale < 0:  # the kernels take its logarithm
        o.neg_()
    return Forward(o.view(B, T, HV, V), final_state, r, gates)


class Needs(NamedTuple):
    """The inputs whose gradients are asked for."""

    q: bool = True
    k: bool = True
    v: bool = True
    g: bool = True
    beta: bool = True
    initial_state: bool = True
    A_log: bool = True
    dt_bias: bool = True

    def of(self, initial_state: torch.Tensor | None, activations: Activations) -> Needs:
        """Only of what there is."""
        return self._replace(
            initial_state=self.initial_state and initial_state is not None,
            A_log=self.A_log and activations.A_log is not None,
            dt_bias=self.dt_bias and activations.dt_bias is not None,
        )


ALL = Needs()


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
    plan: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    r: torch.Tensor,
    gates: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    do: torch.Tensor | None = None,
    dht: torch.Tensor | None = None,
    needs: Needs = ALL,
    activations: Activations = NONE,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
) -> Gradients:
    """Launch the backward pass on the current stream of the tensors' device, without waiting for it.

    Which kernels run depends on `needs`: `states` makes what only `gradients` reads, and dq does not depend on what
    `reverse` makes.

    Args:
        plan, q, k, v, scale, initial_state, use_qk_l2norm_in_kernel, state_v_first, cu_seqlens:
            As `forward` got them.
        r, gates (torch.Tensor):
            What `forward` returned.
        do (torch.Tensor, Optional):
            Gradient of o, any strides. Default: `None` (zero).
        dht (torch.Tensor, Optional):
            Gradient of the final state, any strides. Default: `None` (zero).
        needs (Needs):
            The gradients to compute; those of optional inputs only where there are any. Default: all.
        activations (Activations):
            As `forward` got them.
        g, beta (torch.Tensor, Optional):
            As `forward` got them; read where `activations` says what was made of them.
    """
    if torch.cuda.current_device() != q.device.index:
        with torch.cuda.device(q.device):
            return backward(
                plan, q, k, v, r, gates, scale, initial_state, use_qk_l2norm_in_kernel, state_v_first, cu_seqlens,
                do, dht, needs, activations, g, beta,
            )  # fmt: skip
    needs = needs.of(initial_state, activations)
    gating = needs.g or needs.beta or needs.A_log or needs.dt_bias
    chunks = needs.q or needs.k or gating  # what chunks compute side by side
    chain = needs.k or needs.v or gating or needs.initial_state
    if (do is None and dht is None) or not (chunks or chain):
        return Gradients()
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    tokens = B * T
    at = Layout.of(B, T, cu_seqlens)
    unused = gates.view(-1)
    cu = at.cu_or(unused)
    lengths = at.seqlen, at.cu_step, at.N
    strides = (1, K) if state_v_first else (V, 1)
    kernels = build_backward(plan)

    normalize = use_qk_l2norm_in_kernel
    ahead = normalize and plan.dtype == "float16"  # as in `forward`
    q_in = _packed(q, tokens, H, K)
    k_in = _packed(l2norm.forward(k) if ahead else k, tokens, H, K)
    do = q.new_zeros(tokens, HV, V) if do is None else _packed(do, tokens, HV, V)
    if scale < 0:  # as in `forward`
        scale, do = -scale, -do

    v_in = _packed(v, tokens, HV, V) if chunks else do
    h0 = _flat(initial_state) if chunks else None
    dht = _flat(dht) if chain else None
    ds = q.new_empty(at.slots, HV, V, K) if chain else None
    segment = plan.backward_segment
    all_chunks = segments.Chunks(k_in, r, gates, cu, lengths, strides)
    if segment:
        h0, dht = segments.boundaries(plan, all_chunks, q_in, v_in, do, h0, dht, ds, chunks)
    # The kernels run side by side: between their launches nothing may be copied, allocated or freed.
    beside = plan.beside if chunks and chain else None
    dh0 = None
    if chain:
        # `gradients` zeroes the rows behind the last boundary, here too
        dv = (q.new_empty if chunks or cu_seqlens is None else q.new_zeros)(tokens, HV, V)
        if needs.initial_state:
            assert initial_state is not None
            dh0 = q.new_empty(initial_state.shape, dtype=torch.float32)
    if chunks:
        dq, dk = q.new_empty(tokens, H, K), q.new_empty(tokens, H, K)
        dg = q.new_empty(tokens, HV, dtype=getattr(torch, plan.g_dtype))
        dbeta = q.new_empty(tokens, HV, dtype=getattr(torch, plan.beta_dtype))
        A_log, dt_bias, raw_g, raw_beta = activations.arguments(unused)
        shares = gates.new_empty(at.slots, 2, HV) if raw_g else gates.view(-1, 2, HV)
        g = dg if g is None or not raw_g else g.contiguous().view(tokens, HV)
        beta = dbeta if beta is None or not raw_beta else beta.contiguous().view(tokens, HV)
    taken = _taken(plan, at, tokens, segment)
    progress = unused.view(torch.int32)
    if beside:
        words = at.progress_words(taken[-1], H, HV)
        progress = torch.zeros(words, dtype=torch.int32, device=q.device)
    under_way = 0 if beside is None or beside.ahead else beside.states  # blocks of states.py a head
    if chunks:
        s, y = _states(plan, at, all_chunks, v_in, h0, unused, progress, int(under_way > 0))
    if chain:  # gradients of S behind each chunk, of v and of the initial state
        (kernels.reverse if plan.blocks("backward") == 1 else kernels.reverse_halves)(
            *(q_in, k_in, do, r, gates, cu, unused if dht is None else dht, ds, dv),
            *(unused if dh0 is None else dh0.view(-1), progress),
            *(*lengths, HV, HV // H, int(dht is not None), int(dh0 is not None), *strides),
            *(*taken, 0.0, int(chunks and not (beside and beside.ahead)), int(beside is not None)),
        )
    else:
        ds, dv = s, y  # of the right shape, and finite
    if chunks:
        kernels.gradients(
            *(q_in, k_in, do, dv, y, s, ds, gates, g, beta, A_log, dt_bias, cu),
            *(dq, dk, dg, dbeta, shares, progress),
            *(scale, *lengths, H, HV // H, int(normalize), int(normalize and not ahead)),
            *(raw_g, raw_beta),
            min(at.slots * H, arch.device_facts(q.device).sms),  # blocks that share the work
            *(taken[-1], beside.reverse if beside else 0, under_way),
        )
    if dh0 is not None and initial_state is not None:
        dh0 = dh0.to(initial_state.dtype)
    if not chunks:
        return Gradients(v=dv.view(v.shape) if needs.v else None, initial_state=dh0)
    dk = dk.view(B, T, H, K)
    dA_log, ddt_bias = activations.gradients(shares, needs.A_log, needs.dt_bias)
    return Gradients(
        q=dq.view(B, T, H, K) if needs.q else None,
        k=(l2norm.backward(k, dk) if ahead else dk) if needs.k else None,
        v=dv.view(B, T, HV, V) if needs.v else None,
        g=dg.view(B, T, HV) if needs.g else None,
        beta=dbeta.view(B, T, HV) if needs.beta else None,
        initial_state=dh0,
        A_log=dA_log,
        dt_bias=ddt_bias,
    )


def states(
    plan: Plan,
    at: Layout,
    k: torch.Tensor,
    v: torch.Tensor,
    r: torch.Tensor,
    gates: torch.Tensor,
    initial_state: torch.Tensor | None,
    state_v_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the forward recurrence without o; arguments as in `backward`.

    Returns:
        The state at the start of each chunk, transposed, `[slots, HV, V, K]`, and Y, the chunk's error before beta, `[B T, HV, V]`.
    """
    if torch.cuda.current_device() != v.device.index:
        with torch.cuda.device(v.device):
            return states(plan, at, k, v, r, gates, initial_state, state_v_first)
    (H, K), (HV, V) = k.shape[-2:], v.shape[-2:]
    unused = gates.view(-1)
    chunks = segments.Chunks(
        *(_packed(k, -1, H, K), r, gates, at.cu_or(unused), (at.seqlen, at.cu_step, at.N)),
        (1, K) if state_v_first else (V, 1),
    )
    plan = plan.without("backward_segments")
    v, h0 = _packed(v, -1, HV, V), _flat(initial_state)
    return _states(plan, at, chunks, v, h0, unused, unused.view(torch.int32))


def _states(
    plan: Plan,
    at: Layout,
    chunks: segments.Chunks,
    v: torch.Tensor,
    h0: torch.Tensor | None,
    unused: torch.Tensor,
    progress: torch.Tensor,
    publish: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `states`, of what kernels read; `h0` are the states of segments where the plan cuts the backward."""
    k, r, gates, cu, lengths, strides = chunks
    (H, K), (tokens, HV, V) = k.shape[-2:], v.shape
    s, y = v.new_empty(at.slots, HV, V, K), torch.empty_like(v)
    kernels = build_backward(plan)
    (kernels.states if plan.blocks("states") == 1 else kernels.states_halves)(
        *(k, v, r, gates, cu, unused if h0 is None else h0, s, y, progress),
        *(*lengths, HV, HV // H, int(h0 is not None), *strides),
        *(*_taken(plan, at, tokens, plan.backward_segment), publish),
    )
    return s, y


def _taken(plan: Plan, at: Layout, tokens: int, segment: int) -> tuple[int, int, int]:
    """In which order sequences are taken, in segments of how many tokens, and how many of these there are at most."""
    return int(plan.longest_first and not segment), segment, segments.slots(segment, tokens, at.N)


def rehearse_backward(plan: Plan, device: torch.device) -> None:
    """Launch the kernels of the backward pass once, on one token: if they cannot run, that shows before a call needs them."""
    x = torch.zeros(1, 1, 1, 128, dtype=getattr(torch, plan.dtype), device=device)
    slots = Layout.of(1, 1, None).slots
    r = x.new_zeros(slots, 1, CHUNK, CHUNK)
    gates = x.new_zeros(slots, 1, 8, CHUNK, dtype=torch.float32)
    h0 = x.new_zeros(1, 1, 128, 128, dtype=torch.float32)
    plan = replace(
        plan,
        splits=plan.blocks("backward"),
        states_whole=plan.blocks("states") == 1,
        backward_segment=0,
    )
    backward(plan, x, x, x, r, gates, 1.0, h0, do=x, dht=h0)
