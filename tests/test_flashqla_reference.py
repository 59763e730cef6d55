# SPDX-License-Identifier: MIT
"""The reference against the definition, FLA's own naive functions, and numerical gradients."""

import types

import pytest
import torch
import torch.nn.functional as F

from fla_flashqla import reference
from fla_flashqla.testing import Case, make_gates, make_inputs, oracle, relative_error

FORMS = pytest.mark.parametrize(
    "form",
    [reference.recurrent_gated_delta_rule, reference.chunk_gated_delta_rule],
    ids=["recurrent", "chunk"],
)
LENS = (0, 5, 0, 0, 64, 65, 1, 130, 0)
GATES = pytest.mark.parametrize("gates", ["strong", "mild", "zero", "published"])


def double(inputs):
    return {
        name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }


def small(seed=0, B=2, T=70, H=2, HV=4, K=16, V=24, **fields):
    return double(make_inputs(Case(B=B, T=T, H=H, HV=HV, K=K, V=V, **fields), seed=seed))


def definition(q, k, v, g, beta, scale, S):
    """The two lines of the operator, one sequence and one value head at a time."""
    o = torch.empty_like(v)
    S = S.clone()
    for b, h in ((b, h) for b in range(v.shape[0]) for h in range(v.shape[2])):
        h_k = h // (v.shape[2] // q.shape[2])
        for t in range(v.shape[1]):
            S[b, h] *= g[b, t, h].exp()
            delta = v[b, t, h] - S[b, h].T @ k[b, t, h_k]
            S[b, h] += torch.outer(k[b, t, h_k], beta[b, t, h] * delta)
            o[b, t, h] = scale * S[b, h].T @ q[b, t, h_k]
    return o, S


def assert_close(got, want, tol=1e-10):
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=tol, atol=tol)


@FORMS
@GATES
def test_flashqla_reference_is_the_definition(form, gates):
    x = small(gates=gates, scale=0.3)
    names = ("q", "k", "v", "g", "beta", "scale", "initial_state")
    assert_close(form(**x), definition(*(x[n] for n in names)))


@pytest.mark.fla
@FORMS
def test_flashqla_reference_is_flas_naive(form, monkeypatch):
    naive = pytest.importorskip("fla.ops.gated_delta_rule.naive")
    # FLA's function casts to float32; the same lines in float64 make a sharp oracle.
    f64 = types.SimpleNamespace(
        **{n: getattr(torch, n) for n in ("zeros", "einsum")}, float32=torch.float64
    )
    monkeypatch.setattr(naive, "torch", f64)
    x = small(H=4, HV=4, gates="strong", T=130)
    q, k, v, g, beta, h0 = (x[n] for n in ("q", "k", "v", "g", "beta", "initial_state"))
    want = naive.naive_recurrent_gated_delta_rule(
        q, k, v, beta, g, initial_state=h0, output_final_state=True
    )
    assert_close(form(**x), want)


@pytest.mark.fla
def test_flashqla_reference_is_flas_naive_chunk():
    naive = pytest.importorskip("fla.ops.gated_delta_rule.naive")
    x = {n: t.float() if isinstance(t, torch.Tensor) else t for n, t in small(H=4, HV=4).items()}
    names = ("q", "k", "v", "g", "beta", "initial_state", "output_final_state")
    want = naive.naive_chunk_gated_delta_rule(**{n: x[n] for n in names})
    assert_close(reference.chunk_gated_delta_rule(**x), want, 1e-4)


@GATES
@pytest.mark.parametrize("T", [1, 63, 64, 65, 127, 200])
def test_flashqla_chunk_form_is_the_recurrence(T, gates):
    x = small(T=T, gates=gates)
    assert_close(reference.chunk_gated_delta_rule(**x), reference.recurrent_gated_delta_rule(**x))


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_flashqla_reference_ignores_the_chunk_size(chunk_size):
    x = small(T=100)
    assert_close(
        reference.chunk_gated_delta_rule(**x, chunk_size=chunk_size),
        reference.recurrent_gated_delta_rule(**x, chunk_size=chunk_size),
    )


@FORMS
@pytest.mark.parametrize("cu_dtype", ["int32", "int64"])
def test_flashqla_reference_varlen_is_each_sequence_alone(form, cu_dtype):
    x = small(lens=LENS, tail=7, cu_dtype=cu_dtype, gates="strong")
    bounds = x.pop("cu_seqlens")
    for name in ("q", "k", "v", "g", "beta"):
        x[name][:, bounds[-1] :] = torch.nan
    o, ht = form(**x, cu_seqlens=bounds)
    assert (o[:, bounds[-1] :] == 0).all()
    for n, (bos, eos) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        rows = {m: x[m][:, bos:eos] for m in ("q", "k", "v", "g", "beta")}
        one = {**x, **rows, "initial_state": x["initial_state"][n : n + 1]}
        assert_close((o[:, bos:eos], ht[n : n + 1]), form(**one))
        if bos == eos:
            assert torch.equal(ht[n], x["initial_state"][n])


@FORMS
def test_flashqla_reference_of_nothing(form):
    x = small(lens=(0, 0, 0), tail=3)
    o, ht = form(**x)
    assert (o == 0).all() and torch.equal(ht, x["initial_state"])
    x = small(lens=(), tail=2)
    o, ht = form(**x)
    assert (o == 0).all() and ht.shape == (0, 4, 16, 24)
    x = small(T=0)
    o, ht = form(**x)
    assert o.shape == (2, 0, 4, 24) and torch.equal(ht, x["initial_state"])


@FORMS
def test_flashqla_reference_ignores_the_default_device(form):
    x = small(lens=(70, 0, 3), tail=1)
    dense = {n: t for n, t in x.items() if n not in ("cu_seqlens", "initial_state")}
    want = form(**x), form(**dense)
    with torch.device("meta"):
        got = form(**x), form(**dense)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 0)


@FORMS
def test_flashqla_reference_splits(form):
    x = small(T=150, gates="mild")
    whole = form(**x)
    cut = {"q", "k", "v", "g", "beta"}
    o1, S = form(**{n: t[:, :77] if n in cut else t for n, t in x.items()})
    second = {n: t[:, 77:] if n in cut else t for n, t in x.items()}
    o2, S = form(**{**second, "initial_state": S})
    assert_close((torch.cat([o1, o2], 1), S), whole)


@FORMS
def test_flashqla_reference_flags_are_what_they_say(form):
    x = small(T=70, l2norm=True)
    A_log, dt_bias = torch.randn(2, 4, dtype=torch.float64)
    raw = {**x, "beta": torch.randn_like(x["beta"]), "g": torch.randn_like(x["g"])}
    got = form(
        **raw,
        use_gate_in_kernel=True,
        A_log=A_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
    )
    plain = {
        **raw,
        "q": x["q"] / (x["q"].square().sum(-1, keepdim=True) + 1e-6).sqrt(),
        "k": x["k"] / (x["k"].square().sum(-1, keepdim=True) + 1e-6).sqrt(),
        "g": -A_log.exp() * F.softplus(raw["g"] + dt_bias),
        "beta": 2 * raw["beta"].sigmoid(),
        "use_qk_l2norm_in_kernel": False,
    }
    assert_close(got, form(**plain))
    no_bias = form(**raw, use_gate_in_kernel=True, A_log=A_log)
    plain = {**raw, "g": -A_log.exp() * F.softplus(raw["g"])}
    assert_close(no_bias, form(**plain))


@FORMS
def test_flashqla_reference_gate_does_not_decay_in_padding(form):
    x = small(lens=(3, 70, 0), tail=1, g_dtype="float32")
    A_log = torch.randn(4, dtype=torch.float64)
    gated = {**x, "g": -A_log.exp() * F.softplus(x["g"])}
    assert_close(form(**x, use_gate_in_kernel=True, A_log=A_log), form(**gated))


@FORMS
def test_flashqla_reference_state_layouts(form):
    x = small()
    o, ht = form(**x)
    h0 = x.pop("initial_state").mT
    x.pop("state_v_first")
    o1, ht1 = form(**x, initial_state=h0, state_v_first=True)
    assert torch.equal(o, o1) and torch.equal(ht, ht1.mT) and ht1.is_contiguous()
    with pytest.warns(DeprecationWarning):
        o2, ht2 = form(**x, initial_state=h0, transpose_state_layout=True)
    assert torch.equal(o, o2) and torch.equal(ht1, ht2)
    with pytest.raises(ValueError, match="one argument"):
        form(**x, initial_state=h0, state_v_first=True, transpose_state_layout=True)


@FORMS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_flashqla_reference_dtypes(form, dtype):
    x = make_inputs(Case(T=90, K=32, V=16, state_dtype="bfloat16"))
    o64, ht64 = oracle(x)
    half = {n: x[n].to(dtype) for n in ("q", "k", "v")}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, ht = form(**{**x, **half})
    assert o.dtype == dtype
    assert ht.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert relative_error(ht, ht64) < (1e-5 if dtype != torch.float16 else 1e-3)
    assert relative_error(o, o64) < {torch.bfloat16: 4e-3, torch.float16: 1e-3}.get(dtype, 1e-5)
    assert form(**{**x, "output_final_state": False})[1] is None


@FORMS
def test_flashqla_reference_resets(form):
    """A gate of -inf forgets all, before the token of that gate, in values and gradients."""

    def run(reset):
        x = small(B=1, T=140, K=8, V=8, gates="mild", seed=3)
        for t in (0, 5, 6, 63, 64, 100):
            x["g"][:, t] = reset
        names = ("q", "k", "v", "g", "beta", "initial_state")
        for n in names:
            x[n].requires_grad_()
        o, ht = form(**x)
        grads = torch.autograd.grad(o.sin().sum() + ht.cos().sum(), [x[n] for n in names])
        return o, ht, *grads

    got, want = run(-torch.inf), run(-800.0)  # exp(-800) is 0 in float64
    assert all(t.isfinite().all() for t in got)
    assert_close(got, want)
    x = small(B=1, T=140, K=8, V=8, gates="mild", seed=3)
    x["g"][:, 100] = -torch.inf
    cut = {n: x[n][:, 100:] for n in ("q", "k", "v", "g", "beta")}
    alone = form(**{**x, **cut, "initial_state": torch.zeros_like(x["initial_state"])})
    o, ht = form(**x)
    assert_close((o[:, 100:], ht), alone)


@FORMS
def test_flashqla_reference_padding_gradients_are_zero(form):
    x = small(lens=(0, 4, 66, 0), tail=5, K=4, V=4, l2norm=True)
    names = ("q", "k", "v", "g", "beta")
    for n in names:
        x[n][:, 70:] = torch.nan
        x[n].requires_grad_()
    o, ht = form(**x)
    for grad in torch.autograd.grad(o.sum() + ht.sum(), [x[n] for n in names]):
        assert (grad[:, 70:] == 0).all() and grad.isfinite().all()


FLAGS = {
    "plain": {},
    "l2norm": {"use_qk_l2norm_in_kernel": True},
    "scale": {"scale": 0.7},
    "v_first": {"state_v_first": True},
    "sigmoid": {"use_beta_sigmoid_in_kernel": True},
    "neg_eigval": {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
    "gate": {"use_gate_in_kernel": True},
    "varlen": {"cu_seqlens": torch.tensor([0, 2, 2, 5])},
    "chunks": {"chunk_size": 2},
}


@FORMS
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_flashqla_reference_gradcheck(form, flags):
    N = 3 if "cu_seqlens" in flags else 1
    x = small(B=1, T=5 + (N > 1), H=1, HV=2, K=3, V=2, gates="mild")
    h0 = torch.randn(N, 2, 3, 2, dtype=torch.float64)
    h0 = h0.mT.contiguous() if "state_v_first" in flags else h0
    gate = torch.randn(2, 2, dtype=torch.float64).unbind() if "use_gate_in_kernel" in flags else ()
    leaves = [x["q"], x["k"], x["v"], x["g"], x["beta"], h0, *gate]

    def call(q, k, v, g, beta, h0, A_log=None, dt_bias=None):
        more = {"A_log": A_log, "dt_bias": dt_bias} if gate else {}
        return form(q, k, v, g, beta, initial_state=h0, output_final_state=True, **flags, **more)

    assert torch.autograd.gradcheck(call, [t.requires_grad_() for t in leaves])


@FORMS
def test_flashqla_reference_refuses_what_it_cannot(form):
    x = small(T=3)
    with pytest.raises(ValueError, match="cp_context"):
        form(**x, cp_context=object())
    with pytest.raises(ValueError, match="allow_neg_eigval"):
        form(**x, allow_neg_eigval=True)
    with pytest.raises(TypeError):
        form(**x, no_such_argument=1)


def test_flashqla_inputs_are_seeded():
    case = Case(T=40, gates="strong", state_dtype="float16", beta_dtype="bfloat16")
    a, b, c = make_inputs(case, seed=1), make_inputs(case, seed=1), make_inputs(case, seed=2)
    assert torch.equal(a["q"], b["q"]) and torch.equal(a["g"], b["g"])
    assert not torch.equal(a["q"], c["q"])
    assert a["initial_state"].dtype == torch.float16 and a["beta"].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="gates must be"):
        make_gates("none", (1, 2, 3), torch.Generator())


def test_flashqla_relative_error():
    one = torch.ones(4)
    assert relative_error(one, one) == 0
    assert relative_error(1.5 * one, one) == pytest.approx(0.5)
    assert relative_error(one, 0 * one) == 2
    assert not relative_error(one * torch.nan, one) <= 1
