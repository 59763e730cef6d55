# SPDX-License-Identifier: MIT
"""The states that segments of long sequences start from, and the gradients of those that they end with: allocate, launch, nothing else."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fla_flashqla import arch
from fla_flashqla.layout import CHUNK, slots

if TYPE_CHECKING:
    from fla_flashqla.plan import Plan

FORWARD, REVERSE = 1, 2  # of kernels/segments.py


class SegmentKernels(NamedTuple):
    """What is compiled together for sequences that are cut."""

    segments: Any
    combine: Any


class ReverseSegmentKernels(NamedTuple):
    """What a backward pass needs beside, where it cuts sequences."""

    reverse_segments: Any


_built: dict[tuple[str, str], SegmentKernels] = {}
_built_backward: dict[tuple[str, str], ReverseSegmentKernels] = {}


def build(plan: Plan) -> SegmentKernels:
    """Compile the kernels of `plan`, once per process; raises what the compiler raises."""
    key = plan.arch, plan.dtype
    kernels = _built.get(key)
    if kernels is None:
        from fla_flashqla.kernels import combine, compile_kernels, segments
        from fla_flashqla.kernels.products import in_form

        row = arch.named(plan.arch)
        function = segments.segments_kernel(plan.dtype, row.form)
        sources = (
            in_form(row.form, f"segments-{plan.dtype}", function, segments.PASS_CONFIGS),
            ("combine", combine.combine_kernel(), combine.PASS_CONFIGS),
        )
        kernels = _built[key] = SegmentKernels(*compile_kernels(sources, row))
    return kernels


def build_backward(plan: Plan) -> ReverseSegmentKernels:
    """As `build`, what a backward pass needs beside."""
    key = plan.arch, plan.dtype
    kernels = _built_backward.get(key)
    if kernels is None:
        from fla_flashqla.kernels import compile_kernels, reverse
        from fla_flashqla.kernels.products import in_form

        row = arch.named(plan.arch)
        function = reverse.reverse_kernel(plan.dtype, form=row.form, local=True)
        source = in_form(row.form, f"reverse_segments-{plan.dtype}", function, reverse.PASS_CONFIGS)
        kernels = _built_backward[key] = ReverseSegmentKernels(*compile_kernels([source], row))
    return kernels


def threshold(plan: Plan, dtype: torch.dtype) -> float:
    """The log2 of the decay below which a state counts as lost: 2**-9 of what `dtype` resolves."""
    return -math.inf if plan.exact else math.log2(torch.finfo(dtype).eps) - 9


class Chunks(NamedTuple):
    """What all kernels along chains of chunks are given.

    Args:
        k (torch.Tensor):
            `[B, T, H, 128]`, contiguous.
        r, gates (torch.Tensor):
            What `prepare.py` made.
        cu, lengths:
            As kernels take them: boundaries or a stand-in; tokens of a sequence or 0, step of `cu`, N.
        strides (tuple[int, int]):
            Of K and V in a state.
    """

    k: torch.Tensor
    r: torch.Tensor
    gates: torch.Tensor
    cu: torch.Tensor
    lengths: tuple[int, int, int]
    strides: tuple[int, int]


def starts(plan: Plan, chunks: Chunks, v: torch.Tensor, h0: torch.Tensor | None) -> torch.Tensor:
    """Launch what makes the states that segments start from.

    Args:
        plan (Plan):
            With `segment`.
        chunks (Chunks):
            All chunks.
        v (torch.Tensor):
            `[B, T, HV, 128]`, contiguous.
        h0 (torch.Tensor, Optional):
            Initial states, float32.

    Returns:
        `[slots, HV, 128, 128]`, float32, in the layout of the initial state.
    """
    maps = _maps(plan, chunks, v, plan.segment, FORWARD)
    return _combine(plan, chunks, maps, plan.segment, FORWARD, h0)[0]


def boundaries(
    plan: Plan,
    chunks: Chunks,
    q: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    h0: torch.Tensor | None,
    dht: torch.Tensor | None,
    ds: torch.Tensor | None,
    states: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Launch what makes the states that segments start from and the gradients of those that they end with.

    Args:
        plan (Plan):
            With `backward_segment`.
        chunks, v, h0:
            As `starts` takes them; v is read for states alone.
        q, do (torch.Tensor):
            `[B, T, H, 128]` and `[B, T, HV, 128]`, contiguous.
        dht (torch.Tensor, Optional):
            Gradients of final states, float32.
        ds (torch.Tensor, Optional):
            What kernels/reverse.py will write, of which this needs the shape; `None`: no gradients are wanted.
        states (bool):
            Whether states are wanted.

    Returns:
        The states and their gradients, as `starts` returns them; `None` for what is not wanted.
    """
    segment = plan.backward_segment
    wanted = FORWARD * states + REVERSE * (ds is not None)
    maps = _maps(plan, chunks, v, segment, wanted)
    if ds is not None:
        k, r, gates, cu, lengths, strides = chunks
        (count, HV), H = maps.kept.shape, k.shape[2]
        maps = maps._replace(back_local=torch.empty_like(maps.phi))
        build_backward(plan).reverse_segments(
            *(q, k, do, r, gates, cu, gates if dht is None else dht, ds, do, maps.back_local),
            *(*lengths, HV, HV // H, int(dht is not None), 1, *strides, 0, segment, count),
            *(threshold(plan, k.dtype), 0),
        )
    made, ends = _combine(plan, chunks, maps, segment, wanted, h0, dht)
    return made if states else None, None if ds is None else ends


class _Maps(NamedTuple):
    """See kernels/segments.py."""

    local: torch.Tensor
    back_local: torch.Tensor
    phi: torch.Tensor
    kept: torch.Tensor


def _maps(plan: Plan, chunks: Chunks, v: torch.Tensor, segment: int, wanted: int) -> _Maps:
    k, r, gates, cu, lengths, _ = chunks
    (B, T, H, K), HV = k.shape, v.shape[2]
    count = slots(segment, B * T, lengths[2])
    phi = gates.new_empty(count, HV, K, K)
    local = torch.empty_like(phi) if wanted & FORWARD else phi  # of the right shape
    kept = torch.empty(count, HV, dtype=torch.int32, device=k.device)
    build(plan).segments(
        *(k, v, r, gates, cu, local, phi, kept),
        *(threshold(plan, k.dtype), *lengths, HV, HV // H, segment, wanted),
    )
    return _Maps(local, phi, phi, kept)


def _combine(
    plan: Plan,
    chunks: Chunks,
    maps: _Maps,
    segment: int,
    wanted: int,
    h0: torch.Tensor | None,
    dht: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """States and their gradients; of what is not wanted, the other one."""
    unused = chunks.gates
    made = ends = torch.empty_like(maps.phi)
    directions = 1
    if wanted == FORWARD + REVERSE:
        ends, directions = torch.empty_like(made), 2
    build(plan).combine(
        *(*maps, chunks.cu, unused if h0 is None else h0, unused if dht is None else dht),
        *(made, ends, *chunks.lengths, maps.phi.shape[1], segment, wanted, directions),
        *(int(h0 is not None), int(dht is not None), *chunks.strides),
    )
    return made, ends


def rehearse(plan: Plan, device: torch.device) -> None:
    """Launch the kernels once, on two segments: if they cannot run, that shows before a call needs them."""
    if torch.cuda.current_device() != device.index:  # which a launch would change for good
        with torch.cuda.device(device):
            return rehearse(plan, device)
    chunks, x, _ = _rehearsal(plan, device)
    starts(replace(plan, segment=CHUNK), chunks, x, None)


def rehearse_backward(plan: Plan, device: torch.device) -> None:
    """As `rehearse`, what `boundaries` launches."""
    if torch.cuda.current_device() != device.index:
        with torch.cuda.device(device):
            return rehearse_backward(plan, device)
    chunks, x, ds = _rehearsal(plan, device)
    boundaries(replace(plan, backward_segment=CHUNK), chunks, x, x, x, None, None, ds, True)


def _rehearsal(plan: Plan, device: torch.device) -> tuple[Chunks, torch.Tensor, torch.Tensor]:
    """Two chunks of zeros, tokens of one head, and what ds is shaped like."""
    x = torch.zeros(1, 2 * CHUNK, 1, 128, dtype=getattr(torch, plan.dtype), device=device)
    r = x.new_zeros(4, 1, CHUNK, CHUNK)
    gates = x.new_zeros(4, 1, 8, CHUNK, dtype=torch.float32)
    cu = gates.view(-1).view(torch.int32)
    return Chunks(x, r, gates, cu, (2 * CHUNK, 1, 1), (128, 1)), x, x.new_empty(4, 1, 128, 128)
