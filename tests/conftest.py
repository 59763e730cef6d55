# SPDX-License-Identifier: MIT
"""Markers that skip with a reason, the seed, and which copy on which machine is tested."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
from pathlib import Path

import pytest
import torch
from compiler import nvcc

import fla_flashqla

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
    if marker == "sm90" and torch.cuda.get_device_capability(0) != (9, 0):
        return f"needs a GPU of SM 9.0, got {_gpu()}"
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


@pytest.fixture(autouse=True)
def seed() -> int:
    """The seed that every test starts from."""
    torch.manual_seed(0)
    return 0
