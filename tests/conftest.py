# SPDX-License-Identifier: MIT
"""Markers that skip with a reason, the seed, and which copy on which machine is tested."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kernel_models
import pytest
import torch
from compiler import nvcc

import fla_flashqla
from fla_flashqla import api, arch, chunk, segments

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(fla_flashqla.__file__).resolve().parent


def pytest_configure(config: pytest.Config) -> None:
    if PACKAGE.parent != ROOT:
        # Child processes of tests must take the installed copy too, not the tree they start in.
        os.environ["PYTHONSAFEPATH"] = "1"


def pytest_report_header(config: pytest.Config) -> list[str]:
    try:
        point = next(
            p.value
            for p in importlib.metadata.entry_points(group="torch.backends")
            if p.name == "fla_flashqla"
        )
    except StopIteration:
        point = "none: not installed"
    return [
        f"fla_flashqla: {fla_flashqla.__version__} in {PACKAGE}, entry point {point}",
        f"torch: {torch.__version__}, GPU: {_gpu() or 'none'}, nvcc: {nvcc() or 'none'}",
    ]


@functools.cache
def _gpu() -> str | None:
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(0)
    count = torch.cuda.device_count()
    return f"{count} x {torch.cuda.get_device_name(0)} (SM {major}.{minor})"


def _skip_reason(marker: str) -> str | None:
    if marker in ("gpu", "sm90") and _gpu() is None:
        return "needs an NVIDIA GPU, PyTorch finds none"
    if marker == "sm90" and arch.row(torch.device("cuda", 0)) is None:
        return f"needs a GPU that calls are taken on, got {_gpu()}"
    if marker == "compile" and nvcc() is None:
        return "needs nvcc, and TileLang would find none"
    if marker == "compile" and importlib.util.find_spec("tilelang") is None:
        return "needs TileLang, which is not installed"
    if marker == "fla" and importlib.util.find_spec("fla") is None:
        return "needs flash-linear-attention, which is not installed"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in ("gpu", "sm90", "compile", "fla"):
            if item.get_closest_marker(marker) and (reason := _skip_reason(marker)):
                item.add_marker(pytest.mark.skip(reason=reason))
                break


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the compiler made of each kernel that was compiled."""
    rows: list[dict[str, object]] = []
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.getreports(kind)]
    for report in reports:
        made = report.user_properties if report.when == "call" else []
        for name, value in made if "kernel" in dict(made) else []:
            if name == "kernel":  # a test may compile several
                rows.append({})
            rows[-1][name] = value
    if not rows:
        return
    terminalreporter.section("kernels, by ptxas, for sm_90a where no other is named")
    text = "{kernel:44}{registers:>10}{spilled:>9}{shared:>9}{wgmma:>12}  {notes}"
    titles = {"registers": "registers", "spilled": "spilled", "shared": "shared", "notes": "notes"}
    terminalreporter.line(text.format(kernel="", wgmma="wgmma (*)", **titles))
    for row in rows:
        terminalreporter.line(text.format(**row))
    terminalreporter.line("registers of a thread at launch; bytes spilled and of shared memory")
    terminalreporter.line("(*) in all, and with the left operand in registers")


@pytest.fixture(autouse=True)
def seed() -> int:
    """The seed that every test starts from."""
    torch.manual_seed(0)
    return 0


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """CPU tensors look like an SM90's, models answer for its kernels; the names of those launched."""
    from model_helpers import SM90

    names: list[str] = []

    def noted(kernels: Any) -> Any:
        def launch(name: str, kernel: Any) -> Any:
            return lambda *args: (names.append(name), kernel(*args))[1]

        return kernels._make(launch(n, k) for n, k in kernels._asdict().items())

    monkeypatch.setattr(arch, "device_facts", lambda device: SM90)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of a CPU tensor
    monkeypatch.setattr(api, "_kernels", {})
    forward, backward = noted(kernel_models.FORWARD), noted(kernel_models.BACKWARD)
    monkeypatch.setattr(chunk, "build", lambda plan: forward)
    monkeypatch.setattr(chunk, "build_backward", lambda plan: backward)
    cut, cut_backward = noted(kernel_models.SEGMENTS), noted(kernel_models.REVERSE_SEGMENTS)
    monkeypatch.setattr(segments, "build", lambda plan: cut)
    monkeypatch.setattr(segments, "build_backward", lambda plan: cut_backward)
    rehearsals = (
        (chunk, "rehearse_backward"),
        (segments, "rehearse"),
        (segments, "rehearse_backward"),
    )
    for module, name in rehearsals:
        monkeypatch.setattr(module, name, lambda plan, device: None)
    fla_flashqla.reset_report()
    yield names
    fla_flashqla.reset_report()


@pytest.fixture
def exact(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call gets `PLAN`, whose kernels take float64 and any head size."""
    from model_helpers import PLAN

    monkeypatch.setattr(api, "plan", lambda call: PLAN)
