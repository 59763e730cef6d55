# SPDX-License-Identifier: MIT
"""Every kernel as its formulas in float64: launch arguments and buffers as on a GPU, tensors on any device.

They stand in for compiled kernels where there is no GPU, so that all around them can be tested. Rows that belong to no
sequence are not read, and nothing else is written than a kernel writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fla_flashqla import chunk
from fla_flashqla.segments import ReverseSegmentKernels, SegmentKernels

C = 64
EPS = 1e-6
FLOOR = -128.0
X, U, O, PR, PC, DECAY, GC, B = range(8)
AHEAD, BACK = 1, 2  # what a kept Phi maps: states, gradients of states


class Chunk(NamedTuple):
    n: int  # sequence
    slot: int
    rows: slice  # of all tokens
    first: bool
    last: bool


def chunks(cu: Tensor, seqlen: int, cu_step: int, sequences: int) -> Iterator[Chunk]:
    for n in range(sequences):
        bos, eos = n * seqlen, (n + 1) * seqlen
        if not seqlen:
            bos, eos = int(cu[n * cu_step]), int(cu[(n + 1) * cu_step])
        count = -(-(eos - bos) // C)
        for i in range(count):
            t0 = bos + i * C
            rows = slice(t0, min(t0 + C, eos))
            yield Chunk(n, bos // C + n + i, rows, i == 0, i == count - 1)


class Piece(NamedTuple):
    """A sequence, or a segment of one."""

    n: int
    slot: int
    last: bool
    chunks: list[Chunk]


def pieces(cu: Tensor, seqlen: int, cu_step: int, sequences: int, segment: int) -> Iterator[Piece]:
    found = [*chunks(cu, seqlen, cu_step, sequences)]
    for n in range(sequences):
        own = [c for c in found if c.n == n]
        if not segment:
            yield Piece(n, n, True, own)
            continue
        bos = n * seqlen if seqlen else int(cu[n * cu_step])
        parts = [own[i : i + segment // C] for i in range(0, len(own), segment // C)] or [[]]
        for j, part in enumerate(parts):
            yield Piece(n, bos // segment + n + j, j == len(parts) - 1, part)


def behind(cu: Tensor, seqlen: int, cu_step: int, sequences: int) -> slice:
    """The rows behind the last boundary."""
    return slice(sequences * seqlen if seqlen else int(cu[sequences * cu_step]), None)


def by_token(*tensors: Tensor) -> Iterator[Tensor]:
    """Views of `[B, T, ...]` as `[tokens, ...]`, which is how the kernels count."""
    return (x.flatten(0, 1) for x in tensors)


def state(flat: Tensor, n: int, h: int, heads: int, K: int, V: int, strides: Any) -> Tensor:
    """[K, V] of a sequence and value head."""
    return flat.as_strided((K, V), strides, flat.storage_offset() + (n * heads + h) * K * V)


def factors(x: Tensor, normalize: int) -> Tensor:
    square = x.square().sum(-1)
    return (square + EPS).rsqrt() if normalize else torch.ones_like(square)


def decayed(rows: Tensor, columns: Tensor, diagonal: int = 0) -> Tensor:
    """exp2(rows_i - columns_j) for i >= j, or from another diagonal on, else 0."""
    exponent = rows[:, None] - columns[None, :]
    kept = torch.ones_like(exponent, dtype=torch.bool).tril(diagonal)
    return exponent.masked_fill(~kept, -torch.inf).exp2()


def sign(beta: Tensor) -> Tensor:
    """-1 where beta is negative, else 1."""
    return torch.where(beta < 0, -1.0, 1.0).to(beta)


def activated(g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, raw_g: int, raw_beta: float) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gates and betas of some rows and one value head, from what is given in their place."""
    g, beta = g.double(), beta.double()
    if raw_g:
        bias = dt_bias.double() if raw_g == 2 else 0.0
        g = -A_log.double().exp() * torch.nn.functional.softplus(g + bias)
    return g.clamp(min=FLOOR), raw_beta * beta.sigmoid() if raw_beta else beta


def prepare(q, k, g, beta, A_log, dt_bias, cu, r, gates, o, scale, Tn, seqlen, cu_step, sequences, heads, group, normalize_q, normalize_k, backward, raw_g, raw_beta):  # fmt: skip
    q, k, g, beta, o = by_token(q, k, g, beta, o)
    A_log, dt_bias = A_log.flatten(), dt_bias.flatten()
    assert scale >= 0 and len(q) == Tn
    for c in chunks(cu, seqlen, cu_step, sequences):
        n = c.rows.stop - c.rows.start
        for hv in range(heads * group):
            b_q, b_k = (x[c.rows, hv // group].double() for x in (q, k))
            parameters = (A_log[hv], dt_bias[hv]) if raw_g else (A_log, dt_bias)
            b_g, b = activated(g[c.rows, hv], beta[c.rows, hv], *parameters, raw_g, raw_beta)
            gc, rq, rk = b_g.cumsum(0), factors(b_q, normalize_q), factors(b_k, normalize_k)
            e2 = gc / math.log(2)
            M = rk[:, None] * rk * (b_k @ b_k.T) * decayed(e2, e2, -1) * b
            R = torch.eye(C).double()
            R[:n, :n] = sign(b)[:, None] * torch.linalg.inv(torch.eye(n).double() + M)
            r[c.slot, hv] = R
            row = torch.zeros(8, C, dtype=torch.float64)
            row[X, :n] = gc.exp() * rk
            row[U, :n] = (gc[-1] - gc).exp() * rk * b.abs()
            row[O, :n] = scale * gc.exp() * rq
            row[PR, :n] = e2 + rq.log2()
            row[PC, :n] = e2 - (scale * rk * b.abs()).log2()
            row[GC, :n] = e2 - rk.log2()
            row[B, :n] = b
            written = [X, U, O, PR, PC, *((GC, B) if backward else ())]
            gates[c.slot, hv, written] = row[written].to(gates.dtype)
            gates[c.slot, hv, DECAY, 0] = gc[-1].exp()
            gates[c.slot, hv, DECAY, 1] = e2[-1]
            lengths = (rk * b_k.norm(dim=-1)).square()
            gates[c.slot, hv, DECAY, 2] = e2[-1] + (1 - b * lengths).abs().clamp(min=1).log2().sum()
    o[behind(cu, seqlen, cu_step, sequences)] = 0


def products(q: Tensor, k: Tensor, gate: Tensor) -> Tensor:
    """P, whose columns' scale and |beta| are in the gates."""
    return decayed(gate[PR], gate[PC]) * (q @ k.T)


def step(S: Tensor, Y: Tensor, k: Tensor, gate: Tensor, decay: Tensor) -> Tensor:
    return decay.double() * S + (gate[U, :, None] * k).T @ Y


def forward(q, k, v, r, gates, cu, h0, o, ht, seqlen, cu_step, sequences, value_heads, group, use_h0, store_ht, stride_k, stride_v, longest_first, segment, slots):  # fmt: skip
    q, k, v, o = by_token(q, k, v, o)
    K, V = k.shape[-1], v.shape[-1]
    rest = value_heads, K, V, (stride_k, stride_v)
    for p in pieces(cu, seqlen, cu_step, sequences, segment):
        assert p.slot < slots
        for h in range(value_heads):
            S = state(h0, p.slot, h, *rest).double() if use_h0 else torch.zeros(K, V).double()
            for c in p.chunks:
                b_q, b_k, b_v, gate, R = tile(c, h, group, gates, r, q, k, v)
                Y = R @ (b_v - gate[X, :, None] * (b_k @ S))
                P = products(b_q, b_k, gate)
                o[c.rows, h] = (gate[O, :, None] * (b_q @ S) + P @ Y).to(o.dtype)
                S = step(S, Y, b_k, gate, gates[c.slot, h, DECAY, 0])
            if store_ht and p.last:
                state(ht, p.n, h, *rest).copy_(S)


def deciding(decays: Tensor, threshold: float) -> int:
    """The fewest of these log2 decays, the first on, that sum up to at most `threshold`; 0 if all do not."""
    enough = (decays.double().cumsum(0) <= threshold).nonzero()
    return int(enough[0]) + 1 if len(enough) else 0


def segments(k, v, r, gates, cu, local, phi, kept, threshold, seqlen, cu_step, sequences, value_heads, group, segment, wanted):  # fmt: skip
    k, v = by_token(k, v)
    K, V = k.shape[-1], v.shape[-1]
    n = -1
    for p in pieces(cu, seqlen, cu_step, sequences, segment):
        for h in range(0 if p.last else value_heads):
            decays = gates[[c.slot for c in p.chunks], h, DECAY, 2]
            last = deciding(decays.flip(0), threshold)
            first = deciding(decays, threshold) if p.n == n else 1
            keep = wanted & (AHEAD * (not last) | BACK * (not first))
            kept[p.slot, h] = keep
            L, Phi = torch.zeros(K, V).double(), torch.eye(K).double()
            for i, c in enumerate(p.chunks):
                _, b_k, b_v, gate, R = tile(c, h, group, gates, r, k, k, v)
                decay = gates[c.slot, h, DECAY, 0]
                if not last or i >= len(p.chunks) - last:
                    L = step(L, R @ (b_v - gate[X, :, None] * (b_k @ L)), b_k, gate, decay)
                Phi = step(Phi, -R @ (gate[X, :, None] * (b_k @ Phi)), b_k, gate, decay)
            if wanted & AHEAD:
                local[p.slot, h, :V] = L.T
            if keep:
                phi[p.slot, h] = Phi.T
        n = p.n


def combine(local, back_local, phi, kept, cu, first, back_first, made, back_made, seqlen, cu_step, sequences, value_heads, segment, wanted, directions, use_first, use_back_first, stride_k, stride_v):  # fmt: skip
    assert directions == (2 if wanted == AHEAD + BACK else 1)
    K = phi.shape[-1]
    rest = value_heads, K, K, (stride_k, stride_v)
    at = [*pieces(cu, seqlen, cu_step, sequences, segment)]
    S = torch.zeros(value_heads, K, K).double()
    n = -1
    for p in at if wanted & AHEAD else ():
        for h in range(value_heads):
            if p.n != n:
                S[h] = state(first, p.n, h, *rest) if use_first else 0.0
            state(made, p.slot, h, *rest).copy_(S[h])
            if not p.last:
                Phi = phi[p.slot, h].double().T
                S[h] = (Phi @ S[h] if kept[p.slot, h] & AHEAD else 0.0) + local[p.slot, h].T
        n = p.n
    for p in reversed(at if wanted & BACK else ()):
        for h in range(value_heads):
            if p.last:
                S[h] = state(back_first, p.n, h, *rest) if use_back_first else 0.0
            state(back_made, p.slot, h, *rest).copy_(S[h])
            if p.chunks and not p.chunks[0].first:
                keep = not p.last and kept[p.slot, h] & BACK
                Phi_T = phi[p.slot, h].double()
                S[h] = (Phi_T @ S[h] if keep else 0.0) + back_local[p.slot, h].T


def tile(c: Chunk, h: int, group: int, gates: Tensor, r: Tensor | None, q: Tensor, k: Tensor, *values: Tensor) -> list[Tensor]:  # fmt: skip
    """q and k, then those with value heads, then gates, then R, of the rows of a chunk in float64."""
    n = c.rows.stop - c.rows.start
    found = [x[c.rows, h // group].double() for x in (q, k)]
    found += [x[c.rows, h].double() for x in values]
    found.append(gates[c.slot, h, :, :n].double())
    return found if r is None else [*found, r[c.slot, h, :n, :n].double()]


def states(k, v, r, gates, cu, h0, s, y, seqlen, cu_step, sequences, value_heads, group, use_h0, stride_k, stride_v, longest_first, segment, slots):  # fmt: skip
    k, v, y = by_token(k, v, y)
    K, V = k.shape[-1], v.shape[-1]
    rest = value_heads, K, V, (stride_k, stride_v)
    for p in pieces(cu, seqlen, cu_step, sequences, segment):
        assert p.slot < slots
        for h in range(value_heads):
            S = state(h0, p.slot, h, *rest).double() if use_h0 else torch.zeros(K, V).double()
            for c in p.chunks:
                _, b_k, b_v, gate, R = tile(c, h, group, gates, r, k, k, v)
                Y = R @ (b_v - gate[X, :, None] * (b_k @ S))
                s[c.slot, h], y[c.rows, h] = S.T.to(s.dtype), Y.to(y.dtype)
                S = step(S, Y, b_k, gate, gates[c.slot, h, DECAY, 0])


def step_back(dS: Tensor, c: Chunk, h: int, group: int, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """dW of a chunk, and the gradient of the state in front of it."""
    q, k, do, r, gates = tensors
    b_q, b_k, b_do, gate, R = tile(c, h, group, gates, r, q, k, do)
    dW = R.T @ (gate[U, :, None] * (b_k @ dS) + products(b_q, b_k, gate).T @ b_do)
    dS = gates[c.slot, h, DECAY, 0].double() * dS + (gate[O, :, None] * b_q).T @ b_do
    return dW, dS - (gate[X, :, None] * b_k).T @ dW


def reverse(q, k, do, r, gates, cu, dht, ds, dv, dh0, seqlen, cu_step, sequences, value_heads, group, use_dht, store_dh0, stride_k, stride_v, longest_first, segment, slots, threshold, beside):  # fmt: skip
    q, k, do, dv = by_token(q, k, do, dv)
    K, V = k.shape[-1], do.shape[-1]
    rest = value_heads, K, V, (stride_k, stride_v)
    n = -1
    for p in pieces(cu, seqlen, cu_step, sequences, segment):
        assert p.slot < slots
        for h in range(value_heads):
            dS = state(dht, p.slot, h, *rest).double() if use_dht else torch.zeros(K, V).double()
            for c in reversed(p.chunks):
                ds[c.slot, h] = dS.T.to(ds.dtype)
                dW, dS = step_back(dS, c, h, group, q, k, do, r, gates)
                dv[c.rows, h] = dW.to(dv.dtype)
            if store_dh0 and p.n != n:
                state(dh0, p.n, h, *rest).copy_(dS)
        n = p.n


def reverse_segments(q, k, do, r, gates, cu, dht, ds, dv, dh0, seqlen, cu_step, sequences, value_heads, group, use_dht, store_dh0, stride_k, stride_v, longest_first, segment, slots, threshold, beside):  # fmt: skip
    q, k, do, dv = by_token(q, k, do, dv)
    K, V = k.shape[-1], do.shape[-1]
    rest = value_heads, K, V, (stride_k, stride_v)
    for p in pieces(cu, seqlen, cu_step, sequences, segment):
        assert p.slot < slots
        for h in range(value_heads if p.chunks and not p.chunks[0].first else 0):
            first = deciding(gates[[c.slot for c in p.chunks], h, DECAY, 2], threshold)
            entered = use_dht and p.last and not first
            dS = state(dht, p.n, h, *rest).double() if entered else torch.zeros(K, V).double()
            for c in reversed(p.chunks[: first or None]):
                dS = step_back(dS, c, h, group, q, k, do, r, gates)[1]
            state(dh0, p.slot, h, value_heads, K, V, (1, K)).copy_(dS)


def gradients(q, k, do, dw, y, state, dstate, gates, g, beta, A_log, dt_bias, cu, dq, dk, dg, dbeta, shares, scale, Tn, seqlen, cu_step, sequences, heads, group, normalize_q, normalize_k, raw_g, raw_beta, blocks):  # fmt: skip
    q, k, do, dw, y, dq, dk = by_token(q, k, do, dw, y, dq, dk)
    g, beta, dg, dbeta = by_token(g, beta, dg, dbeta)
    A_log, dt_bias = A_log.flatten(), dt_bias.flatten()
    assert scale >= 0 and len(q) == Tn
    if raw_g:
        shares = shares.view(-1, 2, heads * group)
        shares.zero_()
    for c in chunks(cu, seqlen, cu_step, sequences):
        for h in range(heads):
            sum_q = sum_k = torch.zeros(())
            for hv in range(h * group, (h + 1) * group):
                b_q, b_k, b_do, dW, Y, gate = tile(c, hv, group, gates, None, q, k, do, dw, y)
                S, dS = state[c.slot, hv].double().T, dstate[c.slot, hv].double().T
                rk, b = factors(b_k, normalize_k), gate[B].abs()
                log_decay = gates[c.slot, hv, DECAY, 1].double()
                F1 = scale * decayed(gate[PR], gate[GC]) * (b_do @ Y.T)
                F2 = -decayed(gate[GC] + 2 * rk.log2(), gate[GC], -1) * (dW @ Y.T)
                dQ = gate[O, :, None] * (b_do @ S.T) + (F1 * b) @ b_k
                dK_rows = -gate[X, :, None] * (dW @ S.T) + (F2 * b) @ b_k
                Z = (log_decay - gate[GC]).exp2()[:, None] * (Y @ dS.T)
                dK_columns = Z + F1.T @ b_q + F2.T @ b_k
                b_dbeta = (b_k * dK_columns).sum(-1)
                dgc = (b_q * dQ).sum(-1) + (b_k * dK_rows).sum(-1) - b * b_dbeta
                dgc[-1] += gates[c.slot, hv, DECAY, 0].double() * (dS * S).sum()
                dgc[-1] += (b * (b_k * Z).sum(-1)).sum()
                b_dbeta, b_dg = sign(gate[B]) * b_dbeta, dgc.flip(0).cumsum(0).flip(0)
                if raw_beta:
                    s = beta[c.rows, hv].double().sigmoid()
                    b_dbeta = b_dbeta * raw_beta * s * (1 - s)
                if raw_g:
                    x = g[c.rows, hv].double() + (dt_bias[hv].double() if raw_g == 2 else 0.0)
                    rate = -A_log[hv].double().exp()
                    b_gate = rate * torch.nn.functional.softplus(x)
                    b_dg = b_dg.masked_fill(b_gate < FLOOR, 0.0)
                    shares[c.slot, 0, hv] = (b_dg * b_gate.clamp(min=FLOOR)).sum()
                    b_dg = b_dg * rate * x.sigmoid()
                    shares[c.slot, 1, hv] = b_dg.sum()
                dbeta[c.rows, hv], dg[c.rows, hv] = b_dbeta.to(dbeta.dtype), b_dg.to(dg.dtype)
                sum_q, sum_k = sum_q + dQ, sum_k + dK_rows + b[:, None] * dK_columns
            for x, dx, total, on in ((q, dq, sum_q, normalize_q), (k, dk, sum_k, normalize_k)):
                b_x = x[c.rows, h].double()
                if on:
                    along = (b_x * total).sum(-1, keepdim=True)
                    total = total - factors(b_x, 1).square()[:, None] * b_x * along
                dx[c.rows, h] = total.to(dx.dtype)
    unused = behind(cu, seqlen, cu_step, sequences)
    for x in (dq, dk, dg, dbeta, dw):
        x[unused] = 0


FORWARD = chunk.Kernels(prepare, prepare, forward, forward)
BACKWARD = chunk.BackwardKernels(states, states, reverse, reverse, gradients)
SEGMENTS = SegmentKernels(segments, combine)
REVERSE_SEGMENTS = ReverseSegmentKernels(reverse_segments)
