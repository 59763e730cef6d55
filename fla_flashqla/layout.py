# SPDX-License-Identifier: MIT
"""Where chunks lie: the sequences of a call, the slots of their chunks, and the buffer of what is made per chunk."""

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
        """`cu`, or what stands in where it is never read: a flat tensor of 4-byte words."""
        return unused.view(torch.int32) if self.cu is None else self.cu

    def words(self, HV: int, dtype: torch.dtype) -> int:
        """Size of the buffer of R and the gates, in float32 words."""
        return self.slots * HV * CHUNK * (CHUNK * dtype.itemsize // 4 + GATE_ROWS)

    def progress_words(self, pieces: int, H: int, HV: int) -> int:
        """Size of what kernels/progress.cuh describes, `pieces` being sequences, or slots of segments."""
        return H * (pieces * (4 + 8 * (HV // H)) + self.slots // 32 + pieces)

    def split(
        self, buffer: torch.Tensor, HV: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a float32 buffer of `words`: R `[slots, HV, 64, 64]` in `dtype`, then gates `[slots, HV, 8, 64]`."""
        tile, rows = CHUNK * CHUNK, GATE_ROWS * CHUNK
        behind = buffer.storage_offset() + self.slots * HV * tile * dtype.itemsize // 4
        r_strides, gate_strides = (HV * tile, tile, CHUNK, 1), (HV * rows, rows, CHUNK, 1)
        return (
            buffer.view(dtype).as_strided((self.slots, HV, CHUNK, CHUNK), r_strides),
            buffer.as_strided((self.slots, HV, GATE_ROWS, CHUNK), gate_strides, behind),
        )
