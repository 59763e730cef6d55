# SPDX-License-Identifier: MIT
"""What answers which call, and the text of every refusal; no GPU, the device facts are patched."""

import timeit
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from fla_flashqla import arch
from fla_flashqla.call import Call, describe
from fla_flashqla.plan import (
    Plan,
    Reference,
    Refusal,
    longest_first,
    plan,
    splits,
    states_whole,
    warps,
)

SM90 = arch.DeviceFacts("cuda", 0, (9, 0), False, 132)
PLAN = Plan("sm90", "bfloat16", "float32", "float32", splits=2, warps=1)
BASE = {
    "device_type": "cuda",
    "device_index": 0,
    "sm": (9, 0),
    "is_hip": False,
    "sms": 132,
    "q_dtype": "bfloat16",
    "k_dtype": "bfloat16",
    "v_dtype": "bfloat16",
    "g_dtype": "float32",
    "beta_dtype": "float32",
    **{"B": 1, "T": 8192, "H": 16, "HV": 32, "K": 128, "V": 128, "N": 1},
}


@pytest.fixture
def facts(monkeypatch):
    """Calling it makes every tensor's device look like that one."""

    def patch(found):
        monkeypatch.setattr(arch, "device_facts", lambda device: found)

    patch(SM90)
    return patch


def inputs(B=1, T=64, H=2, HV=4, K=128, V=128, **changes):
    main = {"dtype": torch.bfloat16}
    x = {
        "q": torch.zeros(B, T, H, K, **main),
        "k": torch.zeros(B, T, H, K, **main),
        "v": torch.zeros(B, T, HV, V, **main),
        "g": torch.zeros(B, T, HV),
        "beta": torch.zeros(B, T, HV),
    }
    return {**x, **changes}


def state(*shape, dtype=torch.float32, **options):
    return torch.zeros(shape, dtype=dtype, **options)


def bounds(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


class Subclass(torch.Tensor):
    pass


HALF = torch.zeros(1, 64, 2, 128, dtype=torch.float16)
# name -> (what differs from an accepted call, the text of the refusal)
REFUSED = {
    "not_a_tensor": ({"q": [1.0]}, "q must be a plain torch.Tensor, got list"),
    "g_none": ({"g": None}, "g must be a plain torch.Tensor, got NoneType"),
    "subclass": (
        {"k": torch.zeros(1, 64, 2, 128).as_subclass(Subclass)},
        "k must be a plain torch.Tensor, got Subclass",
    ),
    "rank_q": ({"q": state(64, 2, 128)}, "q and v must have 4 dimensions"),
    "rank_v": ({"v": state(64, 4, 128)}, "q and v must have 4 dimensions"),
    "k_heads": ({"k": state(1, 64, 1, 128)}, "k must have q's shape (1, 64, 2, 128)"),
    "k_dim": ({"k": state(1, 64, 2, 64)}, "k must have q's shape (1, 64, 2, 128)"),
    "v_tokens": ({"v": state(1, 63, 4, 128)}, "v must start with [B, T] = [1, 64], got [1, 63]"),
    "heads": ({"v": state(1, 64, 3, 128)}, "HV must be a multiple of H, got H=2, HV=3"),
    "no_heads": (inputs(H=0, HV=0), "HV must be a multiple of H, got H=0, HV=0"),
    "g_shape": ({"g": state(1, 64, 2)}, "g must be [B, T, HV] = (1, 64, 4), got (1, 64, 2)"),
    "beta_shape": ({"beta": state(1, 64, 4, 1)}, "beta must be [B, T, HV] = (1, 64, 4)"),
    "devices": ({"beta": state(1, 64, 4, device="meta")}, None),
    "scale": ({"scale": torch.ones(())}, "scale must be a number or None, got Tensor"),
    "cu_type": ({"cu_seqlens": [0, 64]}, "cu_seqlens must be a 1-D tensor"),
    "cu_rank": ({"cu_seqlens": bounds([0, 64])}, "cu_seqlens must be a 1-D tensor"),
    "cu_empty": ({"cu_seqlens": bounds()}, "cu_seqlens must be a 1-D tensor"),
    "cu_dtype": (
        {"cu_seqlens": bounds(0, 64, dtype=torch.float32)},
        "cu_seqlens must be int32 or int64, got float32",
    ),
    "cu_batch": (inputs(B=2, cu_seqlens=bounds(0, 64)), "B must be 1 with cu_seqlens, got 2"),
    "state_type": ({"initial_state": 0.0}, "initial_state must be a plain tensor, got float"),
    "state_count": (
        {"initial_state": state(1, 4, 128, 128), "cu_seqlens": bounds(0, 1, 64)},
        "initial_state must be (2, 4, 128, 128), got (1, 4, 128, 128)",
    ),
    "state_layout": (
        inputs(V=64, initial_state=state(1, 4, 128, 64), state_v_first=True),
        "initial_state must be (1, 4, 64, 128), got (1, 4, 128, 64)",
    ),
    "head_first": ({"head_first": False}, "head_first was removed"),
    "both_layouts": (
        {"state_v_first": True, "transpose_state_layout": False},
        "state_v_first and transpose_state_layout are one argument, got both",
    ),
    "bad_chunk_size": ({"chunk_size": 128}, "chunk_size must be 16, 32 or 64, got 128"),
    "no_A_log": ({"use_gate_in_kernel": True}, "A_log must be a floating-point tensor of HV = 4"),
    "dt_bias": (
        {"use_gate_in_kernel": True, "A_log": state(4), "dt_bias": state(2)},
        "dt_bias must be a floating-point tensor of HV = 4",
    ),
    "integer_A_log": (
        {"use_gate_in_kernel": True, "A_log": torch.ones(4, dtype=torch.int32)},
        "A_log must be a floating-point tensor of HV = 4 elements on q's device",
    ),
    "neg_eigval_alone": (
        {"allow_neg_eigval": True},
        "allow_neg_eigval needs use_beta_sigmoid_in_kernel",
    ),
    # From here on the call is well-formed, and on a CPU the reference answers all but two of them.
    "unknown": ({"zz": None, "aa": 1}, "unknown keyword arguments: aa, zz"),
    "cp_context": ({"cp_context": object()}, "cp_context is not supported"),
    "K": (inputs(K=96), "K and V must be 128, got K=96, V=128"),
    "V": (inputs(V=256), "K and V must be 128, got K=128, V=256"),
    "fp32": (
        {n: state(1, 64, h, 128) for n, h in (("q", 2), ("k", 2), ("v", 4))},
        "q, k and v must be float16 or bfloat16, got float32",
    ),
    "mixed": (
        {"k": HALF},
        "q, k and v must share one dtype, got bfloat16, float16, bfloat16",
    ),
    "g_dtype": ({"g": state(1, 64, 4, dtype=torch.float64)}, "g must be float32, bfloat16 or"),
    "beta_dtype": ({"beta": state(1, 64, 4, dtype=torch.int32)}, "beta must be float32, bfloat16"),
    "state_dtype": (
        {"initial_state": state(1, 4, 128, 128, dtype=torch.float64)},
        "initial_state must be float32, bfloat16 or float16, got float64",
    ),
    "no_tokens": (inputs(T=0), "there must be a sequence and a token, got B=1, T=0, N=1"),
    "no_batch": (inputs(B=0), "there must be a sequence and a token, got B=0, T=64, N=0"),
    "no_sequences": ({"cu_seqlens": bounds(0)}, "there must be a sequence and a token"),
}
DEVICES = {
    "sm80": (("cuda", 0, (8, 0), False), "must be SM90 or SM100 or SM103, got SM80: not"),
    "sm89": (("cuda", 1, (8, 9), False), "must be SM90 or SM100 or SM103, got SM89: not"),
    "sm120": (("cuda", 0, (12, 0), False), f"got SM120: {arch.SMALL}"),
    "sm121": (("cuda", 0, (12, 1), False), f"got SM121: {arch.SMALL}"),
    "hip": (("cuda", 0, (9, 4), True), "an NVIDIA GPU is needed, got a HIP build of torch"),
    "xpu": (("xpu", 0, None, False), "the device must be cuda or cpu, got xpu"),
}
ACCEPTED = {
    "plain": {},
    "positional_defaults": {"scale": None, "initial_state": None, "cu_seqlens": None},
    "scale": {"scale": 1},
    "varlen": {"cu_seqlens": bounds(0, 0, 7, 64)},
    "varlen_int64": {"cu_seqlens": bounds(0, 64, dtype=torch.int64)},
    "restated": {
        "cu_seqlens": bounds(0, 64),
        "cu_seqlens_cpu": bounds(0, 64),
        "chunk_indices": bounds([0, 0]),
    },
    "state": {"initial_state": state(1, 4, 128, 128), "output_final_state": True},
    "state_bf16": {"initial_state": state(1, 4, 128, 128, dtype=torch.bfloat16)},
    "state_fp16": {"initial_state": state(1, 4, 128, 128, dtype=torch.float16)},
    "v_first": {"initial_state": state(1, 4, 128, 128), "state_v_first": True},
    "l2norm": {"use_qk_l2norm_in_kernel": True},
    "off": {"use_gate_in_kernel": False, "A_log": None, "dt_bias": None, "chunk_size": 64},
    "old_layout_off": {"transpose_state_layout": False},
    "old_layout": inputs(initial_state=state(1, 4, 128, 128), transpose_state_layout=True),
    "gate": {"use_gate_in_kernel": True, "A_log": state(4, dtype=torch.bfloat16)},
    "gate_bias": {"use_gate_in_kernel": True, "A_log": state(4), "dt_bias": state(1, 4).double()},
    "unused_parameters": {"A_log": "no tensor", "dt_bias": state(7)},
    "sigmoid": {"use_beta_sigmoid_in_kernel": True},
    "neg_eigval": {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
    "chunk_size_16": {"chunk_size": 16},
    "chunk_size_32": {"chunk_size": 32},
    "layer": {
        **{
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": True,
        },
        **{"use_qk_l2norm_in_kernel": True, "state_v_first": True, "output_final_state": None},
        **{"A_log": state(4), "dt_bias": state(4)},
    },
    "dense_batch": inputs(B=3, initial_state=state(3, 4, 128, 128)),
    "strided": {"q": torch.zeros(1, 64, 128, 2, dtype=torch.bfloat16).mT},
    "parameter": {"beta": torch.nn.Parameter(state(1, 64, 4), requires_grad=False)},
}
# Calls of which a backward may follow.
TRAINED = {
    **{n: {n: inputs()[n].requires_grad_()} for n in ("q", "k", "v", "g", "beta")},
    "state": {"initial_state": state(1, 4, 128, 128, requires_grad=True)},
    "parameter": {"beta": torch.nn.Parameter(state(1, 64, 4))},
    "l2norm": {"use_qk_l2norm_in_kernel": True, "v": inputs()["v"].requires_grad_()},
    "A_log": {"use_gate_in_kernel": True, "A_log": state(4, requires_grad=True)},
    "dt_bias": {
        **{"use_gate_in_kernel": True, "A_log": state(4)},
        "dt_bias": torch.nn.Parameter(state(4)),
    },
    "varlen": {"cu_seqlens": bounds(0, 0, 7, 64), "g": state(1, 64, 4, requires_grad=True)},
}
CASES = [
    *(pytest.param(SM90, *case, id=name) for name, case in REFUSED.items()),
    *(pytest.param(arch.DeviceFacts(*f), {}, text, id=n) for n, (f, text) in DEVICES.items()),
    *(pytest.param(SM90, changes, True, id=name) for name, changes in ACCEPTED.items()),
    *(pytest.param(SM90, changes, True, id=f"trained_{name}") for name, changes in TRAINED.items()),
]


@pytest.mark.parametrize("device, changes, verdict", CASES)
def test_flashqla_verifier_rejects(device, changes, verdict, facts, monkeypatch):
    """Every refusal with its text and the acceptance, by the planner and by the backend."""
    facts(device)
    call = inputs(**changes)
    decision = plan(describe(**call))
    if verdict is True:
        trained = any(changes is case for case in TRAINED.values())
        assert decision == replace(PLAN, gradients=trained)
    else:
        assert isinstance(decision, Refusal)
        assert (verdict or "q, k, v, g and beta must be on one device") in decision.reason
        assert "\n" not in decision.reason
    answer, reason = verify(monkeypatch, call)
    assert answer is (verdict is True)
    assert reason == (None if verdict is True else decision.reason)


def verify(monkeypatch, call):
    """The backend's verifier, without its compile."""
    pytest.importorskip("fla.ops.gated_delta_rule", reason="needs FLA")
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    from fla_flashqla import api, chunk, compat, op
    from fla_flashqla.backend import FlashQLABackend

    monkeypatch.delenv("FLA_FLASH_QLA_STRICT", raising=False)
    monkeypatch.setattr(chunk, "build", lambda plan: None)
    monkeypatch.setattr(chunk, "build_backward", lambda plan: None)
    monkeypatch.setattr(api, "_kernels", {})
    binding = compat.Binding.between(chunk_gated_delta_rule, op.chunk_gated_delta_rule)
    return FlashQLABackend(binding).chunk_gated_delta_rule_verifier(**call)


@pytest.mark.parametrize("name", REFUSED)
def test_flashqla_cpu_is_answered_by_the_reference(name):
    """What is malformed or not ours alone is refused on a CPU too; all else is answered."""
    changes, text = REFUSED[name]
    decision = plan(describe(**inputs(**changes)))
    names = list(REFUSED)
    if names.index(name) <= names.index("cp_context"):
        assert isinstance(decision, Refusal) and (text or "one device") in decision.reason
    elif name == "beta_dtype":
        assert decision == Refusal("beta must be a floating-point tensor, got int32")
    else:
        assert isinstance(decision, Reference)


def test_flashqla_cpu_takes_any_size_and_dtype():
    for dtype in (torch.float64, torch.float32, torch.float16):
        x = {n: t.to(dtype) for n, t in inputs(K=5, V=7, H=1, HV=3).items()}
        assert isinstance(plan(describe(**x)), Reference)
    x = inputs(q=torch.zeros(1, 64, 2, 128, dtype=torch.int32))
    assert plan(describe(**x)) == Refusal("q must be a floating-point tensor, got int32")


# FLA's own words for what we refuse as malformed: they must reach the user.
FLAS_ERRORS = {
    "k_heads": "same number of heads",
    "heads": "evenly divisible",
    "cu_batch": "batch size is expected to be 1",
    "state_count": "number of initial states",
    "head_first": "head_first has been removed",
    "both_layouts": "Cannot pass both",
    "bad_chunk_size": "must be 16, 32, or 64",
    "no_A_log": "A_log must be provided",
    "neg_eigval_alone": "requires `use_beta_sigmoid_in_kernel=True`",
}


@pytest.mark.fla
@pytest.mark.parametrize("name", FLAS_ERRORS)
def test_flashqla_malformed_calls_get_flas_own_error(name):
    fla = pytest.importorskip("fla.ops.gated_delta_rule", reason="needs FLA")
    with pytest.raises((ValueError, AssertionError, DeprecationWarning), match=FLAS_ERRORS[name]):
        fla.chunk_gated_delta_rule(**inputs(**REFUSED[name][0]))


# H:HV of the models that call this operator, whole and under tensor parallelism.
MODELS = ["16:32", "16:16", "16:48", "16:64", "32:32", "48:48", "64:64", "30:30", "1:5"]
HEADS = [*MODELS, "2:8", "4:16", "8:32", "8:24"]


@pytest.mark.parametrize("heads", HEADS)
def test_flashqla_plan_of_every_head_shape(heads):
    H, HV = map(int, heads.split(":"))
    for T in (1, 64, 1000, 32768, 2**31 - 193):
        assert plan(Call(**{**BASE, "H": H, "HV": HV, "T": T})).compiled == PLAN.compiled


@pytest.mark.parametrize("heads, K, V", [("30:30", 96, 192), ("6:6", 256, 512), ("16:32", 64, 64)])
def test_flashqla_plan_of_other_head_sizes(heads, K, V):
    H, HV = map(int, heads.split(":"))
    call = Call(**{**BASE, "H": H, "HV": HV, "K": K, "V": V})
    assert plan(call) == Refusal(f"K and V must be 128, got K={K}, V={V}")


@pytest.mark.parametrize("q", ["bfloat16", "float16"])
@pytest.mark.parametrize("g", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("beta", ["float32", "bfloat16", "float16"])
def test_flashqla_only_dtypes_select_a_kernel(q, g, beta):
    dtypes = {"q_dtype": q, "k_dtype": q, "v_dtype": q, "g_dtype": g, "beta_dtype": beta}
    call = Call(**{**BASE, **dtypes, "T": 100})
    want = Plan("sm90", q, g, beta, splits=2, warps=1)
    others = {
        **{"B": 4, "T": 100, "H": 4, "HV": 8, "N": 4, "device_index": 3},
        "varlen": True,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "state_v_first": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
        "state_dtype": "float16",
    }
    assert plan(call) == plan(call._replace(**others)) == want
    assert hash(plan(call)) == hash(want) and repr(want) == (
        f"Plan(arch='sm90', dtype='{q}', g_dtype='{g}', beta_dtype='{beta}', splits=2, warps=1, "
        "longest_first=False, gradients=False, states_whole=False, segment=0, segment_splits=1, "
        "backward_segment=0, backward_splits=1, exact=False)"
    )
    trained = plan(call._replace(needs_grad=True))
    assert trained == replace(want, gradients=True, states_whole=True)
    assert trained.compiled == want.compiled
    assert (want.steps, trained.steps) == (("forward",), ("forward", "backward"))
    assert trained.path("backward") == f"backward sm90 {q}"
    with pytest.raises(FrozenInstanceError):
        want.dtype = "float32"


def test_flashqla_plan_limits():
    assert plan(Call(**{**BASE, "T": 2**31 - 192})) == Refusal(
        f"B * T must be below 2**31 - 192, got {2**31 - 192}"
    )
    assert plan(Call(**{**BASE, "B": 2**16, "N": 2**16, "T": 2**15})) == Refusal(
        f"B * T must be below 2**31 - 192, got {2**31}"
    )
    assert "got unknown" in plan(Call(**{**BASE, "sm": None})).reason


def test_flashqla_gradients_are_needed_only_where_asked_for():
    x = inputs(q=torch.zeros(1, 64, 2, 128, requires_grad=True))
    assert describe(**x).needs_grad
    with torch.no_grad():
        assert not describe(**x).needs_grad
    with torch.inference_mode():
        assert not describe(**x).needs_grad
    unused = torch.zeros(4, requires_grad=True)
    assert not describe(**inputs(A_log=unused)).needs_grad
    assert describe(**inputs(A_log=unused, use_gate_in_kernel=True)).needs_grad


def test_flashqla_describe_reads_the_call():
    x = inputs(
        H=1,
        HV=3,
        K=8,
        V=6,
        T=9,
        cu_seqlens=bounds(0, 4, 9),
        initial_state=state(2, 3, 6, 8, dtype=torch.float16),
        state_v_first=True,
        output_final_state=True,
    )
    got = describe(**x)
    assert (got.B, got.T, got.H, got.HV, got.K, got.V, got.N) == (1, 9, 1, 3, 8, 6, 2)
    assert (got.device_type, got.device_index, got.sm) == ("cpu", -1, None)
    assert (got.q_dtype, got.g_dtype, got.state_dtype) == ("bfloat16", "float32", "float16")
    assert got.varlen and got.state_v_first and got.output_final_state and not got.needs_grad
    assert got.malformed is None and got.unknown == () and hash(got) == hash(describe(**x))
    old = {**x, "state_v_first": False, "transpose_state_layout": True}
    assert describe(**old) == got


def test_flashqla_arch_rows():
    assert [row.name for row in arch.ARCHS.values()] == ["sm90", "sm100", "sm103", "sm120", "sm121"]
    for sm, row in arch.ARCHS.items():
        assert row.sm == sm and row.name == f"sm{sm[0]}{sm[1]}"
        assert row.supported == (row.status != arch.SMALL) and row.proven == (sm == (9, 0))
    assert arch.ARCHS[9, 0].smem_bytes == 232_448


def test_flashqla_device_facts_are_looked_up_once(monkeypatch):
    looked_up = []

    def properties(device):
        looked_up.append(device)
        return type("Properties", (), {"major": 9, "minor": 0, "multi_processor_count": 132})

    monkeypatch.setattr(arch, "_FACTS", {})
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    one = torch.device("cuda", 1)
    assert arch.device_facts(one) == arch.device_facts(one) == ("cuda", 1, (9, 0), False, 132, "")
    assert arch.device_facts(torch.device("cpu")) == ("cpu", -1, None, False, 0, "")
    assert looked_up == [one]


def test_flashqla_warps():
    alone, shared = (plan(Call(**{**BASE, "H": 2, "HV": HV})) for HV in (4, 8))
    assert (alone.warps, shared.warps) == (1, 4) and alone.compiled == shared.compiled
    assert [warps(group) for group in (1, 2, 3, 4, 16)] == [1, 1, 4, 4, 4]


def test_flashqla_splits():
    """Half a head a block as long as all halves run at once; both are compiled together."""
    few, many = (plan(Call(**{**BASE, "N": n, "HV": 8})) for n in (8, 9))
    assert (few.splits, many.splits) == (2, 1) and few.compiled == many.compiled
    assert [splits(chains, 132) for chains in (1, 8, 66, 67, 256)] == [2, 2, 2, 1, 1]


def test_flashqla_states_whole():
    """Where halves are many, and whole heads still fit beside the halves of the other recurrence."""
    assert [n for n in range(1, 200) if states_whole(n, 132)] == [*range(25, 45)]
    assert all(splits(n, 132) == 2 for n in range(25, 45))


def test_flashqla_longest_first():
    """Where packed sequences wait for each other, few enough for a lane each; all else is alike."""
    call = Call(**{**BASE, "N": 5, "varlen": True})
    waiting, dense = plan(call), plan(call._replace(varlen=False))
    assert waiting == replace(dense, longest_first=True) and waiting.compiled == dense.compiled
    assert plan(call._replace(N=4)) == dense  # 128 blocks, which run at once
    trained = call._replace(needs_grad=True)
    assert plan(trained) == replace(waiting, gradients=True)
    counts = (0, 1, 2, 3, 32, 33, 1000)
    assert [longest_first(True, N, 64, 132) for N in counts] == [0, 0, 0, 1, 1, 0, 0]
    assert [longest_first(True, 2, HV, 132) for HV in (1, 66, 67)] == [0, 0, 1]
    assert not any(longest_first(False, N, 64, 132) for N in counts)


def test_flashqla_planning_is_quick(facts):
    """It is on the path of every call: microseconds, with room for a busy machine."""
    x = inputs(initial_state=state(1, 4, 128, 128), cu_seqlens=bounds(0, 64), scale=0.1)
    seconds = min(timeit.repeat(lambda: plan(describe(**x)), number=200, repeat=20)) / 200
    assert seconds < 50e-6
