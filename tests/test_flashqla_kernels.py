# SPDX-License-Identifier: MIT
"""The preparation alone against its formulas in float64."""

import dataclasses

import pytest
import torch
from gpu_helpers import ARCH, DEVICE, harden, poisoned_memory

from fla_flashqla import chunk
from fla_flashqla.layout import Setup, boundaries
from fla_flashqla.plan import Plan
from fla_flashqla.testing import Case, make_inputs, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]
C = 64
WARPS = pytest.mark.parametrize("warps", [1, 4])


def prepared(x, lens, warps):
    """R [chunks, HV, C, C] and the gate vectors [chunks, HV, 8, C], chunk by chunk."""
    q, k, v, g, beta = (x[n] for n in ("q", "k", "v", "g", "beta"))
    plan = Plan(ARCH, *(str(t.dtype).removeprefix("torch.") for t in (q, g, beta)))
    plan = dataclasses.replace(plan, warps=warps, gradients=True)
    with poisoned_memory():
        o = torch.empty_like(v)
        normalized = (int(x["use_qk_l2norm_in_kernel"]),) * 2
        setup = Setup.of(plan, q, v, x["cu_seqlens"])._replace(normalized=normalized)
        r, gates = q.new_empty(setup.r), q.new_empty(setup.gates, dtype=torch.float32)
        chunk.prepare(setup, r, gates, boundaries(x["cu_seqlens"], gates), q, k, g, beta, o, 0.5)
    slots, bos = [], 0
    for n, length in enumerate(lens):
        slots += [bos // C + n + i for i in range(-(-length // C))]
        bos += length
    return r[slots].double(), gates[slots].double()


def expected(x, lens):
    q, k, g, beta = (x[n][0].double() for n in ("q", "k", "g", "beta"))
    HV, group = g.shape[1], g.shape[1] // k.shape[1]
    rq, rk = (torch.ones_like(t[..., 0]) for t in (q, k))
    if x["use_qk_l2norm_in_kernel"]:
        rq, rk = ((t.square().sum(-1) + 1e-6).rsqrt() for t in (q, k))
    r, gates, bos = [], [], 0
    for length in lens:
        for start in range(bos, bos + length, C):
            rows = slice(start, min(start + C, bos + length))
            n = rows.stop - rows.start
            gc, b = g[rows].cumsum(0).T, beta[rows].T  # [HV, n]
            f, fq = (t[rows].T.repeat_interleave(group, 0) for t in (rk, rq))
            kn = k[rows].transpose(0, 1).repeat_interleave(group, 0) * f[..., None]
            decay = (gc[:, :, None] - gc[:, None, :]).tril(-1).exp()
            M = torch.eye(n, device=k.device) + ((kn @ kn.mT) * decay * b[:, None, :]).tril(-1)
            full = torch.eye(C, dtype=torch.float64, device=k.device).repeat(HV, 1, 1)
            full[:, :n, :n] = torch.linalg.inv(M) * b.sign()[..., None]
            r.append(full)
            e = torch.zeros(HV, 8, C, dtype=torch.float64, device=k.device)
            log2 = 1 / torch.tensor(2.0).double().log()
            last = gc[:, -1:]
            e[:, :5, :n] = torch.stack(
                [gc.exp() * f, (last - gc).exp() * f * b.abs(), 0.5 * gc.exp() * fq]
                + [(gc + fq.log()) * log2, (gc - (f * 0.5 * b.abs()).log()) * log2],
                1,
            )
            e[:, 5, 0], e[:, 5, 1] = last[:, 0].exp(), last[:, 0] * log2
            growth = (1 - b * kn.square().sum(-1)).abs().clamp(min=1).log2().sum(-1)
            e[:, 5, 2] = e[:, 5, 1] + growth
            e[:, 6, :n], e[:, 7, :n] = (gc - f.log()) * log2, b
            gates.append(e)
        bos += length
    return torch.stack(r), torch.stack(gates)


@WARPS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("heads", [(2, 4), (1, 5), (3, 3), (1, 9)])
@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("gates", ["mild", "strong", "zero"])
def test_flashqla_prepare(dtype, heads, l2norm, gates, warps):
    lens = (0, 1, 63, 64, 0, 65, 200)
    case = Case(*heads, lens=lens, dtype=dtype, l2norm=l2norm, gates=gates)
    compare(make_inputs(case, DEVICE), lens, dtype, warps)


@WARPS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_flashqla_prepare_negative_betas(dtype, warps):
    lens = (100, 64, 7)
    x = make_inputs(Case(2, 6, lens=lens, dtype=dtype), DEVICE)
    x["beta"][:, 5:150, 1::2] *= -1
    compare(x, lens, dtype, warps)


@WARPS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("gates", ["mild", "zero"])
@pytest.mark.parametrize("keys", ["equal", "alike", "long"])
def test_flashqla_prepare_inverse(dtype, gates, keys, warps):
    """The inverse stays as exact as its dtype where its entries are not small."""
    x = make_inputs(Case(lens=(500,), dtype=dtype, gates=gates), DEVICE)
    harden(x, keys)
    compare(x, (500,), dtype, warps)


def compare(x, lens, dtype, warps):
    (r, gates), (want_r, want_gates) = prepared(x, lens, warps), expected(x, lens)
    # rounding to the dtype alone leaves 0.29 eps on average
    assert relative_error(r, want_r) <= 0.5 * torch.finfo(getattr(torch, dtype)).eps
    assert ((r - want_r).abs().amax((-1, -2)) <= 4e-3 * want_r.abs().amax((-1, -2)) + 1e-6).all()
    gates[:, :, 5, 3:] = 0  # not written
    for row in (0, 1, 2, 7):
        assert relative_error(gates[:, :, row], want_gates[:, :, row]) <= 2e-6, row
    decay, want_decay = (x[:, :, 5] for x in (gates, want_gates))
    assert relative_error(decay[..., 0], want_decay[..., 0]) <= 2e-6
    assert relative_error(decay[..., 1], want_decay[..., 1]) <= 2e-6
    error = (decay[..., 2] - want_decay[..., 2]).abs()
    assert (error <= 1e-4 + 2e-6 * want_decay[..., 2].abs()).all()
    for row in (3, 4, 6):  # sums of logarithms: what counts is the error of an exponent
        want = want_gates[:, :, row]
        error = (gates[:, :, row] - want).abs()
        assert (error <= 1e-6 + 2e-6 * want.abs().amax(-1, keepdim=True)).all(), row
