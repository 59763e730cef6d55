# SPDX-License-Identifier: MIT
"""Where chunks lie: the sequences of a call, the slots of their chunks, and the buffers of what is made per chunk; and inputs as kernels read them."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from fla_flashqla.plan import Plan

CHUNK = 64
GATE_ROWS = 8  # see kernels/prepare.py
GATE_GC = 6  # the one with log2(exp(gc)), without l2norm

_Form = tuple[int, torch.dtype] | None  # of boundaries: how many, and their dtype


def _form(cu_seqlens: torch.Tensor | None) -> _Form:
    return None if cu_seqlens is None else (cu_seqlens.numel(), cu_seqlens.dtype)


class Layout(NamedTuple):
    """How the sequences of a call lie in its B T tokens."""

    N: int
    seqlen: int  # 0: boundaries say
    cu_step: int  # words of a boundary, see `boundaries`
    slots: int  # chunk slots, see kernels/prepare.py

    @classmethod
    def of(cls, B: int, T: int, cu_seqlens: torch.Tensor | None) -> Layout:
        return cls.between(B, T, _form(cu_seqlens))

    @classmethod
    def between(cls, B: int, T: int, cu: _Form) -> Layout:
        """Of boundaries in this form."""
        if cu is None:
            return cls(B, T, 1, B * T // CHUNK + B + 1)
        count, dtype = cu
        return cls(count - 1, 0, dtype.itemsize // 4, B * T // CHUNK + count)

    def words(self, HV: int, dtype: torch.dtype) -> int:
        """Size of the buffer of R and the gates, in float32 words."""
        return self.slots * HV * CHUNK * (CHUNK * dtype.itemsize // 4 + GATE_ROWS)

    def split(
        self, buffer: torch.Tensor, HV: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a flat float32 buffer of `words`: R `[slots, HV, 64, 64]` in `dtype`, then gates `[slots, HV, 8, 64]`."""
        tile, rows = CHUNK * CHUNK, GATE_ROWS * CHUNK
        behind = buffer.storage_offset() + self.slots * HV * tile * dtype.itemsize // 4
        r_strides, gate_strides = (HV * tile, tile, CHUNK, 1), (HV * rows, rows, CHUNK, 1)
        return (
            buffer.view(dtype).as_strided((self.slots, HV, CHUNK, CHUNK), r_strides),
            buffer.as_strided((self.slots, HV, GATE_ROWS, CHUNK), gate_strides, behind),
        )


def slots(segment: int, tokens: int, N: int) -> int:
    """How many segments there can be, whatever the boundaries: one a sequence where they are not cut, `segment` being 0."""
    return tokens // segment + N if segment else N


class Setup(NamedTuple):
    """A plan with all that is the same in calls that look alike, as both passes use it: sizes of buffers, integers that kernels take.

    Nothing of the device: plans name an architecture, and calls on two devices may share one.
    """

    plan: Plan
    at: Layout
    output_final_state: bool
    ahead: bool  # whether k is normalised before all kernels, see `chunk.forward`
    normalized: tuple[int, int]  # whether kernels normalise q and k
    r: tuple[int, ...]
    gates: tuple[int, ...]
    states: tuple[int, ...]  # of all chunks
    final: tuple[int, ...]  # state
    betas: tuple[int, ...]
    items: int  # chunks of q/k heads
    tokens: tuple[int, ...]  # what kernels take that know tokens: how many, lengths, heads
    chains: tuple[int, ...]  # what kernels along chains take: lengths, heads
    lengths: tuple[int, int, int]  # tokens of a sequence or 0, `cu_step`, N
    strides: tuple[int, int]  # of K and V in a state
    # Behind those, in which order sequences are taken, in segments of how many tokens, and how many of these there are at most.
    order: tuple[int, ...]
    order_back: tuple[int, ...]

    @classmethod
    def of(
        cls,
        plan: Plan,
        q: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        use_qk_l2norm_in_kernel: bool = False,
        state_v_first: bool = False,
        output_final_state: bool = False,
    ) -> Setup:
        """Of a call with q `[B, T, H, K]` and v `[B, T, HV, V]`."""
        return _setup(
            *(plan, q.shape, v.shape, _form(cu_seqlens)),
            *(use_qk_l2norm_in_kernel, state_v_first, output_final_state),
        )


@lru_cache(maxsize=1024)
def _setup(
    plan: Plan,
    q_shape: torch.Size,
    v_shape: torch.Size,
    cu: _Form,
    normalize: bool,
    state_v_first: bool,
    output_final_state: bool,
) -> Setup:
    (B, T, H, K), (_, _, HV, V) = q_shape, v_shape
    at = Layout.between(B, T, cu)
    ahead = normalize and plan.dtype == "float16"
    lengths, strides = (at.seqlen, at.cu_step, at.N), (1, K) if state_v_first else (V, 1)

    def order(segment: int) -> tuple[int, ...]:
        count = slots(segment, B * T, at.N)
        return *strides, int(plan.longest_first and not segment), segment, count

    return Setup(
        plan=plan,
        at=at,
        output_final_state=output_final_state,
        ahead=ahead,
        normalized=(int(normalize), int(normalize and not ahead)),
        r=(at.slots, HV, CHUNK, CHUNK),
        gates=(at.slots, HV, GATE_ROWS, CHUNK),
        states=(at.slots, HV, V, K),
        final=(at.N, HV, *((V, K) if state_v_first else (K, V))),
        betas=(B, T, HV),
        items=at.slots * H,
        tokens=(B * T, *lengths, H, HV // H),
        chains=(*lengths, HV, HV // H),
        lengths=lengths,
        strides=strides,
        order=order(plan.segment),
        order_back=order(plan.backward_segment),
    )


def boundaries(cu_seqlens: torch.Tensor | None, unused: torch.Tensor) -> torch.Tensor:
    """Boundaries as kernels read them, int32, or what stands in where they are never read, on the device of `unused`."""
    if cu_seqlens is None:
        return unused.new_empty(1, dtype=torch.int32)
    cu = cu_seqlens.contiguous()
    # the low words, which hold every count below 2**31
    return cu.view(torch.int32) if cu.dtype == torch.int64 else cu


def aligned(x: torch.Tensor) -> torch.Tensor:
    """`x` as TMA can read it, contiguous and 16-byte aligned."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


class Packed(NamedTuple):
    """What both passes read of a call, as kernels read it.

    Args:
        q, k, v (torch.Tensor):
            `[B, T, H, 128]`, those of v HV: what was given, or copies.
        cu (torch.Tensor):
            Boundaries, or what stands in for them.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu: torch.Tensor

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
    ) -> Packed:
        """Of q, k `[B, T, H, 128]` and v `[B, T, HV, 128]`, and boundaries `[N + 1]`."""
        return cls(aligned(q), aligned(k), aligned(v), boundaries(cu_seqlens, q))
