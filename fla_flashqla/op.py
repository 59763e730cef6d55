# SPDX-License-Identifier: MIT
"""The public operator, and in graphs of torch.compile two nodes that stand for it and for its gradients.

What answers a call is decided, and refused, when a node runs: a graph holds for any lengths.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from fla_flashqla import api, reference
from fla_flashqla.activations import Activations
from fla_flashqla.call import Unsupported
from fla_flashqla.chunk import Needs
from fla_flashqla.layout import Layout
from fla_flashqla.plan import Plan, Refusal


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: Any = None,
    *,
    head_first: bool = False,
    auto_cp: bool = True,
    enable_fwd_cp_cache: bool = True,
    force_intra_cp: bool = False,
    **kwargs: Any,
) -> api.Result:
    """Run the chunked Gated Delta Rule: arguments and results of FLA 0.6.0's operator, without FLA.

    It takes the arguments of flash_qla 0.1.3's function, too. Positions are FLA's, which are the same up to
    `use_qk_l2norm_in_kernel`; what comes behind, above all `cu_seqlens`, is best given by name.

    Args:
        q (torch.Tensor):
            Queries, `[B, T, H, K]`; float16 or bfloat16 on a GPU, any float dtype on the CPU.
        k (torch.Tensor):
            Keys, `[B, T, H, K]`.
        v (torch.Tensor):
            Values, `[B, T, HV, V]`; HV is a multiple of H.
        g (torch.Tensor):
            Log-space decay (natural log), `[B, T, HV]`; with `use_gate_in_kernel` what it is made from.
        beta (torch.Tensor):
            Step sizes, `[B, T, HV]`; with `use_beta_sigmoid_in_kernel` what they are made from.
        scale (float, Optional):
            Factor of the output. Default: `K ** -0.5`.
        initial_state (torch.Tensor, Optional):
            `[N, HV, K, V]`. Default: `None` (zero).
        output_final_state (bool):
            Whether to return the final state. Default: `False`.
        use_qk_l2norm_in_kernel (bool):
            Whether q and k are normalised here. Default: `False`.
        use_beta_sigmoid_in_kernel (bool):
            Whether beta passes through a sigmoid here. Default: `False`.
        allow_neg_eigval (bool):
            Whether that sigmoid is doubled. Default: `False`.
        state_v_first (bool):
            Whether states are `[N, HV, V, K]`. Default: `False`.
        cu_seqlens (torch.Tensor, Optional):
            Boundaries of N packed sequences, `[N + 1]`, int32 or int64, with B = 1.
        cu_seqlens_cpu (torch.Tensor, Optional):
            The same on the CPU: the planner then knows the longest sequence. Not read in graphs.
        chunk_indices (torch.Tensor, Optional):
            Derived from `cu_seqlens`; not read.
        cp_context (Any, Optional):
            Context parallelism; refused.
        head_first (bool):
            flash_qla's and FLA's former argument: `True` is refused. Default: `False`.
        auto_cp, enable_fwd_cp_cache, force_intra_cp (bool):
            How flash_qla splits sequences; not read, the results are the same.
        **kwargs (Any):
            FLA's `use_gate_in_kernel`, with `A_log` and `dt_bias` (optional) of HV elements:
            `g <- -exp(A_log) softplus(g + dt_bias)`. FLA's `chunk_size`, 16, 32 or 64, which tunes its kernels and does not
            change the function. The deprecated `transpose_state_layout` for `state_v_first`.

    Returns:
        o `[B, T, HV, V]` in q's dtype, and the float32 final state or `None`.

    Raises:
        Unsupported: no kernel of ours answers this call; the text says why.
    """
    flag: object = use_beta_sigmoid_in_kernel  # flash_qla has cu_seqlens in this position
    if isinstance(flag, torch.Tensor):
        raise Unsupported("use_beta_sigmoid_in_kernel must be a flag: give cu_seqlens by name")
    if head_first:
        kwargs["head_first"] = True
    if torch.compiler.is_compiling():
        if cp_context is not None:
            kwargs["cp_context"] = cp_context
        flags = use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first
        return _in_graph(
            *((q, k, v, g, beta), scale, initial_state, output_final_state, flags),
            *(cu_seqlens, kwargs),
        )
    args = (
        *(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel),
        *(use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first),
        *(cu_seqlens, cu_seqlens_cpu, chunk_indices, cp_context),
    )
    return api.answer(api.decide(args, kwargs), args, kwargs)


def _in_graph(
    tensors: tuple[torch.Tensor, ...],
    scale: float | None,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    flags: tuple[bool, ...],
    cu_seqlens: torch.Tensor | None,
    keywords: dict[str, Any],
) -> api.Result:
    *others, state_v_first = map(bool, flags)
    if not state_v_first and "transpose_state_layout" in keywords:
        # without the warning, which would break the graph
        state_v_first = bool(keywords.pop("transpose_state_layout"))
    A_log, dt_bias = keywords.pop("A_log", None), keywords.pop("dt_bias", None)
    gate = bool(keywords.pop("use_gate_in_kernel", False))
    if not gate:
        A_log = dt_bias = None
    chunk_size = keywords.pop("chunk_size", 64)
    inputs = *tensors, initial_state, A_log, dt_bias
    gradients = any(x is not None and x.requires_grad for x in inputs) and torch.is_grad_enabled()
    o, final_state, _ = torch.ops.fla_flashqla.chunk_gated_delta_rule(
        *(*tensors, scale, initial_state, bool(output_final_state), *others, state_v_first),
        *(cu_seqlens, gate, A_log, dt_bias, chunk_size, list(keywords), gradients),
    )
    return o, final_state if output_final_state else None


class _Arguments(NamedTuple):
    """Arguments of the node, in the order of `_SCHEMA`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    scale: float | None
    initial_state: torch.Tensor | None
    output_final_state: bool
    use_qk_l2norm_in_kernel: bool
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    state_v_first: bool
    cu_seqlens: torch.Tensor | None
    use_gate_in_kernel: bool
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    chunk_size: int
    refused: list[str]  # other keywords: their names say why the call is refused
    gradients: bool  # whether a backward may follow

    def call(self) -> dict[str, Any]:
        """What the operator was called with, by name."""
        call = self._asdict()
        del call["gradients"]
        return call | dict.fromkeys(call.pop("refused"), True)

    def flags(self) -> tuple[bool, bool]:
        return self.use_qk_l2norm_in_kernel, self.state_v_first

    def layout(self) -> Layout:
        return Layout.of(self.q.shape[0], self.q.shape[1], self.cu_seqlens)

    def words(self) -> int:
        """Size of what is kept for the backward, in float32 words."""
        return self.layout().words(self.v.shape[-2], self.q.dtype) if self.gradients else 0

    def scale_of_q(self) -> float:
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    def activations(self) -> Activations:
        doubled = 2.0 if self.allow_neg_eigval else 1.0
        sigmoid = doubled if self.use_beta_sigmoid_in_kernel else 0.0
        return Activations(self.A_log, self.dt_bias, sigmoid)


_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float? scale, Tensor? initial_state, "
    "bool output_final_state, bool use_qk_l2norm_in_kernel, bool use_beta_sigmoid_in_kernel, "
    "bool allow_neg_eigval, bool state_v_first, Tensor? cu_seqlens, bool use_gate_in_kernel, "
    "Tensor? A_log, Tensor? dt_bias, int chunk_size, str[] refused, bool gradients"
)


@torch.library.custom_op(
    "fla_flashqla::chunk_gated_delta_rule",
    mutates_args=(),
    schema=f"({_SCHEMA}) -> (Tensor o, Tensor final_state, Tensor kept)",
)
@torch.no_grad()
def _forward(*args: Any) -> tuple[torch.Tensor, ...]:
    x = _Arguments(*args)
    call = x.call()
    decision = api.decide((), call, x.gradients)
    if x.gradients and isinstance(decision, Plan):
        kept = x.q.new_empty(x.words(), dtype=torch.float32)
        flags = *x.flags(), x.output_final_state
        inputs = x.q, x.k, x.v, x.g, x.beta, x.scale_of_q(), x.initial_state
        o, final_state, *_ = api.forward(
            decision, flags, x.cu_seqlens, inputs, x.activations(), kept
        )
    else:
        o, final_state = api.answer(decision, (), call)
        kept = x.q.new_zeros(x.words(), dtype=torch.float32)
    return o, kept.new_empty(0) if final_state is None else final_state, kept


@_forward.register_fake
def _(*args: Any) -> tuple[torch.Tensor, ...]:
    x = _Arguments(*args)
    sizes = x.q.shape[-1], x.v.shape[-1]
    state = x.layout().N, x.v.shape[-2], *(reversed(sizes) if x.state_v_first else sizes)
    wide = reference.wide(x.q, x.k, x.v) if x.output_final_state else torch.float32
    return (
        x.q.new_empty(x.v.shape),
        x.q.new_empty(state if x.output_final_state else 0, dtype=wide),
        x.q.new_empty(x.words(), dtype=torch.float32),
    )


@torch.library.custom_op(
    "fla_flashqla::chunk_gated_delta_rule_backward",
    mutates_args=(),
    schema=f"(Tensor? do, Tensor? dht, Tensor kept, bool[] needs, {_SCHEMA}) -> Tensor[]",
)
@torch.no_grad()
def _backward(
    do: torch.Tensor | None,
    dht: torch.Tensor | None,
    kept: torch.Tensor,
    needs: list[bool],
    *args: Any,
) -> list[torch.Tensor]:
    x = _Arguments(*args)
    call = x.call()
    decision = api.decide((), call, True)
    if isinstance(decision, Refusal):
        api.refuse(decision.reason)
    found: dict[str, Any]
    if isinstance(decision, Plan):
        found = api.backward(
            *(decision, x.flags(), x.cu_seqlens, x.q, x.k, x.v),
            *x.layout().split(kept, x.v.shape[2], x.q.dtype),
            *(x.scale_of_q(), x.initial_state),
            *(do, dht, Needs(*needs), x.activations(), x.g, x.beta),
        )._asdict()
        for name in reference.PARAMETERS:  # rows of one tensor
            found[name] = None if found[name] is None else found[name].clone()
    else:
        # In the thread of a node nothing is recorded for autograd.
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(reference.gradients, call, do, dht).result()
        found = {n: dx.clone(memory_format=torch.contiguous_format) for n, dx in found.items()}
    return [found[name] for name, needed in zip(Needs._fields, needs, strict=True) if needed]


@_backward.register_fake
def _(do: Any, dht: Any, kept: Any, needs: list[bool], *args: Any) -> list[torch.Tensor]:
    inputs = _Arguments(*args)._asdict()
    return [
        inputs[name].new_empty(inputs[name].shape)
        for name, needed in zip(Needs._fields, needs, strict=True)
        if needed
    ]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, final_state, kept = output
    tensors = [x if isinstance(x, torch.Tensor) else None for x in inputs]
    ctx.save_for_backward(kept, *tensors)
    ctx.others = [x for x, tensor in zip(inputs, tensors, strict=True) if tensor is None]
    ctx.set_materialize_grads(False)
    asked = _Arguments(*inputs).output_final_state
    ctx.mark_non_differentiable(*((kept,) if asked else (final_state, kept)))


def _differentiate(
    ctx: Any, do: torch.Tensor | None, dht: torch.Tensor | None, _: None
) -> tuple[torch.Tensor | None, ...]:
    kept, *tensors = ctx.saved_tensors
    if do is None and dht is None:
        return (None,) * len(tensors)
    others = iter(ctx.others)
    args = [next(others) if x is None else x for x in tensors]
    needed = dict(zip(_Arguments._fields, ctx.needs_input_grad, strict=True))
    needs = [needed[name] for name in Needs._fields]
    found = iter(
        torch.ops.fla_flashqla.chunk_gated_delta_rule_backward(do, dht, kept, needs, *args)
    )
    return tuple(next(found) if needed[name] else None for name in _Arguments._fields)


_forward.register_autograd(_differentiate, setup_context=_keep)
