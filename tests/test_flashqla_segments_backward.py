# SPDX-License-Identifier: MIT
"""Gradients of sequences in segments: the choice, and the whole path with models for kernels against float64; no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kernel_models
import pytest
import torch
from gpu_helpers import poisoned_memory
from model_helpers import (
    EVERY,
    EXACT,
    PLAN,
    alike_lengths,
    any_sign,
    compare,
    fitting,
    fitting_segments,
    gradients,
    small,
)

from fla_flashqla import api, chunk, segments
from fla_flashqla.call import describe
from fla_flashqla.plan import BACKWARD, Plan, plan, segment, splits
from fla_flashqla.testing import (
    GRADIENT_BOUNDS,
    Case,
    make_inputs,
    make_output_gradients,
    oracle_gradients,
)

LENS = (0, 1, 0, 64, 65, 128, 129, 200, 0)
LAYER = {"raw_g": "bias", "raw_beta": 2, "l2norm": True, "state_v_first": True}  # of FLA
FORWARD = ["prepare", "forward"]
STATES = ["segments", "combine"]
BOTH = ["segments", "reverse_segments", "combine"]
CUT = [*BOTH, "states", "reverse", "gradients"]
WHOLE = ["states", "reverse", "gradients"]
REHEARSE = segments.rehearse_backward


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> Any:
    """Every backward gets segments of that many tokens, kernels take float64 and any head size with K = V."""

    def cut(tokens: int, **fields: Any) -> list[str]:
        planned = replace(PLAN, backward_segment=tokens, **fields)
        monkeypatch.setattr(api, "plan", lambda call: planned)
        return launched

    return cut


def square(**fields: Any) -> dict[str, Any]:
    return small(**{"V": 8, "T": 200, "H": 1, "HV": 2, **fields})


def check(
    x: dict[str, Any], bound: float = EXACT, loss: str = "both", names: tuple[str, ...] = EVERY
) -> dict[str, torch.Tensor]:
    do, dht = make_output_gradients(x)
    do, dht = (None if loss == "final_state" else do), (None if loss == "o" else dht)
    with poisoned_memory():
        got = gradients(x, do, dht, names)
    compare(got, oracle_gradients(x, do, dht), bound)
    return got


@pytest.mark.parametrize("mode", ["exact", "auto"])
@pytest.mark.parametrize("gates", ["strong", "published", "zero"])
@pytest.mark.parametrize("tokens", [64, 128])
def test_flashqla_segments_backward(
    tokens: int, gates: str, mode: str, cut: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLA_FLASH_QLA_CP", mode)
    launched = cut(tokens)
    check(square(lens=LENS, tail=9, gates=gates))
    check(square(B=2, T=300, gates=gates))
    assert launched == [*FORWARD, *CUT] * 2


@pytest.mark.parametrize(
    "fields",
    [LAYER, {"raw_g": "no_bias"}, {"raw_beta": 1, "scale": -0.3}, {"l2norm": True}],
    ids=["layer", "g", "beta", "l2norm"],
)
def test_flashqla_segments_backward_options(fields: dict[str, Any], cut: Any) -> None:
    cut(64)
    check(square(lens=(130, 0, 200), tail=3, gates="mild", **fields))


def test_flashqla_segments_backward_of_any_sign(cut: Any) -> None:
    cut(64)
    x = square(gates="mild", H=2, HV=6)
    x["beta"] = any_sign(x["beta"])
    check(x)


@pytest.mark.parametrize("T", [1, 64, 127, 128, 129, 192, 256, 257])
def test_flashqla_segments_backward_of_every_length(T: int, cut: Any) -> None:
    cut(128)
    check(square(T=T, gates="mild"))


@pytest.mark.parametrize("state", ["float64", "bfloat16", None])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("loss", ["both", "o", "final_state"])
def test_flashqla_segments_backward_and_states(
    state: str | None, v_first: bool, loss: str, cut: Any
) -> None:
    cut(64)
    fields = {"state_dtype": state, "state_v_first": v_first, "gates": "mild"}
    bound = EXACT if state != "bfloat16" else GRADIENT_BOUNDS["bfloat16"]  # that of dh0
    check(square(lens=(0, 200, 64, 65), **fields), bound, loss)


def test_flashqla_segments_backward_of_empty_sequences(cut: Any) -> None:
    """Their states pass through, and so do the states' gradients."""
    cut(64)
    for lens in ((0, 0), (0, 130, 0)):
        x = square(lens=lens, tail=70)
        _, dht = make_output_gradients(x)
        got = check(x)
        for n, length in enumerate(lens):
            assert length or torch.equal(got["initial_state"][n], dht[n].to(got["initial_state"]))
        assert all((got[name][:, sum(lens) :] == 0).all() for name in ("q", "k", "v", "g", "beta"))


@pytest.mark.parametrize(
    ("names", "kernels"),
    [
        (("q",), [*STATES, "states", "gradients"]),
        (("v",), [*BOTH, "reverse"]),
        (("v", "initial_state"), [*BOTH, "reverse"]),
        (("k",), CUT),
        (("g", "beta"), CUT),
    ],
    ids=lambda x: "-".join(x),
)
def test_flashqla_segments_backward_launch_what_is_asked_for(
    names: tuple[str, ...], kernels: list[str], cut: Any
) -> None:
    launched = cut(64)
    check(square(lens=(200, 65), tail=3, gates="mild"), names=names)
    assert launched == [*FORWARD, *kernels]


@pytest.mark.parametrize("mode", ["exact", "auto"])
def test_flashqla_segments_backward_do_not_leak(
    mode: str, cut: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in one sequence, in its states and in rows of nobody."""
    monkeypatch.setenv("FLA_FLASH_QLA_CP", mode)
    cut(64)
    x = square(lens=(100, 130, 150), tail=60)
    do, dht = make_output_gradients(x)
    want = gradients(x, do, dht)
    for tensor in (*(x[n] for n in ("q", "k", "v", "g", "beta")), do):
        tensor[:, 100:230] = torch.nan
        tensor[:, 380:] = torch.nan
    x["initial_state"][1] = dht[1] = torch.nan
    with poisoned_memory():
        got = gradients(x, do, dht)
    assert torch.equal(got["initial_state"][::2], want["initial_state"][::2])
    for name in ("q", "k", "v", "g", "beta"):
        for rows in (slice(100), slice(230, None)):
            assert torch.equal(got[name][:, rows], want[name][:, rows]), name


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch, cut: Any) -> dict[str, tuple[Any, ...]]:
    """Those of the last launch of each kernel that makes maps."""
    seen: dict[str, tuple[Any, ...]] = {}
    for module, name in (("build", "segments"), ("build_backward", "reverse_segments")):
        made = getattr(segments, module)(None)

        def spy(*args: Any, name: str = name, made: Any = made) -> None:
            getattr(made, name)(*args)
            seen[name] = args

        spied = made._replace(**{name: spy})
        monkeypatch.setattr(segments, module, lambda plan, spied=spied: spied)
    return seen


def test_flashqla_segments_backward_keep_what_counts(
    cut: Any, arguments: dict[str, tuple[Any, ...]]
) -> None:
    """Per segment and head: for states the last chunks decide, for their gradients the first."""
    cut(128)
    x = square(T=512, gates="zero", HV=4)
    x["g"][:, 70:80, 0] = -5.0  # head 0: the second chunk of the first segment
    x["g"][:, 130:140, 1] = -5.0  # head 1: the first chunk of the second segment
    x["g"][:, :, 2] = -0.9  # head 2: always
    x["g"][:, 450:460, 3] = -5.0  # head 3: the second chunk of the last segment
    check(x)
    phi, kept = arguments["segments"][6:8]
    # 1 for states, 2 for gradients, of which there is none in front of the first segment
    assert kept[:3].tolist() == [[0, 1, 0, 1], [3, 0, 0, 3], [3, 3, 0, 3]]
    assert phi[:3].isnan().flatten(2).all(-1).equal(kept[:3] == 0)
    local = arguments["reverse_segments"][9].view_as(phi)
    assert local[0].isnan().all() and not local[1:4].isnan().any()


def test_flashqla_segments_backward_drop_from_either_side(
    cut: Any, arguments: dict[str, tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a gate is positive, only one side may see enough decay: each map is kept for what needs it."""
    cut(128)
    monkeypatch.setattr(segments, "threshold", lambda plan, dtype: -12.0)
    x = square(T=512, gates="zero")
    log2 = torch.tensor(2.0).log().item() / 64  # a token, of 1 a chunk
    x["g"][:, 128:192, 0], x["g"][:, 192:256, 0] = 2 * log2, -13 * log2  # the second segment
    x["g"][:, 128:192, 1], x["g"][:, 192:256, 1] = -13 * log2, 2 * log2
    check(x, 1e-3)
    phi, kept = arguments["segments"][6:8]
    assert kept[:3].tolist() == [[1, 1], [2, 1], [3, 3]]
    assert not phi[:3].isnan().any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_flashqla_segments_backward_drop_less_than_rounding(
    dtype: str, cut: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest decay that is dropped, in front of large states and large gradients of them."""
    limit = segments.threshold(PLAN, getattr(torch, dtype))
    threshold = segments.threshold
    x = square(T=256, gates="zero")
    x["g"] += (limit - 1e-3) * torch.tensor(2.0).log().item() / 64
    x["initial_state"] *= 100
    do, dht = make_output_gradients(x)
    cut(64)
    for factor in (1, 100):
        want = oracle_gradients(x, do, factor * dht)
        monkeypatch.setattr(
            segments, "threshold", lambda plan, _: threshold(plan, getattr(torch, dtype))
        )
        compare(gradients(x, do, factor * dht), want, GRADIENT_BOUNDS[dtype] / 10)


@pytest.mark.parametrize("forward", [0, 64])
@pytest.mark.parametrize("shares", [1, 2])
def test_flashqla_segments_backward_of_their_own(shares: int, forward: int, cut: Any) -> None:
    """Length and blocks of a head do not depend on the forward's, nor does what is computed."""
    launched = cut(128, segment=forward, segment_splits=2, splits=2, backward_splits=shares)
    check(square(T=300, gates="mild"))
    ahead = ["prepare", *STATES * bool(forward), "forward_halves"]
    suffix = "_halves" if shares == 2 else ""
    assert launched == [*ahead, *BOTH, "states" + suffix, "reverse" + suffix, "gradients"]


# The switch, and what happens if segments cannot run


def test_flashqla_segments_backward_off(cut: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = cut(64, segment=64)
    monkeypatch.setenv("FLA_FLASH_QLA_CP", "off")
    check(square())
    assert launched == [*FORWARD, *WHOLE]


def broken(*_: Any) -> None:
    raise RuntimeError("bad launch")


@pytest.mark.parametrize("place", ["build", "rehearse", "build_backward", "rehearse_backward"])
def test_flashqla_segments_backward_that_cannot_run(
    place: str, cut: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Sequences stay whole then, in the same call and in all others; those of the forward only if they cannot run."""
    launched = cut(64, segment=64)
    monkeypatch.setattr(segments, place, broken)
    for _ in range(2):
        check(square())
    ahead = ["prepare", *STATES * place.endswith("backward"), "forward"]
    assert launched == [*ahead, *WHOLE] * 2
    warnings = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1 and "sequences stay whole" in warnings[0]


def test_flashqla_segments_backward_while_a_graph_is_captured(
    cut: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not loaded yet is not used."""
    launched = cut(0)
    check(square())
    cut(64)
    for capturing in (True, False, True):
        monkeypatch.setattr(api, "capturing", lambda capturing=capturing: capturing)
        check(square())
    assert launched == [*FORWARD, *WHOLE] * 2 + [*FORWARD, *CUT] * 2


# The choice


def test_flashqla_segments_backward_where_they_pay() -> None:
    """Few heads and long sequences; nothing to be won where chains fill the GPU or chunks are few."""
    for HV, T in ((8, 32768), (8, 8192), (4, 8192), (16, 32768), (1, 2**20)):
        tokens, shares = segment(alike_lengths(T, 1), HV, 132, BACKWARD)
        assert tokens % 64 == 0 and 0 < tokens < T
        count = -(-T // tokens)
        assert shares == splits(count * HV, 132) and count <= 64
    for HV, T, N in (
        (32, 32768, 1),
        (16, 8192, 1),
        (8, 8192, 4),
        (8, 64, 1),
        (1, 1, 1),
        (8, 1024, 8),
    ):
        assert segment(alike_lengths(T, N), HV, 132, BACKWARD) == (0, 1)
    assert segment(alike_lengths(2**31 - 193, 1), 1, 132, BACKWARD)[0] > 0
    assert segment(alike_lengths(8192, 1), 8, 0, BACKWARD) == (0, 1)


def test_flashqla_segments_backward_only_where_one_follows() -> None:
    call = describe(**make_inputs(Case(H=2, HV=8, T=64, state_dtype=None)))
    call = call._replace(device_type="cuda", device_index=0, sm=(9, 0), sms=132, T=32768)
    inference, trained = plan(call), plan(call._replace(needs_grad=True))
    assert isinstance(inference, Plan) and isinstance(trained, Plan)
    assert not inference.backward_segment and trained.backward_segment
    assert trained.segment == inference.segment
    assert trained.steps == ("forward", "segments", "backward_segments", "backward")
    assert trained.without("backward_segments").steps == ("forward", "segments", "backward")
    assert trained.without("segments").steps == ("forward", "backward")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shares", [1, 2])
def test_flashqla_segments_backward_launches_fit_the_kernels(
    dtype: str, shares: int, monkeypatch: pytest.MonkeyPatch, launched: list[str]
) -> None:
    pytest.importorskip("tilelang", reason="needs TileLang")
    from fla_flashqla.kernels import reverse, states

    seen: list[str] = []
    cut = fitting_segments(dtype, seen)
    ends = segments.ReverseSegmentKernels(
        fitting("reverse_segments", reverse.reverse_kernel(dtype, local=True), seen),
    )
    models = kernel_models.BACKWARD._replace(
        states=fitting("states", states.states_kernel(dtype, 2), seen),
        states_halves=fitting("states_halves", states.states_kernel(dtype, 1), seen),
        reverse=fitting("reverse", reverse.reverse_kernel(dtype, 2), seen),
        reverse_halves=fitting("reverse_halves", reverse.reverse_kernel(dtype, 1), seen),
    )
    monkeypatch.setattr(segments, "build", lambda plan: cut)
    monkeypatch.setattr(segments, "build_backward", lambda plan: ends)
    monkeypatch.setattr(chunk, "build_backward", lambda plan: models)
    planned = Plan(
        *("sm90", dtype, "float32", "float32"),
        gradients=True,
        backward_segment=64,
        backward_splits=shares,
    )
    monkeypatch.setattr(api, "plan", lambda call: planned)
    REHEARSE(planned, torch.device("cpu"))
    for fields in ({"B": 2, "T": 66}, {"lens": (130, 1), "tail": 3, "cu_dtype": "int64"}):
        x = make_inputs(Case(H=1, HV=2, dtype=dtype, **fields))
        for names in (EVERY, ("q",), ("v",)):
            check(x, GRADIENT_BOUNDS[dtype], names=names)
    suffix = "_halves" if shares == 2 else ""
    chains = ["states" + suffix, "reverse" + suffix]
    once = [*BOTH, *chains, *STATES, chains[0], *BOTH, chains[1]]
    assert seen == [*BOTH, *once * 2]
