# SPDX-License-Identifier: MIT
"""Cases, seeded inputs and the error measure of tests, benchmarks and the command line."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fla_flashqla import reference

# Largest relative L2 error of o and final_state against float64.
BOUNDS = {"bfloat16": 8e-3, "float16": 1e-3}
# and of each gradient
GRADIENT_BOUNDS = {"bfloat16": 1e-2, "float16": 1.5e-3}
# but differences of large sums, and few numbers that add many of those up: so many times that
GRADIENT_FACTORS = {"g": 2.0, "A_log": 4.0, "dt_bias": 4.0}
DIFFERENTIABLE = reference.DIFFERENTIABLE
PARAMETERS = reference.PARAMETERS


@dataclass(frozen=True, slots=True)
class Case:
    """One call: `lens` are the sequences of a packed batch, or else the batch is dense [B, T]."""

    H: int = 2
    HV: int = 4
    B: int = 1
    T: int = 256
    lens: tuple[int, ...] | None = None
    tail: int = 0  # rows behind the last boundary
    K: int = 128
    V: int = 128
    dtype: str = "bfloat16"
    g_dtype: str = "float32"
    beta_dtype: str = "float32"
    state_dtype: str | None = "float32"
    cu_dtype: str = "int32"
    gates: str = "published"  # "strong" | "mild" | "zero" | "published"
    scale: float | None = None
    l2norm: bool = False
    state_v_first: bool = False
    output_final_state: bool = True
    raw_g: str | None = None  # "bias" | "no_bias": g is made in the kernel, with dt_bias or not
    raw_beta: float | None = None  # 1 or 2: likewise beta, times that
    parameter_dtype: str = "float32"

    @property
    def id(self) -> str:
        """Shape, dtype and gates, as a test id."""
        shape = f"{len(self.lens)}seq" if self.lens is not None else f"B{self.B}-T{self.T}"
        flags = ["l2norm"] * self.l2norm + ["v_first"] * self.state_v_first
        flags += [f"g_{self.raw_g}"] * (self.raw_g is not None)
        flags += [f"beta_{self.raw_beta}"] * (self.raw_beta is not None)
        return "-".join([shape, f"H{self.H}-HV{self.HV}", self.dtype, self.gates, *flags])


def small_cases(lens: tuple[int, ...] = (1, 63, 0, 65, 371), **dtypes: Any) -> list[Case]:
    """Calls that between them use lengths off the chunk, `cu_seqlens`, grouped heads, states, both layouts and all flags.

    The first two have no flag that FLA learnt later.
    """
    layer = {"l2norm": True, "state_v_first": True, "raw_g": "bias", "raw_beta": 2}  # FLA's own
    forms: tuple[dict[str, Any], ...] = (
        {"B": 2, "T": sum(lens), "state_dtype": None},
        {"lens": lens, "tail": 3, "gates": "strong", "l2norm": True},
        {"lens": lens, "tail": 3, "gates": "zero", "l2norm": True, "state_v_first": True},
        {"lens": lens, "tail": 3, "gates": "strong", **layer},
    )
    return [Case(**dtypes, **form) for form in forms]


def make_gates(gates: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Log decay of `shape` [B, T, HV], float32, on the generator's device."""
    device, HV = generator.device, shape[-1]
    x = torch.randn(shape, device=device, generator=generator)
    if gates == "zero":
        return torch.zeros_like(x)
    if gates == "strong":
        A_log, dt_bias = layer_parameters(HV, 16, device)  # FLA's layer at initialisation
        return -A_log.exp() * F.softplus(x + dt_bias)
    g = F.logsigmoid(x) / 16
    if gates == "published":  # a quarter of the heads does not decay
        heads = torch.randperm(HV, device=device, generator=generator)
        g[..., heads[math.ceil(0.75 * HV) :]] = 0.0
    elif gates != "mild":
        raise ValueError(f"gates must be strong, mild, zero or published, got {gates}")
    return g


def layer_parameters(HV: int, rate: float, device: str | torch.device) -> tuple[Tensor, Tensor]:
    """log A with A in (0, rate], and the inverse softplus of dt in [1e-3, 0.1], from the mildest head to the strongest."""
    u = torch.arange(1, HV + 1, device=device) / HV
    dt = 1e-3 * 100**u
    return (rate * u).log(), dt.expm1().log()


def make_inputs(case: Case, device: str | torch.device = "cpu", seed: int = 0) -> dict[str, Any]:
    """Keyword arguments of FLA's operator for `case`."""
    generator = torch.Generator(device).manual_seed(seed)
    B, T = case.B, case.T
    if case.lens is not None:
        B, T = 1, sum(case.lens) + case.tail

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    q, k = randn(B, T, case.H, case.K), randn(B, T, case.H, case.K)
    if not case.l2norm:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    dtype = getattr(torch, case.dtype)
    inputs: dict[str, Any] = {
        "q": q.to(dtype),
        "k": k.to(dtype),
        "v": randn(B, T, case.HV, case.V).to(dtype),
        "g": make_gates(case.gates, (B, T, case.HV), generator).to(getattr(torch, case.g_dtype)),
        "beta": randn(B, T, case.HV).sigmoid().to(getattr(torch, case.beta_dtype)),
        "scale": case.scale,
        "output_final_state": case.output_final_state,
        "use_qk_l2norm_in_kernel": case.l2norm,
        "state_v_first": case.state_v_first,
    }
    # Drawn last, so that all else is the same without.
    raw: dict[str, Tensor] = {}
    if case.raw_g is not None:
        A_log, dt_bias = layer_parameters(case.HV, 16 if case.gates == "strong" else 1, device)
        raw["g"] = randn(B, T, case.HV)
        parameters = {"A_log": A_log}
        if case.raw_g == "bias":
            parameters["dt_bias"] = dt_bias
        else:
            raw["g"] += dt_bias
        inputs["use_gate_in_kernel"] = True
        for name, x in parameters.items():
            inputs[name] = x.to(getattr(torch, case.parameter_dtype))
    if case.raw_beta is not None:
        raw["beta"] = randn(B, T, case.HV)
        inputs["use_beta_sigmoid_in_kernel"] = True
        inputs["allow_neg_eigval"] = case.raw_beta == 2
    inputs |= {name: x.to(inputs[name].dtype) for name, x in raw.items()}
    if case.state_dtype is not None:
        N = B if case.lens is None else len(case.lens)
        rows, cols = (case.V, case.K) if case.state_v_first else (case.K, case.V)
        h0 = randn(N, case.HV, rows, cols)
        inputs["initial_state"] = h0.to(getattr(torch, case.state_dtype))
    if case.lens is not None:
        bounds = torch.tensor([0, *case.lens]).cumsum(0)
        inputs["cu_seqlens"] = bounds.to(device, getattr(torch, case.cu_dtype))
    return inputs


def make_output_gradients(inputs: dict[str, Any], seed: int = 1) -> tuple[Tensor, Tensor]:
    """Gradients of o and final_state, in their dtypes, for the arguments of a call."""
    q, v = inputs["q"], inputs["v"]
    generator = torch.Generator(q.device).manual_seed(seed)
    cu = inputs.get("cu_seqlens")
    N = q.shape[0] if cu is None else len(cu) - 1
    sizes = q.shape[-1], v.shape[-1]
    shape = (N, v.shape[2], *(reversed(sizes) if inputs.get("state_v_first") else sizes))
    do, dht = (torch.randn(x, device=q.device, generator=generator) for x in (v.shape, shape))
    return do.to(q.dtype), dht


def _exact(inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: x.detach().double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }


def oracle(inputs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """o and final_state of the same arguments, in float64."""
    with torch.no_grad():
        return reference.chunk_gated_delta_rule(**_exact(inputs))


def oracle_gradients(
    inputs: dict[str, Any],
    do: Tensor | None,
    dht: Tensor | None,
    form: Callable[..., Any] = reference.chunk_gated_delta_rule,
) -> dict[str, Tensor]:
    """Gradients of all inputs for the same arguments, in float64.

    Args:
        inputs (dict):
            Keyword arguments of FLA's operator.
        do, dht (torch.Tensor, Optional):
            Gradients of o and final_state; `None` is zero.
        form (Callable):
            The reference to differentiate: by chunks (default), or by tokens, which takes memory for a state a token.
    """
    return reference.gradients(_exact(inputs), do, dht, form)


def relative_error(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b|| in float64, for b = 0 the plain ||a||; NaN where anything is NaN."""
    a, b = a.detach().double(), b.detach().double()
    norm = float(b.norm())
    return float((a - b).norm()) / (norm or 1.0)


def gradient_bound(name: str, dx: Tensor, dtype: str) -> float:
    """Largest relative error of the gradient `dx` of an input, `dtype` being q's."""
    rounded = GRADIENT_BOUNDS.get(str(dx.dtype).removeprefix("torch."), 0.0)
    return max(GRADIENT_BOUNDS[dtype], rounded) * GRADIENT_FACTORS.get(name, 1.0)
