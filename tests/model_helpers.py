# SPDX-License-Identifier: MIT
"""Calls of the operator whose kernels are models, and their gradients; see the fixture `launched`."""

from __future__ import annotations

import inspect
from typing import Any

import kernel_models
import torch

from fla_flashqla import arch, chunk, chunk_gated_delta_rule
from fla_flashqla.plan import CHUNK, Lengths, Plan
from fla_flashqla.segments import SegmentKernels
from fla_flashqla.testing import DIFFERENTIABLE, PARAMETERS, Case, make_inputs, relative_error

SM90 = arch.DeviceFacts("cuda", -1, (9, 0), False, 132)
PLAN = Plan("model", "float64", "float64", "float64", gradients=True)
EVERY = (*DIFFERENTIABLE, *PARAMETERS)
REHEARSE = chunk.rehearse_backward
EXACT = 3e-6  # gates and states are float32


def small(**fields: Any) -> dict[str, Any]:
    wide = dict.fromkeys(("dtype", "g_dtype", "beta_dtype", "state_dtype"), "float64")
    return make_inputs(Case(**{"K": 8, "V": 6, "T": 70, **wide, **fields}))


def alike_lengths(tokens: int, N: int) -> tuple[Lengths, ...]:
    chunks = -(-tokens // (N * CHUNK))
    return (Lengths(N, chunks, chunks),)


def fitting_segments(dtype: str, seen: list[str]) -> SegmentKernels:
    """Those of `SegmentKernels`, as `fitting` makes them."""
    from fla_flashqla.kernels import combine, segments

    return SegmentKernels(
        fitting("segments", segments.segments_kernel(dtype), seen),
        fitting("combine", combine.combine_kernel(), seen),
    )


def any_sign(beta: torch.Tensor) -> torch.Tensor:
    """The same step sizes, every third of them negative and some zero."""
    i = torch.arange(beta.numel(), device=beta.device).view(beta.shape)
    return torch.where(i % 3 == 1, -beta, beta).masked_fill(i % 11 == 5, 0.0)


def trained(inputs: dict[str, Any], names: tuple[str, ...] = EVERY) -> dict[str, Any]:
    """Fresh leaves of the same values, of which `names` require a gradient."""
    return {
        n: x.detach().clone().requires_grad_(n in names) if n in EVERY else x
        for n, x in inputs.items()
    }


def gradients(
    inputs: dict[str, Any],
    do: torch.Tensor | None,
    dht: torch.Tensor | None,
    names: tuple[str, ...] = EVERY,
    operator: Any = chunk_gated_delta_rule,
) -> dict[str, torch.Tensor]:
    leaves = trained(inputs, names)
    results = operator(**leaves)
    pairs = [(x, dx.to(x)) for x, dx in zip(results, (do, dht), strict=True) if dx is not None]
    torch.autograd.backward(*zip(*pairs, strict=True))
    return {n: leaves[n].grad for n in names if leaves.get(n) is not None}


def compare(got: dict[str, Any], want: dict[str, Any], bound: float = EXACT) -> None:
    for name, x in got.items():
        error = relative_error(x, want[name])
        assert error <= bound, f"d{name}: {error:.1e}"


def fitting(name: str, source: Any, seen: list[str]) -> Any:
    """The model of a kernel, which insists on names, order, dtypes and shapes of the arguments of its source."""
    model = getattr(kernel_models, name.removesuffix("_halves").removesuffix("_single"))
    parameters = source.params
    names = [p.name.removesuffix("_handle") for p in parameters]
    assert names == [*inspect.signature(model).parameters]

    def launch(*args: Any) -> None:
        seen.append(name)
        sizes: dict[str, int] = {}
        for parameter, x in zip(parameters, args, strict=True):
            buffer = source.buffer_map.get(parameter)
            if buffer is None:
                assert parameter.dtype == ("float32" if type(x) is float else "int32")
                continue
            assert str(x.dtype) == f"torch.{buffer.dtype}" and x.is_contiguous()
            for size, expected in zip(x.shape, buffer.shape, strict=True):
                # runtime sizes are the same wherever they occur
                wanted = getattr(expected, "name", None)
                want = int(expected) if wanted is None else sizes.setdefault(wanted, size)
                assert size == want, (name, parameter.name)
        model(*args)

    return launch
