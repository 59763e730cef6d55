# SPDX-License-Identifier: MIT
"""Run a call through FLA's operator, by our kernels or by FLA's Triton ones, and judge it."""

import contextlib
import functools
import os
from dataclasses import replace
from unittest import mock

import torch

import fla_flashqla
from fla_flashqla import arch, env
from fla_flashqla.plan import Plan, plan
from fla_flashqla.testing import BOUNDS, make_output_gradients, oracle, relative_error

# Empty sequences first, last, beside each other; tails of every kind.
LENS = (0, 1, 63, 0, 0, 64, 65, 127, 128, 300, 0)
DEVICE = "cuda"
_ROW = arch.row(torch.device("cuda", 0)) if torch.cuda.is_available() else None
ARCH = (_ROW or arch.ARCHS[9, 0]).in_form(env.form()).name  # as reports call it
FLA_FACTOR = 1.5  # our error may be so much larger than that of FLA's Triton forward
ROWS = ("q", "k", "v", "g", "beta")
LAYER = {"raw_g": "bias", "raw_beta": 2, "l2norm": True, "state_v_first": True}  # of FLA


def operator(**inputs):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    with torch.no_grad():
        return chunk_gated_delta_rule(**inputs)


@contextlib.contextmanager
def poisoned_memory():
    """Fresh memory holds NaN or huge integers, so that whatever is read unwritten shows."""

    def poison(make):
        @functools.wraps(make)
        def made(*args, **kwargs):
            x = make(*args, **kwargs)
            if x.is_floating_point():
                return x.fill_(torch.nan)
            return x if x.dtype == torch.bool else x.fill_(torch.iinfo(x.dtype).max)

        return made

    with contextlib.ExitStack() as stack:
        places = [(torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")]
        for owner, name in places:
            stack.enter_context(mock.patch.object(owner, name, poison(getattr(owner, name))))
        yield


def planner(**fields):
    """What plans calls as `plan` does, but for these fields."""

    def planned(call):
        made = plan(call)
        return replace(made, **fields) if isinstance(made, Plan) else made

    return planned


def answered():
    return sum(fla_flashqla.dispatch_report()["ran"].values())


def run_ours(**inputs):
    """o and final_state by our kernels, proved by the count, on poisoned memory."""
    before = answered()
    with mock.patch.dict(os.environ, {"FLA_FLASH_QLA": "1"}), poisoned_memory():
        o, ht = operator(**inputs)
    assert answered() == before + 1, fla_flashqla.dispatch_report()
    q, v, h0 = inputs["q"], inputs["v"], inputs.get("initial_state")
    assert o.shape == v.shape and o.dtype == q.dtype and o.device == q.device
    assert (ht is not None) == bool(inputs.get("output_final_state"))
    if ht is not None:
        assert ht.dtype == torch.float32
        assert h0 is None or ht.shape == h0.shape
    return o, ht


def run_fla(**inputs):
    """o and final_state [N, HV, K, V] by FLA's Triton kernels.

    Value heads do not see each other, so FLA gets them in groups of four, and Triton takes the first
    configuration of each kernel: it compiles anew for every number of heads and tunes over dozens
    of configurations, for minutes, which changes the time of a call and not its accuracy.
    """
    from triton.runtime.autotuner import Autotuner

    q, k, v, g, beta = (inputs[n] for n in ROWS)
    HV = v.shape[2]
    repeat = HV // q.shape[2]
    q, k = q.repeat_interleave(repeat, 2), k.repeat_interleave(repeat, 2)
    h0 = inputs.get("initial_state")
    if h0 is not None and inputs.get("state_v_first"):
        h0 = h0.mT
    rest = {n: inputs.get(n) for n in ("scale", "cu_seqlens", "use_qk_l2norm_in_kernel")}
    before, parts = answered(), []
    untuned = mock.patch.object(Autotuner, "prune_configs", lambda tuner, _: tuner.configs[:1])
    with mock.patch.dict(os.environ, {"FLA_FLASH_QLA": "0"}), untuned:
        for first in range(0, HV, 4):
            heads = [(first + i) % HV for i in range(4)]
            part = operator(
                q=q[:, :, heads],
                k=k[:, :, heads],
                v=v[:, :, heads],
                g=g[:, :, heads].float(),
                beta=beta[:, :, heads].float(),
                initial_state=None if h0 is None else h0[:, heads].float().contiguous(),
                output_final_state=True,
                **rest,
            )
            keep = min(4, HV - first)
            parts.append((part[0][:, :, :keep], part[1][:, :keep]))
    assert answered() == before
    o, ht = zip(*parts, strict=True)
    return torch.cat(o, 2), torch.cat(ht, 1)


def harden(inputs, keys):
    """Make the entries of the inverse large, in place."""
    k = inputs["k"].float()
    if keys == "long":  # |1 - beta k^2| is up to 1: the recurrence itself must not diverge
        norms = torch.linspace(0.5, 2**0.5 - 0.01, k.shape[1], device=k.device)[:, None, None]
        inputs["k"] = (k * norms).to(inputs["k"].dtype)
    else:
        k = k[:, :1] + (k * 0.1 if keys == "alike" else 0 * k)
        inputs["k"] = torch.nn.functional.normalize(k, dim=-1).to(inputs["k"].dtype)
        inputs["beta"].fill_(1.99)
        inputs["beta"][..., 0] = 2.0


def used_rows(inputs):
    cu = inputs.get("cu_seqlens")
    return slice(None) if cu is None else slice(int(cu[0]), int(cu[-1]))


def check(inputs, results=None, fla=True, absolute=True):
    """Our error against float64 is below the bound of the dtype and near FLA's; return results.

    Without `absolute` only FLA's error counts: inputs whose condition no kernel of this dtype masters.
    """
    o, ht = run_ours(**inputs) if results is None else results
    want_o, want_ht = oracle({**inputs, "output_final_state": True})
    rows = used_rows(inputs)
    v_first = inputs.get("state_v_first")
    bound = BOUNDS[str(inputs["q"].dtype).removeprefix("torch.")]
    fla_o, fla_ht = run_fla(**inputs) if fla else (None, None)
    pairs = {"o": (o[:, rows], want_o[:, rows], fla_o[:, rows] if fla else None)}
    if ht is not None:
        pairs["final_state"] = (ht.mT, want_ht.mT, fla_ht) if v_first else (ht, want_ht, fla_ht)
    for name, (got, want, theirs) in pairs.items():
        error = relative_error(got, want)
        limit = bound if absolute else float("inf")
        if theirs is not None:
            limit = min(limit, FLA_FACTOR * relative_error(theirs, want))
        assert error <= limit, f"{name}: relative L2 error {error:.2e}, at most {limit:.2e}"
    if rows.stop is not None:
        assert (o[:, rows.stop :] == 0).all()
    return o, ht


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def loss_gradients(inputs, loss):
    """Gradients of o and final_state for a loss on "o", "final_state" or "both"; `None` is zero."""
    do, dht = make_output_gradients(inputs)
    return (None if loss == "final_state" else do), (None if loss == "o" else dht)
