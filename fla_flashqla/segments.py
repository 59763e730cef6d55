# SPDX-License-Identifier: MIT
"""The states that segments of long sequences start from: allocate, launch, nothing else."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fla_flashqla.layout import CHUNK

if TYPE_CHECKING:
    from fla_flashqla.plan import Plan


class SegmentKernels(NamedTuple):
    """What is compiled together for sequences that are cut."""

    segments: Any
    combine: Any


_built: dict[str, SegmentKernels] = {}


def build(plan: Plan) -> SegmentKernels:
    """Compile the kernels of `plan`, once per process; raises what the compiler raises."""
    kernels = _built.get(plan.dtype)
    if kernels is None:
        from fla_flashqla.kernels import combine, compile_kernel, segments

        sources = (
            (
                f"segments-{plan.dtype}",
                segments.segments_kernel(plan.dtype),
                segments.PASS_CONFIGS,
            ),
            ("combine", combine.combine_kernel(), combine.PASS_CONFIGS),
        )
        with ThreadPoolExecutor(len(sources)) as pool:
            kernels = SegmentKernels(*pool.map(compile_kernel, *zip(*sources, strict=True)))
        _built[plan.dtype] = kernels
    return kernels


def slots(plan: Plan, tokens: int, N: int) -> int:
    """How many segments there can be, whatever the boundaries: one a sequence where they are not cut."""
    return tokens // plan.segment + N if plan.segment else N


def threshold(plan: Plan, dtype: torch.dtype) -> float:
    """The log2 of the decay below which a state counts as lost: 2**-9 of what `dtype` resolves."""
    return -math.inf if plan.exact else math.log2(torch.finfo(dtype).eps) - 9


def starts(
    plan: Plan,
    k: torch.Tensor,
    v: torch.Tensor,
    r: torch.Tensor,
    gates: torch.Tensor,
    cu: torch.Tensor,
    h0: torch.Tensor | None,
    lengths: tuple[int, int, int],
    strides: tuple[int, int],
) -> torch.Tensor:
    """Launch what makes the states that segments start from.

    Args:
        plan (Plan):
            With `segment`.
        k, v (torch.Tensor):
            `[tokens, H, 128]` and `[tokens, HV, 128]`, contiguous.
        r, gates (torch.Tensor):
            What `prepare.py` made.
        cu, lengths:
            As kernels take them: boundaries or a stand-in; tokens of a sequence or 0, step of `cu`, N.
        h0 (torch.Tensor, Optional):
            Initial states, flat, float32.
        strides (tuple[int, int]):
            Of K and V in a state.

    Returns:
        `[slots, HV, 128, 128]`, flat, float32, in the layout of the initial state.
    """
    (tokens, H, K), HV = k.shape, v.shape[1]
    count = slots(plan, tokens, lengths[2])
    kernels = build(plan)
    maps = gates.new_empty(count, HV, 2, K, K)
    kept = torch.empty(count, HV, dtype=torch.int32, device=k.device)
    kernels.segments(
        *(k, v, r, gates, cu, maps, kept),
        *(threshold(plan, k.dtype), *lengths, HV, HV // H, plan.segment),
    )
    made = gates.new_empty(count * HV * K * K)
    kernels.combine(
        *(maps, kept, cu, gates.view(-1) if h0 is None else h0, made),
        *(*lengths, HV, plan.segment, int(h0 is not None), *strides),
    )
    return made


def rehearse(plan: Plan, device: torch.device) -> None:
    """Launch the kernels once, on two segments: if they cannot run, that shows before a call needs them."""
    if torch.cuda.current_device() != device.index:  # which a launch would change for good
        with torch.cuda.device(device):
            return rehearse(plan, device)
    x = torch.zeros(2 * plan.segment, 1, 128, dtype=getattr(torch, plan.dtype), device=device)
    count = 2 * plan.segment // CHUNK + 2
    r = x.new_zeros(count, 1, CHUNK, CHUNK)
    gates = x.new_zeros(count, 1, 8, CHUNK, dtype=torch.float32)
    starts(plan, x, x, r, gates, gates.view(-1).view(torch.int32), None, (len(x), 1, 1), (128, 1))
