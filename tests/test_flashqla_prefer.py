# SPDX-License-Identifier: MIT
"""The kept backend of flash_qla gets the calls that it takes where ours was not measured, or as the user says."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

import fla_flashqla
from fla_flashqla import api, arch, compat, env
from fla_flashqla.backend import FlashQLABackend
from fla_flashqla.call import describe
from fla_flashqla.plan import Plan

PLAN = Plan("new", "bfloat16", "float32", "float32")
AUTO = "flash_qla is preferred on NEW, where ours was not measured (FLA_FLASH_QLA_PREFER=auto)"
ASKED = "flash_qla is preferred (FLA_FLASH_QLA_PREFER=flash_qla)"
X = torch.zeros(1, 1, 1, 128)
CALL = {"k": X, "v": X, "g": X[..., 0], "beta": X[..., 0]}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setattr(api, "decide", lambda *bound: PLAN)
    fla_flashqla.reset_report()
    yield
    fla_flashqla.reset_report()


@pytest.fixture
def kept() -> MagicMock:
    """Is there and takes every call."""
    return MagicMock(**{"verify.return_value": (True, None)})


@pytest.fixture
def ours(kept: MagicMock) -> FlashQLABackend:
    made = FlashQLABackend(compat.Binding.between(describe, describe))
    made.kept = kept
    return made


def on(monkeypatch: pytest.MonkeyPatch, supported: bool = True, measured: bool = False) -> None:
    """CPU tensors look like those of such a GPU."""
    row = replace(arch.ARCHS[9, 0], name="new", supported=supported, measured=measured)
    monkeypatch.setitem(arch.ARCHS, (9, 9), row)
    facts = arch.DeviceFacts("cuda", 0, (9, 9), False)
    monkeypatch.setattr(arch, "device_facts", lambda device: facts)


@pytest.mark.parametrize(
    ("prefer", "measured", "reason"),
    [
        (None, False, AUTO),
        (None, True, None),
        ("nonsense", False, AUTO),
        ("ours", False, None),
        ("flash_qla", False, ASKED),
        ("flash_qla", True, ASKED),
    ],
)
def test_flashqla_prefer(
    prefer: str | None,
    measured: bool,
    reason: str | None,
    ours: FlashQLABackend,
    kept: MagicMock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if prefer is not None:
        monkeypatch.setenv("FLA_FLASH_QLA_PREFER", prefer)
    on(monkeypatch, measured=measured)
    assert ours.chunk_gated_delta_rule_verifier(X, scale=2.0, **CALL) == (reason is None, reason)
    assert fla_flashqla.dispatch_report()["refused"] == ({reason: 1} if reason else {})
    if reason:
        kept.verify.assert_called_once_with("chunk_gated_delta_rule", X, scale=2.0, **CALL)


@pytest.mark.parametrize(
    "change",
    [
        {"is_available.return_value": False},
        {"is_enabled.return_value": False},
        {"verify.return_value": (False, "no")},
    ],
)
def test_flashqla_prefer_what_takes_the_call(
    change: dict[str, Any],
    ours: FlashQLABackend,
    kept: MagicMock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on(monkeypatch)
    kept.configure_mock(**change)
    assert ours.chunk_gated_delta_rule_verifier(X, **CALL) == (True, None)


def test_flashqla_prefer_ours_when_strict(
    ours: FlashQLABackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch)
    monkeypatch.setenv("FLA_FLASH_QLA_STRICT", "1")
    assert ours.chunk_gated_delta_rule_verifier(X, **CALL) == (True, None)


@pytest.mark.parametrize("prefer", ["auto", "flash_qla"])
def test_flashqla_prefer_is_for_gpus_of_ours(
    prefer: str, ours: FlashQLABackend, kept: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere the planner's own reason counts, and a CPU has the reference."""
    monkeypatch.setenv("FLA_FLASH_QLA_PREFER", prefer)
    assert ours.chunk_gated_delta_rule_verifier(q=X, **CALL) == (True, None)
    on(monkeypatch, supported=False)
    assert ours.chunk_gated_delta_rule_verifier(q=X, **CALL) == (True, None)
    assert ours.chunk_gated_delta_rule_verifier(q=None, **CALL) == (True, None)
    assert not kept.verify.called


def test_flashqla_prefer_knows_whose_place_we_took(monkeypatch: pytest.MonkeyPatch) -> None:
    backends: dict[str, Any] = {"flash_qla": types.SimpleNamespace(backend_type="flash_qla")}
    theirs = backends["flash_qla"]
    registry = types.SimpleNamespace(
        _backends=backends, register=lambda b: backends.update({b.backend_type: b})
    )
    new = FlashQLABackend(compat.Binding.between(describe, describe))
    assert new.kept is None and compat.seat(registry, new) is theirs
    assert backends == {"flash_qla": new, "flash_qla_package": theirs}
    assert compat.seat(types.SimpleNamespace(register=lambda b: None), new) is None


def test_flashqla_prefer_hopper_is_measured() -> None:
    assert arch.ARCHS[9, 0].measured
    assert all(row.proven or not row.measured for row in arch.ARCHS.values())
