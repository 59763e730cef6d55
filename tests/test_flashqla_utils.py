# SPDX-License-Identifier: MIT
"""The helpers for packed sequences: documented examples, empty sequences, and a cache that is never stale."""

import pytest
import torch

from fla_flashqla.layout import Packed
from fla_flashqla.utils import (
    prepare_chunk_indices,
    prepare_chunk_offsets,
    prepare_lens,
    tensor_cache,
)

INDEX = pytest.mark.parametrize("dtype", [torch.int32, torch.int64])


def bounds(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


@INDEX
def test_flashqla_prepare_lens(dtype):
    lens = prepare_lens(bounds(0, 3, 8, dtype=dtype))
    assert lens.tolist() == [3, 5] and lens.dtype == dtype
    assert prepare_lens(bounds(0, 0, 0, dtype=dtype)).tolist() == [0, 0]


@INDEX
def test_flashqla_prepare_chunk_indices(dtype):
    rows = prepare_chunk_indices(bounds(0, 4, 8, dtype=dtype), 2)
    assert rows.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]] and rows.dtype == dtype
    empty = prepare_chunk_indices(bounds(0, 0, 3, 3, 4, dtype=dtype), 2)
    assert empty.tolist() == [[1, 0], [1, 1], [3, 0]]
    assert prepare_chunk_indices(bounds(0, 0, dtype=dtype), 2).shape == (0, 2)


@INDEX
def test_flashqla_prepare_chunk_offsets(dtype):
    offsets, total = prepare_chunk_offsets(bounds(0, 4, 8, dtype=dtype), 2)
    assert offsets.tolist() == [0, 2, 4] and offsets.dtype == torch.int64
    assert total == 4 and type(total) is int
    offsets, total = prepare_chunk_offsets(bounds(0, 0, 3, 3, 4, dtype=dtype), 2)
    assert offsets.tolist() == [0, 0, 2, 2, 3] and total == 3


def test_flashqla_prepare_chunk_indices_like_fla():
    index = pytest.importorskip("fla.ops.utils.index")
    cu = bounds(0, 100, 164, 165, 1000)
    assert torch.equal(prepare_chunk_indices(cu, 64), index.prepare_chunk_indices(cu, 64))


def test_flashqla_tensor_cache_keeps_one_entry():
    calls = []

    @tensor_cache
    def double(x, times=2, *, shift=None):
        calls.append(x)
        return x * times

    x, y = bounds(1, 2), bounds(1, 2)
    first = double(x)
    assert double(x) is first and len(calls) == 1
    assert double(y) is not first and len(calls) == 2  # equal, but another object
    assert double(x) is not first and len(calls) == 3  # one entry only
    big = 12345  # identity counts, for numbers too
    assert double(x, times=big) is double(x, times=big) and len(calls) == 4
    double(x, big)
    assert len(calls) == 5  # named otherwise
    assert double.__name__ == "double"


def test_flashqla_tensor_cache_sees_changes_in_place():
    cu = bounds(0, 4, 8)
    assert prepare_chunk_offsets(cu, 2)[1] == 4
    cu[2] = 12
    assert prepare_chunk_offsets(cu, 2)[1] == 6
    with torch.inference_mode():  # whose changes nobody counts
        cu = bounds(0, 4, 8)
        assert prepare_chunk_offsets(cu, 2)[1] == 4
        cu[2] = 12
        assert prepare_chunk_offsets(cu, 2)[1] == 6


def test_flashqla_tensor_cache_sees_changes_of_its_result():
    cu = bounds(0, 4, 8)
    first, total = prepare_chunk_offsets(cu, 2)
    assert prepare_chunk_offsets(cu, 2)[0] is first
    first.zero_()
    assert prepare_chunk_offsets(cu, 2)[0].tolist() == [0, 2, 4] and total == 4


def test_flashqla_tensor_cache_across_inference_mode():
    """What was computed inside can take part in a derivative outside."""
    cu, x = bounds(0, 4, 8), torch.ones(8, requires_grad=True)
    with torch.inference_mode():
        rows = prepare_chunk_indices(cu, 2)
        assert prepare_chunk_indices(cu, 2) is rows
    assert prepare_chunk_indices(cu, 2) is rows
    x[rows[:, 1]].sum().backward()
    assert x.grad is not None

    @tensor_cache
    @torch.inference_mode()
    def uncounted(x):
        return x + 1

    assert uncounted(cu) is not uncounted(cu)


def test_flashqla_packed():
    """Kernels get what was given, uncopied and unviewed, or an aligned copy."""
    q, k, v = (torch.rand(2, 5, heads, 8) for heads in (1, 1, 3))
    q.requires_grad_()
    packed = Packed.of(q, k, v, None)
    assert packed.q is q and packed.k is k and packed.v is v
    odd = torch.rand(k.numel() + 1)[1:].view_as(k)
    turned = torch.rand(2, 3, 5, 8).transpose(1, 2)
    packed = Packed.of(q, odd, turned, None)
    for got, given in ((packed.k, odd), (packed.v, turned)):
        assert got.is_contiguous() and got.data_ptr() % 16 == 0 and torch.equal(got, given)
