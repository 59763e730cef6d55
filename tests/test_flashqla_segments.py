# SPDX-License-Identifier: MIT
"""Sequences in segments: the choice, and the whole path with models for kernels against the reference in float64; no GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import kernel_models
import pytest
import torch
from gpu_helpers import LAYER, poisoned_memory
from model_helpers import (
    EXACT,
    PLAN,
    alike_lengths,
    compare,
    fitting,
    fitting_segments,
    gradients,
    small,
)

import fla_flashqla
from fla_flashqla import (
    api,
    arch,
    chunk,
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_fwd,
    segments,
)
from fla_flashqla.call import describe
from fla_flashqla.plan import Plan, plan, segment, splits
from fla_flashqla.testing import (
    BOUNDS,
    Case,
    make_inputs,
    make_output_gradients,
    oracle,
    oracle_gradients,
    relative_error,
)

LENS = (0, 1, 63, 0, 0, 64, 65, 127, 128, 129, 300, 0)
ROWS = ("q", "k", "v", "g", "beta")
SM90_CALL = {"device_type": "cuda", "device_index": 0, "sm": (9, 0), "sms": 132}
REHEARSE = segments.rehearse


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> Any:
    """Every call gets segments of that many tokens, kernels take float64 and any head size with K = V."""

    def cut(tokens: int, **fields: Any) -> list[str]:
        planned = replace(PLAN, gradients=False, segment=tokens, **fields)
        monkeypatch.setattr(api, "plan", lambda call: planned)
        return launched

    return cut


def square(**fields: Any) -> dict[str, Any]:
    return small(**{"V": 8, "T": 300, **fields})


def check(inputs: dict[str, Any], bound: float = EXACT) -> None:
    with poisoned_memory(), torch.no_grad():
        o, ht = chunk_gated_delta_rule(**inputs)
    want, want_ht = oracle(inputs)
    end = None if inputs.get("cu_seqlens") is None else int(inputs["cu_seqlens"][-1])
    assert relative_error(o[:, :end], want[:, :end]) <= bound
    if ht is not None:
        assert relative_error(ht, want_ht) <= bound
    assert end is None or (o[:, end:] == 0).all()


@pytest.mark.parametrize("mode", ["exact", "auto"])
@pytest.mark.parametrize("gates", ["strong", "published", "zero"])
@pytest.mark.parametrize("tokens", [64, 128, 192])
def test_flashqla_segments(
    tokens: int, gates: str, mode: str, cut: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLA_FLASH_QLA_CP", mode)
    launched = cut(tokens)
    check(square(lens=LENS, tail=9, gates=gates))
    check(square(B=3, gates=gates))
    assert launched == ["prepare", "segments", "combine", "forward"] * 2


@pytest.mark.parametrize("gates", ["strong", "mild"])
@pytest.mark.parametrize(
    "flags",
    [LAYER, {"raw_g": "no_bias"}, {"raw_beta": 1, "scale": -0.3}],
    ids=["layer", "g", "beta"],
)
def test_flashqla_segments_of_made_gates_and_betas(
    flags: dict[str, Any], gates: str, cut: Any
) -> None:
    launched = cut(128)
    check(square(lens=LENS, tail=9, gates=gates, **flags))
    check(square(B=3, gates=gates, **flags))
    assert launched == ["prepare", "segments", "combine", "forward"] * 2


@pytest.mark.parametrize("T", [1, 64, 127, 128, 129, 192, 256, 257, 384])
def test_flashqla_segments_of_every_length(T: int, cut: Any) -> None:
    cut(128)
    check(square(T=T, gates="mild"))
    check(square(T=T, B=2, gates="mild", state_dtype=None))


@pytest.mark.parametrize("state", ["float64", "bfloat16", None])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("final", [False, True])
def test_flashqla_segments_and_states(
    state: str | None, v_first: bool, final: bool, cut: Any
) -> None:
    cut(64)
    fields = {"state_dtype": state, "state_v_first": v_first, "output_final_state": final}
    check(square(lens=(0, 200, 64, 65), gates="mild", **fields))
    check(square(B=2, T=130, gates="mild", **fields))


def test_flashqla_segments_of_empty_batches(cut: Any) -> None:
    cut(64)
    x = square(lens=(0, 0), tail=70)
    _, ht = chunk_gated_delta_rule(**x)
    assert torch.equal(ht, x["initial_state"].float())


@pytest.mark.parametrize("mode", ["exact", "auto"])
def test_flashqla_segments_do_not_leak(
    mode: str, cut: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in one sequence, in its state and in rows of nobody."""
    monkeypatch.setenv("FLA_FLASH_QLA_CP", mode)
    cut(64)
    x = square(lens=(100, 130, 150), tail=60)
    o, ht = chunk_gated_delta_rule(**x)
    for name in ROWS:
        x[name][:, 100:230] = torch.nan
        x[name][:, 380:] = torch.nan
    x["initial_state"][1] = torch.nan
    with poisoned_memory():
        o_n, ht_n = chunk_gated_delta_rule(**x)
    for rows in (slice(100), slice(230, None)):
        assert torch.equal(o[:, rows], o_n[:, rows])
    assert (
        torch.equal(ht[::2], ht_n[::2]) and ht_n[1].isnan().all() and o_n[:, 100:230].isnan().all()
    )


def maps_of(plan: Plan, x: dict[str, Any], launched: list[str]) -> tuple[torch.Tensor, ...]:
    """`local`, `phi` and `kept` of a call."""
    seen: list[torch.Tensor] = []
    made = segments.build(plan)

    def spy(*args: Any) -> None:
        made.segments(*args)
        seen.extend(args[5:8])

    patch = pytest.MonkeyPatch()
    patch.setattr(segments, "build", lambda plan: made._replace(segments=spy))
    with poisoned_memory(), torch.no_grad():
        chunk_gated_delta_rule(**x)
    patch.undo()
    return tuple(seen)


def test_flashqla_segments_keep_what_counts(cut: Any, launched: list[str]) -> None:
    """Per segment and head: states that have decayed are dropped, their maps not even made."""
    cut(128)
    x = square(T=512, gates="zero")
    x["g"][:, 70:80, 0] = -5.0  # head 0: the second chunk of the first segment
    x["g"][:, 130:140, 1] = -5.0  # head 1: the first chunk of the second segment
    x["g"][:, :, 2] = -0.9  # head 2: always
    local, phi, kept = maps_of(PLAN, x, launched)
    assert kept[:3].tolist() == [[0, 1, 0, 1], [1, 0, 0, 1], [1, 1, 0, 1]]
    assert phi[:3].isnan().flatten(2).all(-1).equal(kept[:3] == 0)
    assert not local[:3].isnan().any()
    check(x)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_flashqla_segments_drop_less_than_rounding(dtype: str, cut: Any) -> None:
    """The largest decay that is dropped, in front of a large state."""
    plan = replace(PLAN, segment=64)
    limit = segments.threshold(plan, getattr(torch, dtype))
    assert limit == {"bfloat16": -16, "float16": -19}[dtype]
    assert segments.threshold(replace(plan, exact=True), torch.float64) == -torch.inf
    x = square(T=256, gates="zero", H=1, HV=2)
    x["g"] += (limit - 1e-3) * torch.tensor(2.0).log().item() / 64
    x["initial_state"] *= 100
    threshold = segments.threshold
    patch = pytest.MonkeyPatch()
    patch.setattr(segments, "threshold", lambda plan, _: threshold(plan, getattr(torch, dtype)))
    cut(64)
    check(x, BOUNDS[dtype] / 10)
    patch.undo()


@pytest.mark.parametrize(("beta", "size"), [(-1.0, 1.0), (21.0, 1.0), (0.1, 210**0.5)])
def test_flashqla_segments_keep_what_grows_as_it_decays(beta: float, size: float, cut: Any) -> None:
    """Betas below 0 or long keys can enlarge a state by as much as its decay shrinks it."""
    cut(64)
    x = square(T=256, H=1, HV=1, gates="zero")
    x["k"] = size * torch.eye(1, 8).to(x["k"]).expand_as(x["k"])
    x["beta"] = torch.full_like(x["beta"], beta)
    x["g"] -= torch.tensor(1 - beta * size**2).abs().log()
    x["v"] = torch.zeros_like(x["v"])
    check(x, 1e-5)
    assert relative_error(chunk_gated_delta_rule(**x)[0], 0 * x["v"]) > 0.1  # it is still there


@pytest.mark.parametrize("flags", [{}, LAYER], ids=["plain", "layer"])
def test_flashqla_segments_under_a_backward(
    flags: dict[str, Any], cut: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = cut(64)
    planned = replace(api.plan(None), gradients=True)  # type: ignore[arg-type]
    monkeypatch.setattr(api, "plan", lambda call: planned)
    x = square(T=200, gates="mild", **flags)
    do, dht = make_output_gradients(x)
    compare(gradients(x, do, dht), oracle_gradients(x, do, dht))
    whole = ["states", "reverse", "gradients"]
    assert launched == ["prepare", "segments", "combine", "forward", *whole]


@pytest.mark.parametrize("forward", [1, 2])
@pytest.mark.parametrize("backward", [1, 2])
def test_flashqla_segments_share_heads_of_their_own(
    forward: int, backward: int, cut: Any, launched: list[str]
) -> None:
    """How many blocks take a head differs between segments and the backward's whole sequences."""
    cut(64, splits=backward, segment_splits=forward)
    check(square(T=200))
    assert launched[-1] == ("forward" if forward == 1 else "forward_halves")
    assert api.plan(None).blocks("backward") == backward  # type: ignore[arg-type]


# The switch, and what happens if segments cannot run

WHOLE = ["prepare", "forward"]


def test_flashqla_segments_off(cut: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = cut(64)
    monkeypatch.setenv("FLA_FLASH_QLA_CP", "off")
    check(square())
    assert launched == WHOLE


def broken(*_: Any) -> None:
    raise RuntimeError("bad launch")


@pytest.mark.parametrize("place", ["build", "rehearse"])
def test_flashqla_segments_that_cannot_run(
    place: str, cut: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Sequences stay whole then, in the same call and in all others."""
    launched = cut(64)
    monkeypatch.setattr(segments, place, broken)
    for _ in range(2):
        check(square())
    assert launched == WHOLE * 2
    warnings = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1 and "sequences stay whole" in warnings[0]
    assert not fla_flashqla.dispatch_report()["refused"]


def test_flashqla_segments_while_a_graph_is_captured(
    cut: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not loaded yet is not used."""
    launched = cut(0)
    check(square())
    cut(64)
    monkeypatch.setattr(api, "capturing", lambda: True)
    check(square())
    monkeypatch.setattr(api, "capturing", lambda: False)
    check(square())
    monkeypatch.setattr(api, "capturing", lambda: True)
    check(square())
    assert launched == WHOLE * 2 + ["prepare", "segments", "combine", "forward"] * 2


@pytest.mark.usefixtures("launched")
def test_flashqla_segments_are_rehearsed_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """TileLang's launches make their device the current one, for good unless somebody restores it."""
    current: list[int | None] = [1]  # the index of a CPU tensor is None
    seen: list[int | None] = []

    @contextlib.contextmanager
    def switched(device: torch.device) -> Iterator[None]:
        current.append(device.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", switched)
    monkeypatch.setattr(segments, "starts", lambda *_: seen.append(current[-1]))
    monkeypatch.setattr(segments, "rehearse", REHEARSE)
    segments.rehearse(replace(PLAN, segment=64), torch.device("cpu"))
    assert seen == [None] and current == [1]


# The choice


def test_flashqla_segments_where_they_pay() -> None:
    """Few heads and long sequences; nothing to be won where chains fill the GPU or chunks are few."""
    for HV, T in ((8, 32768), (8, 8192), (16, 32768), (1, 2**20), (32, 32768)):
        tokens, shares = segment(alike_lengths(T, 1), HV, 132)
        assert tokens % 64 == 0 and 0 < tokens < T
        count = -(-T // tokens)
        assert shares == splits(count * HV, 132) and count <= 64
    for HV, T, N in (
        (64, 32768, 1),
        (32, 32768, 4),
        (8, 64, 1),
        (1, 1, 1),
        (8, 1024, 8),
        (8, 0, 1),
    ):
        assert segment(alike_lengths(T, N), HV, 132) == (0, 1)
    assert segment(alike_lengths(2**31 - 193, 1), 1, 132)[0] > 0
    assert segment(alike_lengths(8192, 1), 8, 0) == (0, 1)


def test_flashqla_segments_where_the_longest_sequence_is_known() -> None:
    """`cu_seqlens_cpu` says; without it two sequences count as cut anywhere, and more as equally long."""

    def cut(HV: int, lens: tuple[int, ...], known: Any) -> bool:
        T, one = sum(lens), torch.zeros(1, dtype=torch.bfloat16)
        cu = torch.tensor([0, *lens]).cumsum(0)
        call = describe(
            *(one.expand(1, T, HV, 128),) * 3,
            *(one.expand(1, T, HV),) * 2,
            cu_seqlens=cu,
            cu_seqlens_cpu=cu if known is True else known,
        )
        made = plan(call._replace(**SM90_CALL))
        assert isinstance(made, Plan)
        return made.segment > 0

    alike, unlike = (8192,) * 4, (28672, 0, 3072, 1024)
    for unread in (None, torch.tensor([0, sum(unlike)])):  # the latter belongs to other sequences
        assert not cut(16, alike, unread) and not cut(16, unlike, unread)
    assert not cut(16, alike, True) and cut(16, unlike, True)
    assert cut(24, (16384, 16384), None) and not cut(40, (16384, 16384), True)
    assert cut(24, (4096, 28672), True)


def test_flashqla_segments_never_outnumber_their_slots() -> None:
    for tokens in (64, 192, 4096):
        for lens in ((0,) * 5, (1,) * 9, (tokens,) * 3, (tokens + 1, 0, 63, 5 * tokens), LENS):
            cu = torch.tensor([0, *lens]).cumsum(0)
            found = [p.slot for p in kernel_models.pieces(cu, 0, 1, len(lens), tokens)]
            assert found == sorted(set(found)) and found[-1] < segments.slots(
                tokens, sum(lens), len(lens)
            )
    assert segments.slots(0, 1000, 3) == 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shares", [1, 2])
def test_flashqla_segments_launches_fit_the_kernels(
    dtype: str, shares: int, monkeypatch: pytest.MonkeyPatch, launched: list[str]
) -> None:
    pytest.importorskip("tilelang", reason="needs TileLang")
    from fla_flashqla.kernels import forward

    seen: list[str] = []
    cut = fitting_segments(dtype, seen)
    whole, halves = (fitting("forward", forward.forward_kernel(dtype, n), seen) for n in (2, 1))
    models = kernel_models.FORWARD._replace(forward=whole, forward_halves=halves)
    monkeypatch.setattr(segments, "build", lambda plan: cut)
    monkeypatch.setattr(chunk, "build", lambda plan: models)
    planned = Plan("sm90", dtype, "float32", "float32", segment=64, segment_splits=shares)
    monkeypatch.setattr(api, "plan", lambda call: planned)
    REHEARSE(planned, torch.device("cpu"))
    for fields in ({"B": 2, "T": 66}, {"lens": (130, 1), "tail": 3, "cu_dtype": "int64"}):
        check(make_inputs(Case(H=1, HV=2, dtype=dtype, **fields)), BOUNDS[dtype])
    assert seen == ["segments", "combine", *["segments", "combine", "forward"] * 2]
    assert arch.device_facts(torch.device("cpu")).sms == 132


def test_flashqla_segments_of_the_low_level(cut: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rehearsed as the operator's, and left out where that fails."""
    launched = cut(128)
    x = square(lens=LENS, tail=9)
    want, want_ht = oracle(x)
    names = ("q", "k", "v", "g", "beta", "scale", "initial_state", "cu_seqlens")

    def broken(*_: Any) -> None:
        raise RuntimeError("bad launch")

    for rehearse, kernels in (
        (lambda *_: None, ["prepare", "segments", "combine", "forward"]),
        (broken, ["prepare", "forward"]),
    ):
        monkeypatch.setattr(api, "_kernels", {})
        monkeypatch.setattr(segments, "rehearse", rehearse)
        launched.clear()
        with poisoned_memory():
            kept = chunk_gated_delta_rule_fwd(**{n: x[n] for n in names})
        assert launched == kernels
        compare(dict(enumerate((kept.o, kept.final_state))), dict(enumerate((want, want_ht))))
        assert kept.g.isfinite().all()  # from a gate that the backward alone reads
