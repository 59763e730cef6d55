# SPDX-License-Identifier: MIT
"""Tensors and flags of one call to plain host facts: reads metadata only, never the device."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from fla_flashqla import arch


class Unsupported(Exception):
    """A call that this package does not answer; the text is the planner's reason."""


class Call(NamedTuple):
    """All that a plan may depend on. `malformed` says what contradicts itself, for any path.

    A tuple because one is made on every call: a frozen dataclass of this size costs 2 us more.
    """

    device_type: str
    device_index: int
    sm: tuple[int, int] | None
    is_hip: bool
    malformed: str | None = None
    q_dtype: str = ""
    k_dtype: str = ""
    v_dtype: str = ""
    g_dtype: str = ""
    beta_dtype: str = ""
    state_dtype: str | None = None
    B: int = 0
    T: int = 0
    H: int = 0
    HV: int = 0
    K: int = 0
    V: int = 0
    N: int = 0
    sms: int = 0
    form: str = ""
    varlen: bool = False
    longest: int = 0  # tokens of the longest packed sequence, if `cu_seqlens_cpu` says
    needs_grad: bool = False
    transformed: bool = False
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    state_v_first: bool = False
    use_gate_in_kernel: bool = False
    cp_context: bool = False
    unknown: tuple[str, ...] = ()


KNOWN_KEYWORDS = frozenset(
    {
        "use_gate_in_kernel",
        "A_log",
        "dt_bias",
        "chunk_size",
        "transpose_state_layout",
        "head_first",
    }
)
# A subclass (DTensor, FakeTensor, ...) has no memory of its own that a kernel could be given.
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
# Of initial_state: name of its type, shape, dtype and whether it is on q's device; the last three of cu_seqlens. Without a
# shape it is not a plain tensor.
_State = tuple[str, torch.Size | None, torch.dtype | None, bool]
_Boundaries = tuple[torch.Size | None, torch.dtype | None, bool]
_NAMES: dict[torch.dtype | None, str] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float64: "float64",
}


def _name(dtype: torch.dtype | None) -> str:
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")


_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def describe(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: Any = None,
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
    **kwargs: Any,
) -> Call:
    """Describe a call of FLA's operator (same arguments) without raising, syncing or launching.

    What tensors look like is read here, on every call, and examined once.
    `chunk_indices` only restates `cu_seqlens`, and `chunk_size` is how FLA's kernels cut a sequence: they decide nothing.
    `cu_seqlens_cpu` restates it, too, but on the CPU it can be read.
    """
    plain = type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN
    if not (plain and type(g) in _PLAIN and type(beta) in _PLAIN):
        for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
            if type(x) not in _PLAIN:
                return _malformed(f"{name} must be a plain torch.Tensor, got {type(x).__name__}")
    device = q.device
    grad = torch.is_grad_enabled()
    needs_grad = grad and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or g.requires_grad
        or beta.requires_grad
    )
    outlived = _wrapped(q) or _wrapped(k) or _wrapped(v) or _wrapped(g) or _wrapped(beta)
    state: _State | None = None
    if initial_state is not None:
        state = type(initial_state).__name__, None, None, False
        if type(initial_state) in _PLAIN:
            here = initial_state.device == device
            state = "", initial_state.shape, initial_state.dtype, here
            needs_grad = needs_grad or (grad and initial_state.requires_grad)
            outlived = outlived or _wrapped(initial_state)
    # These see the operations of PyTorch, not what a kernel does to memory, and hide in plain tensors, also in those that outlive them.
    transformed = (
        torch._C._are_functorch_transforms_active()
        or outlived
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )
    longest = 0
    cu: _Boundaries | None = None
    if cu_seqlens is not None:
        cu = None, None, False
        if type(cu_seqlens) in _PLAIN:
            cu = cu_seqlens.shape, cu_seqlens.dtype, cu_seqlens.device == device
            if cu_seqlens_cpu is not None and not transformed:
                longest = _longest(cu_seqlens_cpu, cu_seqlens.shape)
    call = _examined(
        arch.device_facts(device),
        *(q.shape, k.shape, v.shape, g.shape, beta.shape),
        *(q.dtype, k.dtype, v.dtype, g.dtype, beta.dtype),
        k.device == device and v.device == device and g.device == device and beta.device == device,
        *(
            "" if scale is None or isinstance(scale, (int, float)) else type(scale).__name__,
            state,
            cu,
        ),
        *(longest, needs_grad, transformed),
        *(bool(output_final_state), bool(use_qk_l2norm_in_kernel)),
        *(bool(use_beta_sigmoid_in_kernel), bool(allow_neg_eigval)),
        bool(state_v_first or kwargs.get("transpose_state_layout")),
        cp_context is not None,
    )
    if call.malformed:
        return call
    if kwargs:
        reason = _keywords_malformed(kwargs, call.HV, device, state_v_first)
        if reason is not None:
            return _malformed(reason)
        gate = bool(kwargs.get("use_gate_in_kernel"))
        for name in ("A_log", "dt_bias") if gate and grad else ():
            needs_grad = needs_grad or (kwargs.get(name) is not None and kwargs[name].requires_grad)
        unknown = tuple(sorted(kwargs.keys() - KNOWN_KEYWORDS))
        call = call._replace(needs_grad=needs_grad, use_gate_in_kernel=gate, unknown=unknown)
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        return _malformed("allow_neg_eigval needs use_beta_sigmoid_in_kernel")
    return call


def _longest(cu_seqlens_cpu: torch.Tensor, shape: torch.Size) -> int:
    """Tokens of the longest sequence, or 0 where this is not boundaries of that shape on the CPU."""
    here = type(cu_seqlens_cpu) in _PLAIN and cu_seqlens_cpu.device.type == "cpu"
    if not here or cu_seqlens_cpu.shape != shape or len(shape) != 1 or shape[0] < 2:
        return 0
    return int(cu_seqlens_cpu.diff().max())


@lru_cache(maxsize=1024)
def _examined(
    facts: arch.DeviceFacts,
    q_shape: torch.Size,
    k_shape: torch.Size,
    v_shape: torch.Size,
    g_shape: torch.Size,
    beta_shape: torch.Size,
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
    v_dtype: torch.dtype,
    g_dtype: torch.dtype,
    beta_dtype: torch.dtype,
    on_one_device: bool,
    odd_scale: str,
    state: _State | None,
    cu: _Boundaries | None,
    longest: int,
    needs_grad: bool,
    transformed: bool,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    state_v_first: bool,
    cp_context: bool,
) -> Call:
    """The call of plain tensors without further keywords, once for all that look the same."""
    device_type, device_index, sm, is_hip, sms, form = facts
    if len(q_shape) != 4 or len(v_shape) != 4:
        return _malformed(
            f"q and v must have 4 dimensions, got {tuple(q_shape)} and {tuple(v_shape)}"
        )
    B, T, H, K = q_shape
    Bv, Tv, HV, V = v_shape
    if k_shape != q_shape:
        return _malformed(f"k must have q's shape {tuple(q_shape)}, got {tuple(k_shape)}")
    if Bv != B or Tv != T:
        return _malformed(f"v must start with [B, T] = [{B}, {T}], got [{Bv}, {Tv}]")
    if not H or HV % H:
        return _malformed(f"HV must be a multiple of H, got H={H}, HV={HV}")
    gate_shape = (B, T, HV)
    if g_shape != gate_shape:
        return _malformed(f"g must be [B, T, HV] = {gate_shape}, got {tuple(g_shape)}")
    if beta_shape != gate_shape:
        return _malformed(f"beta must be [B, T, HV] = {gate_shape}, got {tuple(beta_shape)}")
    if odd_scale:
        return _malformed(f"scale must be a number or None, got {odd_scale}")
    if not on_one_device:
        return _malformed("q, k, v, g and beta must be on one device")

    N = B
    if cu is not None:
        shape, dtype, here = cu
        if shape is None or len(shape) != 1 or not shape[0]:
            return _malformed("cu_seqlens must be a 1-D tensor with N + 1 boundaries")
        if dtype is not torch.int32 and dtype is not torch.int64:
            return _malformed(f"cu_seqlens must be int32 or int64, got {_name(dtype)}")
        if B != 1:
            return _malformed(f"B must be 1 with cu_seqlens, got {B}")
        if not here:
            return _malformed("cu_seqlens must be on q's device")
        N = shape[0] - 1

    state_dtype = None
    if state is not None:
        kind, shape, dtype, here = state
        if shape is None:
            return _malformed(f"initial_state must be a plain tensor, got {kind}")
        state_shape = (N, HV, V, K) if state_v_first else (N, HV, K, V)
        if shape != state_shape:
            return _malformed(f"initial_state must be {state_shape}, got {tuple(shape)}")
        if not here:
            return _malformed("initial_state must be on q's device")
        state_dtype = _name(dtype)

    return Call(
        device_type=device_type,
        device_index=device_index,
        sm=sm,
        is_hip=is_hip,
        sms=sms,
        form=form,
        q_dtype=_name(q_dtype),
        k_dtype=_name(k_dtype),
        v_dtype=_name(v_dtype),
        g_dtype=_name(g_dtype),
        beta_dtype=_name(beta_dtype),
        state_dtype=state_dtype,
        B=B,
        T=T,
        H=H,
        HV=HV,
        K=K,
        V=V,
        N=N,
        varlen=cu is not None,
        longest=longest,
        needs_grad=needs_grad,
        transformed=transformed,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cp_context=cp_context,
    )


def _malformed(reason: str) -> Call:
    return Call("none", -1, None, False, reason)


def _keywords_malformed(
    kwargs: dict[str, Any], HV: int, device: torch.device, state_v_first: bool
) -> str | None:
    if "head_first" in kwargs:
        return "head_first was removed: inputs are [B, T, H, ...]"
    if state_v_first and "transpose_state_layout" in kwargs:
        return "state_v_first and transpose_state_layout are one argument, got both"
    if kwargs.get("chunk_size", 64) not in (16, 32, 64):
        return f"chunk_size must be 16, 32 or 64, got {kwargs['chunk_size']}"
    if kwargs.get("use_gate_in_kernel"):
        for name in ("A_log", "dt_bias"):
            x: Any = kwargs.get(name)
            if x is None and name == "dt_bias":
                continue
            fits = type(x) in _PLAIN and x.numel() == HV and x.device == device
            if not fits or not x.is_floating_point():
                return f"{name} must be a floating-point tensor of HV = {HV} elements on q's device"
    return None
