# SPDX-License-Identifier: MIT
"""Where chunks lie: the sequences of a call, the slots of their chunks, and the buffer of what is made per chunk; and inputs as kernels read them."""

from __future__ import annotations

from typing import NamedTuple

import torch

CHUNK = 64
GATE_ROWS = 8  # see kernels/prepare.py
GATE_GC = 6  # the one with log2(exp(gc)), without l2norm


class Layout(NamedTuple):
    """How the sequences of a call lie in its B T tokens."""

    N: int
    seqlen: int  # 0: `cu` says
    cu: torch.Tensor | None  # int32
    cu_step: int
    slots: int  # chunk slots, see kernels/prepare.py

    @classmethod
    def of(cls, B: int, T: int, cu_seqlens: torch.Tensor | None) -> Layout:
        if cu_seqlens is None:
            return cls(B, T, None, 1, B * T // CHUNK + B + 1)
        N, cu, step = cu_seqlens.numel() - 1, cu_seqlens.contiguous(), 1
        if cu.dtype == torch.int64:  # the low words, which hold every count below 2**31
            cu, step = cu.view(torch.int32), 2
        return cls(N, 0, cu, step, B * T // CHUNK + N + 1)

    def cu_or(self, unused: torch.Tensor) -> torch.Tensor:
        """`cu`, or what stands in where it is never read, on the device of `unused`."""
        return unused.new_empty(1, dtype=torch.int32) if self.cu is None else self.cu

    def words(self, HV: int, dtype: torch.dtype) -> int:
        """Size of the buffer of R and the gates, in float32 words."""
        return self.slots * HV * CHUNK * (CHUNK * dtype.itemsize // 4 + GATE_ROWS)

    def empty(self, q: torch.Tensor, HV: int) -> tuple[torch.Tensor, torch.Tensor]:
        """R and gates as `split` returns them, in q's dtype and each on its own, which takes the host less time than views."""
        return (
            q.new_empty(self.slots, HV, CHUNK, CHUNK),
            q.new_empty(self.slots, HV, GATE_ROWS, CHUNK, dtype=torch.float32),
        )

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
        at (Layout):
            Where chunks lie; its `cu` is not read.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu: torch.Tensor
    at: Layout

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
    ) -> Packed:
        """Of q, k `[B, T, H, 128]` and v `[B, T, HV, 128]`, and boundaries `[N + 1]`."""
        at = Layout.of(q.shape[0], q.shape[1], cu_seqlens)
        return cls(aligned(q), aligned(k), aligned(v), at.cu_or(q), at)
