# SPDX-License-Identifier: MIT
"""`dispatch_report`: counters, their bounds, and how FLA reaches us."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator

import pytest

import fla_flashqla
from fla_flashqla import backend, compat, report
from fla_flashqla._autoload import TARGET
from fla_flashqla.backend import FlashQLABackend
from fla_flashqla.call import describe

BINDING = compat.Binding.between(describe, describe)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    fla_flashqla.reset_report()
    yield
    fla_flashqla.reset_report()


def test_flashqla_report_counts_and_resets() -> None:
    report.ran("a")
    report.ran("a")
    report.refused("b")
    report.reference_ran()
    counted = fla_flashqla.dispatch_report()
    assert counted.pop("reach")
    assert counted == {"ran": {"a": 2}, "refused": {"b": 1}, "reference": 1, "self_check": {}}
    counted["ran"]["a"] = 0  # a copy
    assert fla_flashqla.dispatch_report()["ran"] == {"a": 2}
    fla_flashqla.reset_report()
    assert fla_flashqla.dispatch_report()["ran"] == {}


def test_flashqla_report_keeps_self_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_self_checks", {})
    report.self_checked("a", "found")
    fla_flashqla.reset_report()
    counted = fla_flashqla.dispatch_report()["self_check"]
    assert counted == {"a": "found"}
    counted.clear()  # a copy
    assert fla_flashqla.dispatch_report()["self_check"]


def test_flashqla_report_is_bounded() -> None:
    for i in range(2 * report.MAX_REASONS):
        report.refused(f"reason {i}")
    report.refused("reason 0")
    refused = fla_flashqla.dispatch_report()["refused"]
    assert len(refused) == report.MAX_REASONS + 1 and refused["reason 0"] == 2
    assert refused[report.OVERFLOW] == report.MAX_REASONS


def test_flashqla_report_is_exact_with_threads() -> None:
    def count() -> None:
        for _ in range(2000):
            report.ran("threads")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fla_flashqla.dispatch_report()["ran"] == {"threads": 8000}


def test_flashqla_report_names_the_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (TARGET, *compat.DISPATCH_MODULES):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert fla_flashqla.dispatch_report()["reach"].startswith("not reached: FLA's operator is not")
    monkeypatch.setitem(sys.modules, TARGET, types.ModuleType(TARGET))
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    assert "FLA_DISABLE_BACKEND_DISPATCH=1" in backend.reach()


def test_flashqla_report_of_a_backend_that_was_displaced(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = types.SimpleNamespace(_backends={"flash_qla": FlashQLABackend(BINDING)})
    monkeypatch.setitem(sys.modules, TARGET, types.ModuleType(TARGET))
    monkeypatch.setattr(backend, "_registry", registry)
    monkeypatch.setattr(compat, "dispatch_disabled", lambda: False)
    monkeypatch.setattr(backend, "_misfit", "")
    assert "registry" in backend.reach()
    registry._backends["flash_qla"] = object()
    assert "came later" in backend.reach()
